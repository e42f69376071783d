"""The variables of a rank's `__main__`, as the notebook sets and reads them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["pull", "push"]


def push(values: Mapping[str, Any]) -> None:
    """Set variables on this rank."""
    vars(sys.modules["__main__"]).update(values)


def pull(expressions: tuple[str, ...]) -> Any:
    """Return the value of an expression on this rank; a tuple for several."""
    namespace = vars(sys.modules["__main__"])
    values = tuple(eval(expression.strip(), namespace) for expression in expressions)  # noqa: S307 - of the user
    return values[0] if len(values) == 1 else values
