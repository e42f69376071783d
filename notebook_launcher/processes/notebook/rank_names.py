"""The variables of a rank's `__main__`, as the notebook sets, reads, lists and completes them."""

from __future__ import annotations

import contextlib
import reprlib
import sys
import types
from typing import TYPE_CHECKING, Any

from notebook_launcher.processes.notebook.contents import PLAIN, fingerprint_of
from notebook_launcher.processes.notebook.rank_cells import shell_of_rank
from notebook_launcher.travel.rank_function import Completion, Variable
from notebook_launcher.wording.counts import plural

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["complete", "has", "inspect_name", "pull", "push", "remove", "variables"]

MAX_TEXT = 60


def push(values: Mapping[str, Any]) -> None:
    """Set variables on this rank."""
    _namespace().update(values)


def pull(expressions: tuple[str, ...]) -> Any:
    """Return the value of an expression on this rank; a tuple for several."""
    namespace = _namespace()
    values = tuple(eval(expression.strip(), namespace) for expression in expressions)  # noqa: S307 - of the user
    return values[0] if len(values) == 1 else values


def has(name: str) -> bool:
    """Return True if this rank has a variable of that name."""
    return name in _namespace()


def remove(name: str) -> None:
    """Remove a variable from this rank; raises `NameError` if there is none."""
    try:
        del _namespace()[name]
    except KeyError:
        raise NameError(f"name {name!r} is not defined") from None


def variables() -> dict[str, Variable]:
    """Return this rank's variables; modules and names with a leading underscore are left out."""
    found = {
        name: value
        for name, value in _namespace().items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    return {name: _described(value) for name, value in found.items()}


def complete(code: str, offset: int) -> list[Completion]:
    """Return what IPython's completer offers at a place in a cell on this rank."""
    from IPython.core.completer import IPCompleter, provisionalcompleter

    shell = shell_of_rank()
    completer: Any = IPCompleter(shell=shell, namespace=_namespace(), global_namespace=_namespace())
    completer.use_jedi = False  # Jedi reads the disk for every cell.
    with provisionalcompleter():
        found = list(completer.completions(code, offset))
    return [
        Completion(text=completion.text, start=completion.start, end=completion.end, kind=completion.type)
        for completion in found
    ]


def inspect_name(name: str, detail_level: int) -> Mapping[str, Any]:
    """Return what `name?` shows, as a bundle by MIME type; empty if there is no such name."""
    shell = shell_of_rank()
    try:
        data: Mapping[str, Any] = shell.object_inspect_mime(name, detail_level)
    except KeyError:
        return {}
    return data


def _namespace() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _described(value: Any) -> Variable:
    text, fingerprint = "", None
    with contextlib.suppress(Exception):  # The code of foreign objects may do anything.
        text = _short(value)
    with contextlib.suppress(Exception):
        fingerprint = fingerprint_of(value)
    kind = type(value)
    home = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__.partition('.')[0]}."
    return Variable(type_name=home + kind.__qualname__, value=text, fingerprint=fingerprint)


def _short(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
        device = str(getattr(value, "device", ""))
        return " ".join(filter(None, (str(tuple(shape)), dtype, "" if device == "cpu" else device)))
    if hasattr(value, "parameters") and hasattr(value, "state_dict"):
        return plural(sum(parameter.numel() for parameter in value.parameters()), "parameter")
    if isinstance(value, PLAIN):
        text = " ".join(reprlib.repr(value).split())
        return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."
    return ""
