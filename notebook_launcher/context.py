"""The rank that this process is: the settings of its run, what it does now, and whether it has to stop.

All of it works in a rank and is harmless anywhere else, so the same function runs in the kernel, under
torchrun and in a test. `reporting.py` has what a rank's code sends to the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from notebook_launcher.messaging import board_layout

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from notebook_launcher.messaging.messages import Change
    from notebook_launcher.processes.rank.rendezvous import Rendezvous
    from notebook_launcher.settings.training_settings import SettingName, TrainingSettings
    from notebook_launcher.training.recording.phases import PhaseClock
    from notebook_launcher.training.requests import Safepoint

PATIENCE = 2.0
"""Seconds without a backward after which a rank that is to stop expects no further update."""

COMPUTING, WAITING, SAVING, ENDED = range(4)
"""Activities of a rank; ENDED: its function has returned."""


class RunStopped(KeyboardInterrupt):
    """Raised at a step boundary of a run that was asked to stop."""

    def __init__(self, message: str = "the run was asked to stop") -> None:
        super().__init__(message)


class BackwardPause(NamedTuple):
    """The time in which a rank has made no backward, though it has reached step boundaries."""

    num_backwards: int = -1
    """Backwards of the rank so far; -1 until it reaches a step boundary."""
    since: float = 0.0
    """Time of the first step boundary with this number."""


@dataclasses.dataclass(slots=True)
class RankContext:
    """The rank that this process is, its means to reach the launcher, and its state in the present call."""

    rank: int
    num_processes: int
    pid: int
    settings: TrainingSettings
    """The launch's settings of training."""
    send: Callable[[object], None]
    board: mmap.mmap | bytearray
    """The memory that the kernel and the ranks of this machine map; `board_layout` lists its bytes."""
    rendezvous: Rendezvous
    num_nodes: int = 1
    """Number of machines that hold ranks; each has a board of its own."""
    call_id: int = 0
    """Number of the call that the rank carries out, the same on all ranks."""
    settings_are_read: bool = False
    """True once an Accelerator has asked for a setting in this call, or a trainer of another library was compared."""
    clock: PhaseClock | None = None
    """The rank's `PhaseClock`, once a loop is measured."""
    last_progress: float = -math.inf
    """Time at which `progress` last sent a record."""
    num_loops: int = 0
    """Number of loops that have begun."""
    num_items: int = 0
    """Number of items, of all loops, that are done."""
    num_reports: int = 0
    """Number of reports so far."""
    last_total: float = -math.inf
    """Time at which `report(total_steps=)` last sent a record."""
    safepoint: Safepoint | None = None
    """The safepoint of the first Accelerator that made an update; it saves and stops all ranks together."""
    num_loaded: int | None = None
    """Updates that the checkpoint had behind it which was loaded before the first update; None: none was."""
    backward_pause: BackwardPause = dataclasses.field(default_factory=BackwardPause)
    """The time without a backward, while the run is being stopped."""
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
        """Set what the rank does now: COMPUTING, WAITING, SAVING or ENDED. Return what it did before."""
        at = board_layout.ACTIVITY + self.rank
        before = self.board[at]
        self.board[at] = activity
        return before

    def peers_in(self, activity: int) -> list[int]:
        """Return the other ranks of this machine that have marked this activity."""
        marks = self.board[board_layout.ACTIVITY : board_layout.ACTIVITY + self.num_processes]
        return [rank for rank, mark in enumerate(marks) if mark == activity and rank != self.rank]


class RandomStage(NamedTuple):
    """The part of a launch in which all ranks draw the same random numbers, or each its own."""

    seed: int
    """The seed that torch's generator has been given; another one is there once the user's code has seeded it."""
    next_seed: int | None = None
    """None while all ranks draw the same numbers; then the seed, equal on all ranks, for doing so again."""
    seeding: Any = None
    """What `newest_seeding` returned then: the user's code may seed with the number that was there."""


class _Current:
    # State of a module, because user code calls `report` from anywhere.
    context: RankContext | None = None
    adopted: Mapping[str, Any] = {}
    random: RandomStage | None = None


def enter(context: RankContext | None) -> None:
    """Set which rank this process is."""
    _Current.context = context


def adopt(**settings: Any) -> None:
    """Give this process settings that an `Accelerator()` adopts where a launch gives none; exported scripts call it."""
    _Current.adopted = settings


def newest_seeding() -> Any:
    """Return what torch keeps of the newest `torch.manual_seed` until CUDA is in use: another object for each call."""
    tracker = getattr(sys.modules["torch"].cuda, "_lazy_seed_tracker", None)
    return getattr(tracker, "manual_seed_all_cb", None)


def random_stage() -> RandomStage | None:
    """Return the present stage; None: an Accelerator leaves the random numbers of the ranks as they are."""
    return _Current.random


