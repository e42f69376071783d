"""Help texts for options of the command line: the docstrings of `LaunchConfig`'s fields, read from its source."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from typing import Any

__all__ = ["field_help"]


def field_help(kind: type[Any]) -> dict[str, str]:
    """Return the text below each field of a dataclass, by the field's name; empty where the source is missing."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    texts = {}
    for field, below in itertools.pairwise(body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = " ".join(text.replace("`", "").split())
    return texts
