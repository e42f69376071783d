"""What a training function and its launcher tell each other: `report(...)`, `track(...)`, the run's settings.

All of it works in a rank and is harmless anywhere else, so the same function runs in the kernel, under
torchrun and in a test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import os
import time
from typing import TYPE_CHECKING, Any, TypeVar

from notebook_launcher import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from notebook_launcher.training.recording.phases import PhaseClock
    from notebook_launcher.training.safepoint import Safepoint
    from notebook_launcher.training_settings import TrainingSettings

__all__ = [
    "activity",
    "current",
    "enter",
    "forget_call",
    "progress",
    "report",
    "report_values",
    "step_boundary",
    "stop_requested",
    "track",
]

T = TypeVar("T")

PROGRESS_INTERVAL = 0.1
"""Seconds between two progress records of one loop."""
PATIENCE = 2.0
"""Seconds without a backward after which a rank that is to stop takes it that there will be no more updates."""

# The board: a page of memory that the kernel and all ranks map. A rank looks at it at every step, which
# must cost nanoseconds.
BOARD_SIZE = 4096
STOP_FLAG = 0
STOP_EACH, STOP_TOGETHER = 1, 2
"""Its values: each rank stops at its own next step; all ranks stop after the same update."""
SAVES_ASKED = 1
"""How many checkpoints the kernel has asked for, modulo 256."""
HAS_SAFEPOINT = 2
"""Whether an Accelerator has made an update, and so can save, and stop all ranks together."""
SAVE_CHOICE = slice(8, 24)
"""Rank 0's answer, two 64-bit integers: which request, and after which update all ranks save."""
STOP_CHOICE = slice(24, 32)
"""Rank 0's choice, a 64-bit integer: after which update all ranks stop."""
COOPERATIVE = 64
MAX_RANKS = (BOARD_SIZE - COOPERATIVE) // 2
"""Rank r says that it looks at the board in byte COOPERATIVE + r, and what it does in byte ACTIVITY + r."""
ACTIVITY = COOPERATIVE + MAX_RANKS
COMPUTING, WAITING, SAVING = range(3)


class RunStopped(KeyboardInterrupt):
    """Raised at a step boundary of a run that was asked to stop."""

    def __init__(self, message: str = "the run was asked to stop") -> None:
        super().__init__(message)


@dataclasses.dataclass(slots=True)
class RankContext:
    """The rank that this process is."""

    rank: int
    num_processes: int
    pid: int
    settings: TrainingSettings
    """What the launch says about training."""
    send: Callable[[object], None]
    board: Any
    rendezvous: Any
    clock: PhaseClock | None = None
    """What the rank spends its time on, once somebody measures it."""
    last_progress: float = -math.inf
    """When `progress` last sent a record."""
    safepoint: Safepoint | None = None
    """What saves and stops all ranks after the same update: that of the first Accelerator to make one."""
    waits_since: tuple[int, float] = (-1, 0.0)
    """How many backwards there were when a step was last allowed to a rank that is to stop, and since when."""

    def set_activity(self, activity: int) -> int:
        """Say what the rank does now, COMPUTING, WAITING or SAVING; return what it was."""
        at = ACTIVITY + self.rank
        before: int = self.board[at]
        self.board[at] = activity
        return before


class _Current:
    # The one thing that a module must remember, since user code calls `report` from anywhere.
    context: RankContext | None = None


def enter(context: RankContext | None) -> None:
    """Say which rank this process is."""
    _Current.context = context


def forget_call() -> None:
    """Let the next call's Accelerator be the one that answers."""
    if _Current.context is not None:
        _Current.context.safepoint, _Current.context.waits_since = None, (-1, 0.0)


def current() -> RankContext | None:
    """Return the rank that this process, or the rank that forked it, is; None outside a run."""
    return _Current.context


def report(*, step: int | None = None, **metrics: Any) -> None:
    """Send numbers to the run: `report(step=3, loss=loss)`. They are in `run.metrics`.

    Args:
        step: The step they belong to, an integer or a tensor of one; None: the run counts for itself.
        metrics: Anything that `float()` takes; a tensor must have one element.

    Raises:
        TypeError: A value is not a number, or the step not an integer.
        KeyboardInterrupt: The run was asked to stop; a step boundary is where it does.
    """
    report_values(metrics, step=step)


