"""The rank that this process is, and what its code sends to the run: `report(...)`, `track(...)`.

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
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from notebook_launcher.changes import ACCELERATOR_SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from notebook_launcher.messages import Change
    from notebook_launcher.training_settings import TrainingSettings

__all__ = [
    "activity",
    "adopt",
    "begin_call",
    "current",
    "enter",
    "notify",
    "progress",
    "report",
    "report_values",
    "setting",
    "step_boundary",
    "stop_requested",
    "track",
    "tunable",
]

T = TypeVar("T")

PROGRESS_INTERVAL = 0.1
"""Seconds between two progress records of one loop."""
PATIENCE = 2.0
"""Seconds without a backward after which a rank that is to stop expects no further update."""

# The board: a page of memory that the kernel and all ranks map. A rank looks at it at every step, which
# must cost nanoseconds.
BOARD_SIZE = 4096
STOP_FLAG = 0
STOP_EACH, STOP_TOGETHER = 1, 2
"""Values of the stop flag: each rank stops at its own next step; all ranks stop after the same update."""
SAVES_ASKED = 1
"""Number of checkpoints that the kernel has asked for, modulo 256."""
HAS_SAFEPOINT = 2
"""1 once an Accelerator has made an update, so that it can save, and stop all ranks together."""
SAVE_CHOICE = slice(8, 24)
"""Rank 0's answer, two 64-bit integers: the request, and the update after which all ranks save; `training.agreement`
reads and writes it."""
STOP_CHOICE = slice(24, 40)
"""The same pair for the update after which all ranks stop."""
CHANGES_ASKED = 3
"""Number of the last `Change` that the kernel has sent to all ranks, modulo 256."""
CHANGE_CHOICE = slice(40, 56)
"""The same pair for the update after which all ranks carry out the changes."""
COOPERATIVE = 64
"""Rank r sets byte COOPERATIVE + r once it reads the board."""
MAX_RANKS = (BOARD_SIZE - COOPERATIVE) // 2
ACTIVITY = COOPERATIVE + MAX_RANKS
"""Byte ACTIVITY + r has the activity of rank r: COMPUTING, WAITING or SAVING."""
COMPUTING, WAITING, SAVING = range(3)


class RunStopped(KeyboardInterrupt):
    """Raised at a step boundary of a run that was asked to stop."""

    def __init__(self, message: str = "the run was asked to stop") -> None:
        super().__init__(message)


class AgreedStop(Protocol):
    """The part of a safepoint that is used here; the class is in `training.safepoint`."""

    num_backwards: int

    def is_past_stop(self) -> bool:
        """Return True if updates were made after the one at which all ranks were to stop."""
        ...

    def settings(self) -> dict[str, float | None]:
        """Return the present settings of the Accelerator."""
        ...

    def close(self) -> None:
        """End what is under way; called when the function has ended."""
        ...


@dataclasses.dataclass(slots=True)
class RankContext:
    """The rank that this process is."""

    rank: int
    num_processes: int
    pid: int
    settings: TrainingSettings
    """The launch's settings of training."""
    send: Callable[[object], None]
    board: Any
    rendezvous: Any
    num_nodes: int = 1
    """Number of machines that hold ranks; each has a board of its own."""
    call_id: int = 0
    """Number of the call that the rank carries out, the same on all ranks."""
    clock: Any = None
    """The rank's `PhaseClock`, once a loop is measured."""
    last_progress: float = -math.inf
    """Time at which `progress` last sent a record."""
    num_loops: int = 0
    num_items: int = 0
    """Loops that have begun, and items of all loops that are done."""
    safepoint: AgreedStop | None = None
    """The safepoint of the first Accelerator that made an update; it saves and stops all ranks together."""
    waits_since: tuple[int, float] = (-1, 0.0)
    """While the run is being stopped: the number of backwards at the last step boundary, and the time since
    which it has not changed."""

    next_change: Callable[[], Change] | None = None
    """Returns the next `Change` that the kernel has sent, in order; waits for it."""
    checkpoints: list[str] | None = None
    """Folders of the checkpoints that this run has saved, the newest last; None: the function resumes by itself."""
    tunables: dict[str, float] = dataclasses.field(default_factory=dict)
    """By name: present values of what the function offers by `tunable`."""

    def settings_now(self) -> dict[str, float | None]:
        """Return the present settings of the Accelerator that carries changes out; empty on other ranks than 0."""
        return {} if self.rank or self.safepoint is None else self.safepoint.settings()

    def set_activity(self, activity: int) -> int:
        """Set what the rank does now: COMPUTING, WAITING or SAVING. Return what it did before."""
        at = ACTIVITY + self.rank
        before: int = self.board[at]
        self.board[at] = activity
        return before

    def waiting_peers(self) -> list[int]:
        """Return the other ranks that mark themselves as WAITING."""
        marks = self.board[ACTIVITY : ACTIVITY + self.num_processes]
        return [rank for rank, mark in enumerate(marks) if mark == WAITING and rank != self.rank]


