"""The function that a run calls, with its arguments."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from notebook_launcher.travel.settings import SetupStep


class FunctionCall(NamedTuple):
    """A function and its arguments, as the user gave them to a launch."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    steps: tuple[SetupStep, ...] = ()
    """Code that each rank runs before it unpacks the rest."""


# --------------------------------------------------------------------------------------------------------------------
# Calls of this package's own functions on ranks: a function by its name, and what a cell on ranks takes and returns.
#
# The kernel imports no module of the ranks, so it names the function, and the rank imports it.


@dataclasses.dataclass(frozen=True, slots=True)
class RankFunction:
    """A function that a rank finds by the names of its module and its own."""

    module: str
    name: str

    def __call__(self, *args: Any) -> Any:
        """Call the function; in a rank."""
        return getattr(importlib.import_module(self.module), self.name)(*args)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CellRequest:
    """Code to run in the ranks' `__main__`, as one cell."""

    code: str
    filename: str
    """The name under which tracebacks and `inspect` know the code."""
    place: str
    """The name of the cell for readers: `Cell In[3]`."""
    first_line: str = ""
    """The line of the cell above the code: `%%ranks 0,2`; empty if the code is the whole cell."""
    pushed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values of the notebook, by the names that they get on the ranks first."""
    is_python: bool = False
    """True if the code has no syntax of IPython, which the rank then need not import."""
    pulls: bool = False
    """True to return the last expression's value; False to return it as the rank shows it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CellOutput:
    """The value of a cell's last expression as a rank shows it."""

    data: Mapping[str, Any]
    """By MIME type, as IPython's formatters return it; always with `text/plain`, unless the value shows itself."""
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fingerprint: str | None = None
    """Equal for equal contents, of values whose text may leave some of them out; None for others and large ones."""

    @property
    def is_rich(self) -> bool:
        """True if the value has another form than text."""
        return any(kind != "text/plain" for kind in self.data)

    def __repr__(self) -> str:
        return str(self.data.get("text/plain", ""))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One variable of a rank's `__main__`."""

    type_name: str
    value: str
    """A tensor's shape, dtype and device, or a short form of a plain value; empty for other objects."""
    fingerprint: str | None
    """A word that is equal for equal contents; None if they cannot be compared."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A completion, as IPython's completer offers it."""

    text: str
    start: int
    end: int
    kind: str