def report_values(values: Mapping[str, Any], *, step: int | None = None) -> None:
    """Do what `report` does with a mapping, in which a metric may have any name, `"step"` too."""
    context = _Current.context
    numbers = {name: _number(name, value) for name, value in values.items()}
    step = None if step is None else _integer(step)
    if context is None:
        return
    context.send(messages.Metrics(time=time.monotonic(), step=step, values=numbers))
    step_boundary()


def _number(name: str, value: Any) -> float:
    # A loss that is not detached: torch warns where it becomes a float.
    detach = getattr(value, "detach", None)
    try:
        return float(detach() if callable(detach) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        msg = f"report({name}={value!r}): a metric must be one number. Pass its .item() or .mean()."
        raise TypeError(msg) from error


def _integer(step: Any) -> int:
    try:
        return operator.index(step)
    except (TypeError, ValueError, RuntimeError) as error:
        msg = f"report(step={step!r}): a step must be an integer. Pass int(step)."
        raise TypeError(msg) from error


def track(iterable: Iterable[T], *, total: int | None = None, description: str = "") -> Iterator[T]:
    """Iterate, and tell the run how far the loop is.

    Args:
        iterable: What to iterate over, a data loader for instance.
        total: How many items it has; None: its `len`, if it has one.
        description: What to call the loop.

    Raises:
        KeyboardInterrupt: The run was asked to stop, between two items.
    """
    context = _Current.context
    if context is None:
        yield from iterable
        return
    if total is None:
        total = _length(iterable)
    last = -PROGRESS_INTERVAL
    for done, item in enumerate(iterable, 1):
        step_boundary()
        yield item
        now = time.monotonic()
        if now - last >= PROGRESS_INTERVAL or done == total:
            context.send(messages.Progress(time=now, done=done, total=total, description=description))
            last = now


def progress(done: int, total: int | None = None, description: str = "") -> None:
    """Tell the run how far a loop is, where `track` cannot wrap it; call it at every item.

    Args:
        done: How many items are done.
        total: How many there are; None: nobody knows.
        description: What to call the loop.

    Raises:
        KeyboardInterrupt: The run was asked to stop, between two items.
    """
    context = _Current.context
    if context is None:
        return
    now = time.monotonic()
    if now - context.last_progress >= PROGRESS_INTERVAL or done == total:
        context.last_progress = now
        context.send(messages.Progress(time=now, done=done, total=total, description=description))
    step_boundary()


def _length(iterable: Any) -> int | None:
    # A data loader has a `__len__` that raises TypeError where its data set has none.
    try:
        return len(iterable)
    except (TypeError, NotImplementedError):
        return None


@contextlib.contextmanager
def activity(kind: int) -> Iterator[None]:
    """Say that this rank is WAITING for others, or SAVING, while the block runs."""
    context = _Current.context
    if context is None or context.pid != os.getpid():
        yield
        return
    before = context.set_activity(kind)
    try:
        yield
    finally:
        context.set_activity(before)


def stop_requested() -> bool:
    """Return whether the run was asked to stop; False outside a run."""
    context = _Current.context
    if context is None:
        return False
    context.board[COOPERATIVE + context.rank] = 1
    return bool(context.board[STOP_FLAG])


def step_boundary() -> None:
    """Stop here if the run was asked to; raises KeyboardInterrupt."""
    context = _Current.context
    if context is None:
        return
    board, at = context.board, COOPERATIVE + context.rank
    if not board[at]:  # All ranks write to this cache line, so each writes once.
        board[at] = 1
    if board[STOP_FLAG] and context.pid == os.getpid() and not _has_an_update_ahead(context):
        raise RunStopped


def _has_an_update_ahead(context: RankContext) -> bool:
    """Return whether this rank's training is about to stop together with the others'."""
    if context.board[STOP_FLAG] == STOP_EACH or not context.board[HAS_SAFEPOINT]:
        return False
    safepoint, now = context.safepoint, time.monotonic()
    if safepoint is not None and safepoint.is_past_stop():
        return False
    num_backwards = 0 if safepoint is None else safepoint.num_backwards
    if num_backwards != context.waits_since[0]:
        context.waits_since = num_backwards, now
    return now - context.waits_since[1] < PATIENCE
