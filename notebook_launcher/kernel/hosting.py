"""Parts of a run that differ in a host, a process that conducts the run for kernels which come and go."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from notebook_launcher.messages import ExceptionReport

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from notebook_launcher.kernel.display.cell import Sink
    from notebook_launcher.kernel.run.questions import Answer, Question

__all__ = ["Hosting", "TakesQuestions", "UnpacksException"]

UnpacksException: TypeAlias = Callable[[int, ExceptionReport], BaseException | None]
"""Returns the exception in a parcel, whose descriptor it closes; None if it cannot be rebuilt."""


class TakesQuestions(Protocol):
    """Protocol of the place where a hosted run's questions wait."""

    def connect(self, reply: Callable[[Answer], object], waits_for: Callable[[Question], bool]) -> None:
        """Set the receiver of answers, and the test of whether a rank still waits for one."""

    def put(self, question: Question) -> None:
        """Keep a question until a client answers it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """The destination of a hosted run's output and values, which must exist while no client is attached."""

    begin_in: Callable[[Path], object]
    """Called with the run's folder before the run begins."""
    sink: Sink
    """Takes the output in place of a cell."""
    keep_value: Callable[[int], Any]
    """Moves a value's parcel to the run's folder, unopened: the value's classes belong to a notebook."""
    keep_exception: UnpacksException
    """Moves an exception's parcel to the run's folder, and returns a stand-in."""
    source: str
    """Source of the function, as the kernel that launched it read it."""
    environment: Mapping[str, Any] | None
    """Versions, commit and variables of that kernel (`describe_environment`); None: the host's own."""
    questions: TakesQuestions
    """Keeps what ranks ask the user until a client answers."""
