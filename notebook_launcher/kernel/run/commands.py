"""Commands to a run's thread, and the queue through which other threads send them."""

from __future__ import annotations

import dataclasses
import math
import queue
import time
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from notebook_launcher.kernel.display.questions import Answer
from notebook_launcher.kernel.inspection.profiles import Profile
from notebook_launcher.kernel.inspection.stacks import Stacks
from notebook_launcher.kernel.latch import Latch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from notebook_launcher.messaging.messages import ChangeAction, ChangeSource
    from notebook_launcher.settings.changes import Wanted

__all__ = [
    "AskingCommand",
    "ChangeCommand",
    "Command",
    "CommandQueue",
    "EndSamplingCommand",
    "ProfileCommand",
    "SampleCommand",
    "SaveCommand",
    "StacksCommand",
    "StopCommand",
]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class StopCommand:
    """Stop the run."""

    at_once: bool = False
    """True to kill the ranks without asking them first."""
    after_step: bool = False
    """True to ask only: the ranks stop at their next step boundary, however long their present step takes."""


@dataclasses.dataclass(frozen=True, slots=True)
class AskingCommand(Generic[T]):
    """A command whose sender waits for an answer."""

    answer: Latch[T] = dataclasses.field(default_factory=Latch, kw_only=True)
    """Set by the run's thread; to None if the run is over."""


@dataclasses.dataclass(frozen=True, slots=True)
class SaveCommand(AskingCommand[bool]):
    """Ask the ranks for a checkpoint; the answer is True if an Accelerator will write it."""


@dataclasses.dataclass(frozen=True, slots=True)
class StacksCommand(AskingCommand[Stacks]):
    """Read the stacks of all ranks, which are the answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChangeCommand(AskingCommand[bool]):
    """Ask the ranks to change settings, to pause or to resume, all after the same update.

    The answer is True if an Accelerator will do it.
    """

    action: ChangeAction
    values: dict[str, Wanted]
    source: ChangeSource = "code"
    """Origin of the request."""


@dataclasses.dataclass(frozen=True, slots=True)
class SampleCommand(AskingCommand[dict[int, int]]):
    """Have all ranks write their stacks; the answer is the positions in the ranks' files before they write."""


@dataclasses.dataclass(frozen=True, slots=True)
class EndSamplingCommand(AskingCommand[dict[int, str]]):
    """Read the stacks that all ranks have written since the sampling began, which are the answer."""

    starts: dict[int, int]
    """By rank: the position at which the sampling began."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProfileCommand(AskingCommand[Profile | str]):
    """Profile the next updates on some ranks; the answer is the profile, or the reason why there is none."""

    updates: int
    ranks: tuple[int, ...]


Command: TypeAlias = StopCommand | AskingCommand[Any] | Answer


class CommandQueue:
    """The commands that a run's thread has not carried out yet; any thread may add a command."""

    def __init__(self) -> None:
        self.stop_asked_at = math.inf
        """Time of the first stop, by `time.monotonic()`; infinite if none was asked for."""
        self.kill_asked_at = math.inf
        """Time of the first stop that asked to kill the ranks without asking them first; infinite if none did."""
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()

    @property
    def asked_to_stop(self) -> bool:
        """True once a stop was asked for, even before the run's thread has seen the command."""
        return math.isfinite(self.stop_asked_at)

    def put(self, command: Command) -> None:
        """Add a command; from any thread."""
        if isinstance(command, StopCommand):
            self.stop_asked_at = min(self.stop_asked_at, time.monotonic())
            if command.at_once:
                self.kill_asked_at = min(self.kill_asked_at, time.monotonic())
        self._queue.put(command)

    def take_all(self) -> Iterator[Command]:
        """Yield and remove the commands that are there; from the run's thread."""
        while not self._queue.empty():
            yield self._queue.get()

    def refuse_all(self) -> None:
        """Remove the commands that are there, and release the threads that wait for an answer; the run is over."""
        for command in self.take_all():
            if isinstance(command, AskingCommand):
                command.answer.set(None)
