"""The safepoint: the moment, after the same update, at which all ranks save or stop as the launcher asks.

The launcher asks for a checkpoint, for other settings, for a pause, or for the end, and rank 0 names the update after
which all ranks do it; how they agree on its number is in `agreement.py`. On one machine that
costs no message, and a look at three bytes for each window. New settings come as records in each rank's channel, which
is read only once they are due.
"""

from __future__ import annotations

import os
import time
import weakref
from typing import TYPE_CHECKING, Any

from notebook_launcher.context import COMPUTING, WAITING, RunStopped, current, notify
from notebook_launcher.messaging import board_layout, messages
from notebook_launcher.training.recording.update_profile import UpdateProfile
from notebook_launcher.training.requests.agreement import Agreement, BoardSlot, StoreSlot, make_fence

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.context import RankContext
    from notebook_launcher.training.process.process_state import ProcessState
    from notebook_launcher.training.requests.agreement import ChoiceSlot, UpdateFence
    from notebook_launcher.training.requests.steering import Steering

__all__ = ["Safepoint", "make_safepoint"]


MAX_NEW_CHANGES = 128
"""Changes that may wait; a larger difference means that the board's number lags behind the records in the channel."""


class Safepoint:
    """Counts the updates of an Accelerator, and carries out requests after the update that all ranks agree on."""

    def __init__(self, context: RankContext, fence: UpdateFence) -> None:
        self._steering: Callable[[], Steering | None] = lambda: None
        """Returns the settings, which are held weakly; None before `connect`."""
        self._save_update: Callable[[], Callable[[int], Any] | None] = lambda: None
        """Returns the method that saves a checkpoint, which is held weakly; None before `connect`."""
        self._context = context
        self.num_backwards = 0
        """Backwards so far: a rank that makes no more of them stops without waiting for the others' update."""
        self.is_due = False
        """True if `act` has something to do."""
        self.num_updates = 0
        """Updates that this Accelerator has made."""
        self._fence = fence
        """Keeps this rank from running ahead of its peers' view of the board."""
        options: dict[str, Any] = {"chooses": context.rank == 0, "lead": fence.lead if context.num_processes > 1 else 0}
        self._saves_agreed = Agreement(_slot(context, "save", board_layout.SAVE_CHOICE), **options)
        self._stop_agreed = Agreement(_slot(context, "stop", board_layout.STOP_CHOICE), **options)
        self._seen = 0
        """The last request for a checkpoint that was carried out."""
        self._saves = False
        """True if a checkpoint is due."""
        self._stop_at: int | None = None
        """Number of the update after which all ranks stop; None: no stop was requested."""
        self._changes_agreed = Agreement(_slot(context, "change", board_layout.CHANGE_CHOICE), **options)
        self._num_changes = 0
        """Number of the last change that was carried out."""
        self._carried_out: bytes | bytearray = b""
        """The requests on the board when nothing was left to be carried out; empty: look closely."""
        self._changes_due = 0
        """Number of the last change that is due."""
        self._profile: UpdateProfile | None = None
        """The profile that is under way on this rank."""

    def connect(self, steering: Steering, save: Callable[[int], Any]) -> None:
        """Set the objects that carry requests out. Both are held weakly, because they hold models.

        Args:
            steering: The settings.
            save: A bound method that saves a checkpoint after the update with this number, and returns its folder; or
                an empty text if it is saved, and named, later.
        """
        self._steering, self._save_update = weakref.ref(steering), weakref.WeakMethod(save)

    def count(self, *, updated: bool) -> None:
        """Count a backward; `updated`: all ranks have reduced their gradients, every rank at the same update."""
        self.num_backwards += 1
        if not updated:
            return
        self.num_updates += 1
        if self._fence.waits:
            self._fence.pass_update()
        context = self._context
        if context.safepoint is not self and not self._claim(context):
            return
        asked = context.board[board_layout.ASKED]
        if asked != self._carried_out:
            self._agree(asked)

    def _agree(self, asked: bytes | bytearray) -> None:
        """Agree with the other ranks on what the kernel has asked for."""
        saves, num_new = asked[board_layout.SAVES_ASKED], asked[board_layout.CHANGES_ASKED] - self._num_changes
        num_new %= 256
        must_save, must_change = saves != self._seen, 0 < num_new < MAX_NEW_CHANGES
        must_stop = asked[board_layout.STOP_FLAG] == board_layout.STOP_TOGETHER
        self._carried_out = b"" if must_save or must_stop or must_change else asked
        if must_save:
            self._agree_to_save(saves)
        if must_stop:
            self._agree_to_stop()
        if must_change:
            self._agree_to_change(self._num_changes + num_new)

    def _claim(self, context: RankContext) -> bool:
        # One Accelerator of a call answers: two would count different updates.
        if context.pid != os.getpid() or context.safepoint is not None:
            return False
        context.safepoint = self
        self._seen, self._saves, self._stop_at, self.is_due = 0, False, None, False
        self._num_changes = self._changes_due = 0
        self._carried_out = b""
        context.board[board_layout.HAS_SAFEPOINT] = 1
        return True

    def _agree_to_save(self, asked: int) -> None:
        request, at = self._saves_agreed.poll(asked, self.num_updates)
        if at == self.num_updates:
            self._seen, self._saves, self.is_due = request, True, True

    def _agree_to_stop(self) -> None:
        _, at = self._stop_agreed.poll(1, self.num_updates)
        self._stop_at = at or None
        self.is_due = self.is_due or at == self.num_updates

    def _agree_to_change(self, asked: int) -> None:
        request, at = self._changes_agreed.poll(asked, self.num_updates)
        if at == self.num_updates:
            self._changes_due, self.is_due = request, True

    def is_past_stop(self) -> bool:
        """Return True if updates were made after the one at which all ranks were to stop: nothing calls `act` then."""
        return self._stop_at is not None and self.num_updates > self._stop_at

    def act(self) -> None:
        """Save, change settings or stop, if this is the moment; called between two micro-batches.

        Raises:
            KeyboardInterrupt: All ranks stop after this update.
        """
        self.is_due = False
        if self._profile is not None and self.num_updates >= self._profile.end:
            self._end_profile()
        if self._saves:
            self._saves = False
            self._save()
        if self._changes_due > self._num_changes:
            self._change()
        self.is_due = self.is_due or self._profile is not None
        if self._stop_at == self.num_updates:
            self._stop_at = None  # A session's next run may use this Accelerator again.
            raise RunStopped

    def _change(self) -> None:
        steering, receive = self._steering(), self._context.next_change
        if steering is None or receive is None:
            return
        if steering.has_open_window:
            self.is_due = True  # Of other models: after the next micro-batch, on all ranks alike.
            return
        is_paused, before = False, self._context.set_activity(COMPUTING)
        try:
            while is_paused or self._num_changes < self._changes_due:
                change = receive()
                self._num_changes = change.number
                if change.action in ("pause", "resume"):
                    is_paused = change.action == "pause"
                    self._context.set_activity(WAITING if is_paused else before)
                self._carry_out(change, steering)
        finally:
            self._context.set_activity(before)

    def _carry_out(self, change: messages.Change, steering: Steering) -> None:
        values = steering.change(change.values)
        if change.profile is not None and self._context.rank in change.profile.ranks:
            self._end_profile()
            self._profile = UpdateProfile(self._context.rank, change.profile, self.num_updates)
            if self._profile.end == self.num_updates:  # It could not begin.
                self._end_profile()
        if self._context.rank == 0:
            now = time.monotonic()
            record = messages.Changed(
                time=now, update=self.num_updates, action=change.action, values=values, source=change.source
            )
            self._context.send(record)
        if change.action == "save":
            self._save()
        elif change.action == "stop":
            raise RunStopped

    def _end_profile(self) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            self._context.send(profile.finish(self.num_updates))

    def close(self) -> None:
        """End the profile that is under way; called when the function has ended."""
        self._end_profile()

    def settings(self) -> dict[str, float | None]:
        """Return the present settings that `run.set` changes, without the settings of `tunable`."""
        steering = self._steering()
        return {} if steering is None else steering.settings()

    def _save(self) -> None:
        save = self._save_update()
        if save is not None and (folder := save(self.num_updates)):
            notify(f"saved {folder}, after update {self.num_updates}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _nobody, ()  # An Accelerator that is pickled does not answer to another launch.


def _slot(context: RankContext, name: str, place: slice) -> ChoiceSlot:
    return BoardSlot(context.board, place) if context.num_nodes == 1 else StoreSlot(context, name)


def _nobody() -> None:
    pass


def make_safepoint(process: ProcessState) -> Safepoint | None:
    """Return a safepoint, for one Accelerator in a process among its peers; None without a launcher."""
    context = current()
    if context is None:
        return None
    return Safepoint(context, make_fence(process.device, process.num_processes))
