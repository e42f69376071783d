"""The outcome of a run."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from notebook_launcher.kernel.results import Results

__all__ = ["RunOutcome"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The results of a run, and the exception with which it failed; None after a success."""

    state: Literal["done", "failed", "stopped"]
    """`"stopped"` if the user stopped the run before every rank had returned."""
    results: Results
    """The values of the ranks that returned, even after a failure."""
    error: BaseException | None
    """The exception for the cell; None after a success."""
    asked_to_stop: bool = False
    """True if the user had asked for a stop when the ranks had settled, even if all had returned."""