class _Current:
    # State of a module, because user code calls `report` from anywhere.
    context: RankContext | None = None
    adopted: Mapping[str, Any] = {}


def enter(context: RankContext | None) -> None:
    """Set which rank this process is."""
    _Current.context = context


def adopt(**settings: Any) -> None:
    """Give this process settings that an `Accelerator()` adopts where a launch gives none; exported scripts call it."""
    _Current.adopted = settings


def setting(name: str) -> Any:
    """Return a setting of the launch, else the adopted one, else None; `name` is a field of `TrainingSettings`."""
    value = None if _Current.context is None else getattr(_Current.context.settings, name, None)
    return _Current.adopted.get(name) if value is None else value


def note_checkpoint(folder: str, *, is_writer: bool) -> None:
    """Note that all ranks have saved a checkpoint, for a call after a failure; `is_writer`: this rank published it."""
    rank = _Current.context
    if rank is None or rank.checkpoints is None:
        return
    rank.checkpoints.append(folder)
    if is_writer:
        from notebook_launcher.messages import CheckpointSaved

        rank.send(CheckpointSaved(folder=folder))


def saved_checkpoints() -> tuple[str, ...] | None:
    """Return the checkpoints that this run has saved, the newest last; None: the function resumes by itself."""
    return (
        None if _Current.context is None or _Current.context.checkpoints is None else (*_Current.context.checkpoints,)
    )


def begin_call(call_id: int) -> None:
    """Release the safepoint, so that an Accelerator of this call can take its place."""
    if _Current.context is not None:
        _Current.context.call_id = call_id
        _Current.context.safepoint, _Current.context.waits_since = None, (-1, 0.0)
        _Current.context.tunables.clear()


def current() -> RankContext | None:
    """Return the rank that this process, or the rank that forked it, is; None outside a run."""
    return _Current.context


def notify(text: str) -> None:
    """Show a line in the cell, once for all ranks: rank 0 of a run sends it, and nothing else does."""
    rank = _Current.context
    if rank is not None and rank.rank == 0:
        from notebook_launcher.messages import Notice  # here, because they take a third of the time of importing this

        rank.send(Notice(text=text))


def report(*, step: int | None = None, **metrics: Any) -> None:
    """Send metrics and pictures to the run: `report(step=3, loss=loss, sample=image, weights=histogram(w))`.

    Numbers are in `run.metrics`, pictures in `run.pictures`; the monitor shows both.

    Args:
        step: The step that the metrics belong to, an integer or a tensor of one; None: the run counts.
        metrics: Anything that `float()` takes; a tensor must have one element. A picture is an image of Pillow, a
            figure of matplotlib, a `histogram(...)`, or an array or tensor of shape (H, W, C) or (C, H, W) with 1, 3
            or 4 channels, in bytes or in floats from 0 to 1; a larger one than 1024 pixels on a side is made smaller.

    Raises:
        TypeError: A value is neither a number nor a picture, or the step not an integer.
        KeyboardInterrupt: The run was asked to stop; it stops at a step boundary such as this call.
    """
    report_values(metrics, step=step)


def report_values(values: Mapping[str, Any], *, step: int | None = None) -> None:
    """Report a mapping, in which a metric may have any name, `"step"` too."""
    context = _Current.context
    drawn = {name: picture for name, value in values.items() if (picture := _picture(value)) is not None}
    numbers = {name: _number(name, value) for name, value in values.items() if name not in drawn}
    step = None if step is None else _integer(step)
    if context is None:
        return
    from notebook_launcher import messages  # here, because they take a third of the time of importing this module

    now = time.monotonic()
    for name, (mime, data) in drawn.items():
        context.send(messages.Picture(time=now, step=step, name=name, mime=mime, data=data))
    if numbers or not drawn:
        context.send(messages.Metrics(time=now, step=step, values=numbers))
    step_boundary()


def report_table(name: str, to_csv: Callable[[], bytes], *, step: int | None = None) -> None:
    """Send a table to the run, if there is one; `to_csv` returns it."""
    context = _Current.context
    if context is not None:
        from notebook_launcher import messages

        picture = messages.Picture(time=time.monotonic(), step=step, name=name, mime="text/csv", data=to_csv())
        context.send(picture)
        step_boundary()


def _picture(value: Any) -> tuple[str, bytes] | None:
    if isinstance(value, (int, float, str)):
        return None
    from notebook_launcher.pictures import encode_picture  # here, as messages

    return encode_picture(value)


