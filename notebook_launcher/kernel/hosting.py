"""The process that conducts a run, as the run's thread sees it: a kernel, or a host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from notebook_launcher.messaging.messages import ExceptionReport

if TYPE_CHECKING:
    from notebook_launcher.kernel.calls.origin import Origin
    from notebook_launcher.kernel.display.questions import Question
    from notebook_launcher.kernel.display.sink import Sink

UnpacksException: TypeAlias = Callable[[int, ExceptionReport], BaseException | None]
"""Returns the exception in a parcel, whose descriptor it closes; None if it cannot be rebuilt."""


class TakesQuestions(Protocol):
    """Protocol of the place where a run's questions wait."""

    def put(self, question: Question) -> None:
        """Keep a question until the user, or a client of a host, answers it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """Destination of a run's output, values and questions, which a kernel and a host choose differently."""

    sink: Sink
    """Takes the output: a cell, or a host's journal."""
    take_value: Callable[[int], Any]
    """Returns the value in a parcel, whose descriptor it closes. A host, which has no class of the notebook, moves the
    parcel to the run's folder unopened, and returns a stand-in."""
    take_exception: UnpacksException
    """Returns the exception in a parcel, or in a host a stand-in."""
    questions: TakesQuestions
    """Takes what ranks ask the user."""
    can_ask: bool
    """True if the user can answer: a cell waits for the run, or clients may attach to it."""
    is_raised: bool
    """True if a cell raises the exception with which the run fails."""
    make_origin: Callable[[], Origin]
    """Returns the files of the run's folder about the run's origin."""
    logs_at: str
    """An expression for a rank's output, in which `{id!r}` stands for the run's identifier."""