def enter_random_stage(stage: RandomStage | None) -> None:
    """Set the stage that begins now; exported scripts call it."""
    _Current.random = stage


def setting(name: SettingName) -> Any:
    """Return a setting of the launch, else the adopted one, else None."""
    context = _Current.context
    value = None
    if context is not None:
        context.settings_are_read = True
        value = getattr(context.settings, name)
    return _Current.adopted.get(name) if value is None else value


def announce_checkpoint(folder: str) -> None:
    """Have a call after a failure look for a checkpoint that this rank is about to put into its place.

    A rank may die when the folder is there, and before `note_checkpoint`. Only for a folder that does not exist yet: an
    older checkpoint in it would pass for the newest.
    """
    context = _Current.context
    if context is not None and context.checkpoints is not None and context.rank == 0:
        _send_checkpoint(context, folder)


def note_checkpoint(folder: str, *, is_writer: bool) -> None:
    """Note that all ranks have saved a checkpoint, for a call after a failure; `is_writer`: this rank published it."""
    context = _Current.context
    if context is None or context.checkpoints is None:
        return
    context.checkpoints.append(folder)
    if is_writer:
        _send_checkpoint(context, folder)


def _send_checkpoint(context: RankContext, folder: str) -> None:
    from notebook_launcher.messaging.messages import CheckpointSaved

    context.send(CheckpointSaved(folder=folder))


def saved_checkpoints() -> tuple[str, ...] | None:
    """Return the checkpoints that this run has saved, the newest last; None: the function resumes by itself."""
    context = _Current.context
    return None if context is None or context.checkpoints is None else tuple(context.checkpoints)


def begin_call(call_id: int, checkpoints: Iterable[str] | None) -> None:
    """Note what a call needs, and release the safepoint, so that an Accelerator of this call can take its place.

    Args:
        call_id: Number of the call.
        checkpoints: Folders of the checkpoints that the run has saved, the newest last; None: the function resumes by
            itself.
    """
    context = _Current.context
    if context is not None:
        context.call_id = call_id
        context.set_activity(COMPUTING)
        context.checkpoints = None if checkpoints is None else list(checkpoints)
        context.safepoint, context.num_loaded, context.backward_pause = None, None, BackwardPause()
        context.tunables.clear()
        context.settings_are_read = False


def call_id() -> int:
    """Return the number of the call that this rank carries out; 0 outside a launch."""
    return 0 if _Current.context is None else _Current.context.call_id


def current() -> RankContext | None:
    """Return the context of the rank that this process, or the rank that forked it, is; None outside a run."""
    return _Current.context


def notify(text: str) -> None:
    """Show a line in the cell, once for all ranks: rank 0 of a run sends it, and nothing else does."""
    context = _Current.context
    if context is not None and context.rank == 0:
        # Imported late, because the messages take a third of the time of importing this module.
        from notebook_launcher.messaging.messages import Notice

        context.send(Notice(text=text))


def notify_of_loss(loss: float, where: str) -> None:
    """Show a line about the first loss of a run that is NaN or infinite, of whichever rank it comes from.

    Args:
        loss: The loss.
        where: Its place, as in `in update 3`.
    """
    context = _Current.context
    told = 0 if context is None else context.call_id % 255 + 1
    if context is None or context.pid != os.getpid() or context.board[board_layout.LOSS_TOLD] == told:
        return
    from notebook_launcher.messaging.messages import Notice  # as in `notify`

    # Before the send: ranks that get the NaN by a later collective see it, whichever line the kernel reads first.
    context.board[board_layout.LOSS_TOLD] = told
    context.send(Notice(text=f"rank {context.rank}: the loss is {loss} {where}", once="loss"))


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


def step_boundary() -> None:
    """Raise KeyboardInterrupt if the run was asked to stop."""
    context = _Current.context
    if context is None:
        return
    board, at = context.board, board_layout.COOPERATIVE + context.rank
    if not board[at]:  # All ranks write to this cache line, so each writes once.
        board[at] = 1
    if board[board_layout.STOP_FLAG] and context.pid == os.getpid() and not _has_an_update_ahead(context):
        raise RunStopped


def _has_an_update_ahead(context: RankContext) -> bool:
    """Return True if this rank should run on, because all ranks will stop together after a later update."""
    if context.board[board_layout.STOP_FLAG] == board_layout.STOP_EACH or not context.board[board_layout.HAS_SAFEPOINT]:
        return False
    safepoint, now = context.safepoint, time.monotonic()
    if safepoint is not None and safepoint.is_past_stop():
        return False
    num_backwards = 0 if safepoint is None else safepoint.num_backwards
    if num_backwards != context.backward_pause.num_backwards:
        context.backward_pause = BackwardPause(num_backwards, now)
    return now - context.backward_pause.since < PATIENCE