def _number(name: str, value: Any) -> float:
    # A loss that is not detached: torch warns where it becomes a float.
    detach = getattr(value, "detach", None)
    try:
        return float(detach() if callable(detach) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        msg = (
            f"report({name}={value!r}): a metric must be one number. Pass its .mean(). "
            "A picture needs 1, 3 or 4 channels: pass x[..., None]."
        )
        raise TypeError(msg) from error


def _integer(step: Any) -> int:
    try:
        return operator.index(step)
    except (TypeError, ValueError, RuntimeError) as error:
        msg = f"report(step={step!r}): a step must be an integer. Pass int(step)."
        raise TypeError(msg) from error


def track(iterable: Iterable[T], *, total: int | None = None, description: str = "") -> Iterator[T]:
    """Iterate, and send the progress of the loop to the run.

    Args:
        iterable: A data loader, for instance.
        total: Number of items; None: the `len` of the iterable, if it has one.
        description: The name of the loop.

    Raises:
        KeyboardInterrupt: The run was asked to stop, between two items.
    """
    context = _Current.context
    if context is None:
        yield from iterable
        return
    from notebook_launcher import messages

    if total is None:
        total = _length(iterable)
    last = -PROGRESS_INTERVAL
    context.num_loops += 1
    loop = context.num_loops
    for done, item in enumerate(iterable, 1):
        step_boundary()
        items = context.num_items
        yield item
        if context.num_items == items:
            context.num_items += 1  # Otherwise an inner loop has counted.
        now = time.monotonic()
        if now - last >= PROGRESS_INTERVAL or done == total:
            context.send(
                messages.Progress(
                    time=now, done=done, total=total, description=description, loops=loop, items=context.num_items
                )
            )
            last = now


def tunable(name: str, default: float) -> float:
    """Return a setting that `run.set(name=value)` changes during the run; read it wherever it is used.

        temperature = tunable("temperature", 0.7)

    A change arrives on all ranks after the same update of the first prepared `Accelerator`, between two micro-batches,
    so the ranks never differ. Outside a run this is the default.

    Args:
        name: The keyword for `run.set`.
        default: The value until it is changed. Its type, int, float or bool, stays.

    Raises:
        TypeError: The default is not a number.
        ValueError: The name is not an identifier, or belongs to a setting of the `Accelerator`.
    """
    if not isinstance(default, (int, float)):
        from notebook_launcher.text import type_of

        msg = f"tunable({name!r}, {default!r}): the default is {type_of(default)}; it must be a number."
        raise TypeError(msg)
    if not isinstance(name, str) or not name.isidentifier() or name in ACCELERATOR_SETTINGS:
        taken = (
            f"; {', '.join(ACCELERATOR_SETTINGS)} are settings of the Accelerator"
            if name in ACCELERATOR_SETTINGS
            else ""
        )
        msg = f"tunable({name!r}): the name must be a keyword for run.set, such as temperature{taken}."
        raise ValueError(msg)
    context = _Current.context
    if context is None:
        return default
    if name not in context.tunables:
        context.tunables[name] = default
        if context.pid == os.getpid():
            from notebook_launcher import messages

            context.send(messages.Offered(name=name, value=default))
    return context.tunables[name]


def progress(done: int, total: int | None = None, description: str = "") -> None:
    """Send the progress of a loop that `track` cannot wrap; call this at every item.

    Args:
        done: Number of items that are done.
        total: Number of all items; None: unknown.
        description: The name of the loop.

    Raises:
        KeyboardInterrupt: The run was asked to stop, between two items.
    """
    context = _Current.context
    if context is None:
        return
    context.num_loops += done == 1
    context.num_items += 1
    now = time.monotonic()
    if now - context.last_progress >= PROGRESS_INTERVAL or done == total:
        from notebook_launcher import messages

        context.last_progress = now
        context.send(
            messages.Progress(
                time=now,
                done=done,
                total=total,
                description=description,
                loops=context.num_loops,
                items=context.num_items,
            )
        )
    step_boundary()


def _length(iterable: Any) -> int | None:
    # A data loader has a `__len__` that raises TypeError where its data set has none.
    try:
        return len(iterable)
    except (TypeError, NotImplementedError):
        return None


@contextlib.contextmanager
def activity(kind: int) -> Iterator[None]:
    """Mark this rank as WAITING for others, or SAVING, while the block runs."""
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
    """Return True if the run was asked to stop; False outside a run."""
    context = _Current.context
    if context is None:
        return False
    context.board[COOPERATIVE + context.rank] = 1
    return bool(context.board[STOP_FLAG])


def step_boundary() -> None:
    """Raise KeyboardInterrupt if the run was asked to stop."""
    context = _Current.context
    if context is None:
        return
    board, at = context.board, COOPERATIVE + context.rank
    if not board[at]:  # All ranks write to this cache line, so each writes once.
        board[at] = 1
    if board[STOP_FLAG] and context.pid == os.getpid() and not _has_an_update_ahead(context):
        raise RunStopped


def _has_an_update_ahead(context: RankContext) -> bool:
    """Return True if this rank should run on, because all ranks will stop together after a later update."""
    if context.board[STOP_FLAG] == STOP_EACH or not context.board[HAS_SAFEPOINT]:
        return False
    safepoint, now = context.safepoint, time.monotonic()
    if safepoint is not None and safepoint.is_past_stop():
        return False
    num_backwards = 0 if safepoint is None else safepoint.num_backwards
    if num_backwards != context.waits_since[0]:
        context.waits_since = num_backwards, now
    return now - context.waits_since[1] < PATIENCE
