"""Requests of the launcher to training ranks, such as save, stop or pause: all ranks act after the same update."""

from __future__ import annotations

import dataclasses
import os
import struct
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.context import COMPUTING, WAITING, RunStopped, current, notify
from notebook_launcher.messaging import board_layout, messages
from notebook_launcher.settings.changes import ACCELERATOR_SETTINGS, apply_change
from notebook_launcher.training.queued_work import record_work
from notebook_launcher.training.recording.profiling import UpdateProfile

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Mapping

    from notebook_launcher.context import RankContext
    from notebook_launcher.settings.changes import Wanted
    from notebook_launcher.training.accumulation.updates import Updates
    from notebook_launcher.training.accumulation.windows import GradientState
    from notebook_launcher.training.preparation import Prepared
    from notebook_launcher.training.process.process_state import ProcessState


# --------------------------------------------------------------------------------------------------------------------
# The safepoint: the moment, after the same update, at which all ranks save or stop as the launcher asks.
#
# The launcher asks for a checkpoint, for other settings, for a pause, or for the end, and rank 0 names the update
# after which all ranks do it (`Agreement`). On one machine that costs no message, and a look at three bytes for each
# window. New settings come as records in each rank's channel, which is
# read only once they are due.


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
        self._num_loaded = 0
        """Updates that the loaded checkpoint had behind it."""
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

        `save` is a bound method that saves a checkpoint after the update with this number, and returns its folder; or
        an empty text if it is saved, and named, later.
        """
        self._steering, self._save_update = weakref.ref(steering), weakref.WeakMethod(save)

    @property
    def last_update(self) -> int:
        """The number of the last update, counted from the beginning of the training, through all checkpoints."""
        return self._num_loaded + self.num_updates

    def continue_after(self, num_updates: int) -> None:
        """Note that a checkpoint was loaded which had so many updates behind it; later in a training nothing changes.

        Weights that are loaded between two updates, such as the best ones at the end, are no earlier moment.
        """
        if not self.num_updates:
            self._num_loaded = num_updates
            if self._context.safepoint is None:
                self._context.num_loaded = num_updates

    def count(self, *, updated: bool) -> None:
        """Count a backward; `updated`: all ranks have reduced their gradients, every rank at the same update."""
        self.num_backwards += 1
        if not updated:
            return
        self.num_updates += 1
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
        now = self.num_updates
        if must_save:
            request, at = self._saves_agreed.poll(saves, now)
            if at == now:
                self._seen, self._saves, self.is_due = request, True, True
        if must_stop:
            _, at = self._stop_agreed.poll(1, now)
            self._stop_at = at or None
            self.is_due = self.is_due or at == now
        if must_change:
            request, at = self._changes_agreed.poll(self._num_changes + num_new, now)
            if at == now:
                self._changes_due, self.is_due = request, True

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

    def is_past_stop(self) -> bool:
        """Return True if updates were made after the one at which all ranks were to stop: nothing calls `act` then."""
        return self._stop_at is not None and self.num_updates > self._stop_at

    def act(self) -> None:
        """Save, change settings or stop, if this is the moment; called between two micro-batches.

        Raises:
            KeyboardInterrupt: All ranks stop after this update.
        """
        self.is_due = False
        if self._profile is not None and self.last_update >= self._profile.end:
            self.close()
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
        if steering.gradient_state.has_open_window:  # Of other models; settings change between two windows.
            self.is_due = True  # After the next micro-batch, on all ranks alike.
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
            self.close()
            self._profile = UpdateProfile(self._context.rank, change.profile, self.last_update)
            if self._profile.end == self.last_update:  # It could not begin.
                self.close()
        if self._context.rank == 0:
            now = time.monotonic()
            record = messages.Changed(
                time=now, update=self.last_update, action=change.action, values=values, source=change.source
            )
            self._context.send(record)
        if change.action == "save":
            self._save()
        elif change.action == "stop":
            raise RunStopped

    def close(self) -> None:
        """End the profile that is under way, if any; called also when the function has ended."""
        profile, self._profile = self._profile, None
        if profile is not None:
            self._context.send(profile.finish(self.last_update))

    def settings(self) -> dict[str, float | None]:
        """Return the present settings that `run.set` changes, without the settings of `tunable`."""
        steering = self._steering()
        return {} if steering is None else steering.settings()

    def _save(self) -> None:
        save = self._save_update()
        if save is not None and (folder := save(self.last_update)):
            notify(f"saved {folder}, after update {self.last_update}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # An Accelerator that is pickled does not answer to another launch.


def _slot(context: RankContext, name: str, place: slice) -> BoardSlot | StoreSlot:
    return BoardSlot(context.board, place) if context.num_nodes == 1 else StoreSlot(context, name)


def make_safepoint(process: ProcessState) -> Safepoint | None:
    """Return a safepoint, for one Accelerator in a process among its peers; None without a launcher."""
    context = current()
    if context is None:
        return None
    return Safepoint(context, make_fence(process.device, process.num_processes))


# --------------------------------------------------------------------------------------------------------------------
# The update at which all ranks do something together, agreed on without a message.
#
# Ranks see a request of the kernel at different moments, so rank 0 names an update and writes its number where all
# ranks find it: on the board, memory that all ranks of one machine map, or, over several machines, into the store at
# which the ranks have met. The named update must lie so far ahead that no rank can have passed it unseen. How far
# that is follows from the gradients' reduction, which no rank completes before every rank has begun it:
#
# - On a CPU, a backward returns when its reduction is done. A rank that counts update `v` knows that rank 0 has begun
#   the reduction of `v`, hence has counted `v - 1`. What rank 0 writes while it counts `u` is seen by all at `u + 1`.
# - On a GPU, a backward returns when its reduction is queued: the wait for an NCCL collective holds up the stream,
#   not the program. A program could be any number of updates ahead of its peers. Therefore `UpdateFence` lets it
#   count update `v` only when the reduction of `v - 1` is done, which proves that rank 0 has counted `v - 2`. What
#   rank 0 writes while it counts `u` is seen by all at `u + 2`. The GPU still has the work of a whole window queued,
#   so it does not idle.
#
# Over several machines the same holds, because rank 0 waits for the store's answer before it continues. But each
# machine has a board of its own, and a rank that has not seen the request would not look. Therefore the kernel writes
# a request to the board of rank 0 last, when all other machines have it (`engines/cluster/cluster_tree.py`).


CHOICE = struct.Struct("<QQ")
"""Number of the request, and of the update at which it is carried out; 0: no update was named yet."""
MAX_REQUESTS = 1 << 24
"""In the store, the two are one number of 63 bits: update * MAX_REQUESTS + request."""


@dataclasses.dataclass
class BoardSlot:
    """Slot for ranks of one machine: 16 bytes of the board."""

    board: mmap.mmap | bytearray
    place: slice

    def read(self) -> tuple[int, int]:
        """Return the last request for which an update was named, and that update; (0, 0): none."""
        return CHOICE.unpack(bytes(self.board[self.place]))

    def write(self, request: int, update: int) -> None:
        """Name an update for a request."""
        self.board[self.place] = CHOICE.pack(request, update)


@dataclasses.dataclass
class StoreSlot:
    """Slot for ranks of several machines: a number in the store, for each call another. Each look asks the store."""

    context: RankContext
    name: str
    """The kind of request."""

    def read(self) -> tuple[int, int]:
        """Return the last request for which an update was named, and that update; (0, 0): none."""
        update, request = divmod(self._add(0), MAX_REQUESTS)
        return request, update

    def write(self, request: int, update: int) -> None:
        """Name an update for a request."""
        named, at = self.read()
        self._add((update - at) * MAX_REQUESTS + request - named)

    def _add(self, number: int) -> int:
        # The only operation of a store that does not wait for the key, and returns once the store has carried it out.
        return int(self.context.rendezvous.store.add(f"call-{self.context.call_id}/{self.name}", number))


@dataclasses.dataclass
class UpdateFence:
    """Keeps a rank from running more than one update ahead of what its device has done."""

    record: Callable[[], torch.cuda.Event | None] | None
    """Marks the end of all work that is queued by now, or returns None if nothing can be marked now. None: a backward
    returns when its work is done."""
    _previous: torch.cuda.Event | None = None
    """The mark of the previous update's work; None if nothing is to be waited for."""

    @property
    def lead(self) -> int:
        """Number of updates after which all ranks have seen what rank 0 writes while it counts an update."""
        return 1 if self.record is None else 2

    def pass_update(self) -> None:
        """Wait until the previous update's reduction is done, and mark this one's; after each synchronised backward."""
        if self.record is None:
            return
        mark = self.record()
        if mark is None:  # A wait would end the capture of a CUDA graph, too; captured work is not carried out.
            return
        previous, self._previous = self._previous, mark
        if previous is not None:
            previous.synchronize()

    def finish(self) -> None:
        """Wait until all work that is queued by now is done: every rank has then begun the reductions in it."""
        mark = None if self.record is None else self.record()
        if mark is not None:
            mark.synchronize()


@dataclasses.dataclass
class Agreement:
    """One kind of request, such as a checkpoint.

    Every rank calls `poll` at every update, with its own number of the update; all ranks number alike.
    """

    slot: BoardSlot | StoreSlot
    """Place in which rank 0 writes the update that it names."""
    chooses: bool
    """True on rank 0."""
    lead: int
    """`UpdateFence.lead`; 0 where there is one rank."""

    def poll(self, request: int, update: int) -> tuple[int, int]:
        """Return the newest request that rank 0 has named an update for, with that update; (0, 0): none.

        Args:
            request: Number of the request that this rank sees, from 1 on. Rank 0 names an update for a new request once
                all ranks have passed the update that it named last; until then, a peer may still look for that update.
            update: Number of the update that this rank has just counted, from 1 on.
        """
        named, at = self.slot.read()
        if self.chooses and named != request and (not at or at + self.lead <= update):
            named, at = request, update + self.lead
            self.slot.write(named, at)
        return named, at


def make_fence(device: torch.device, num_processes: int) -> UpdateFence:
    """Return the fence of a rank that computes on a device."""
    is_done_at_once = num_processes == 1 or device.type != "cuda"
    return UpdateFence(None if is_done_at_once else lambda: record_work(device))


# --------------------------------------------------------------------------------------------------------------------
# Settings that change during the training: learning rate, clipping, accumulation, and what the user offers.


GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""Entries of a parameter group that are learning rates."""
SCHEDULER_RATES = ("base_lrs", "max_lrs", "_last_lr")
"""Attributes of schedulers that list a learning rate for each parameter group."""


@dataclasses.dataclass(eq=False)
class Steering:
    """The settings of an Accelerator that a run changes, and how."""

    prepared: Prepared
    """The optimizers and schedulers, with the learning rates."""
    updates: Updates
    """Clips gradients."""
    gradient_state: GradientState
    """Counts micro-batches."""

    def settings(self) -> dict[str, float | None]:
        """Return the values of the settings by name, without values that only a GPU knows."""
        settings: dict[str, float | None] = {}
        for prepared in self.prepared.optimizers[:1]:
            rate = prepared.optimizer.param_groups[0]["lr"]
            if not isinstance(rate, torch.Tensor) or rate.device.type == "cpu":  # A read would wait for the GPU.
                settings["lr"] = float(rate)
        settings["max_grad_norm"] = self.updates.max_grad_norm
        settings["gradient_accumulation_steps"] = self.gradient_state.num_steps
        return settings

    def change(self, wanted: Mapping[str, Wanted]) -> dict[str, tuple[Any, Any]]:
        """Change settings of the Accelerator and of the user; return the values before and after, by name."""
        own = {
            "lr": self._change_rate,
            "max_grad_norm": self._change_norm,
            "gradient_accumulation_steps": self._change_steps,
        }
        return {
            name: own[name](value) if name in ACCELERATOR_SETTINGS else _change_tunable(name, value)
            for name, value in wanted.items()
        }

    def _change_rate(self, wanted: Wanted) -> tuple[Any, Any]:
        optimizers = [prepared.optimizer for prepared in self.prepared.optimizers]
        schedulers = [prepared.scheduler for prepared in self.prepared.schedulers]
        if not optimizers:
            return None, None
        before = float(optimizers[0].param_groups[0]["lr"])
        for optimizer in optimizers:
            own = float(optimizer.param_groups[0]["lr"])
            followers = [scheduler for scheduler in schedulers if getattr(scheduler, "optimizer", None) is optimizer]
            if own:
                scale_rates(optimizer, followers, apply_change(own, wanted) / own)
                continue
            if isinstance(wanted, str) or followers:
                notify(
                    f"lr={wanted!r} changed nothing: the rate is 0 at this update, as at the start of a warm-up, and "
                    "no factor changes that. Ask again after the next update."
                )
                continue
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(apply_change(own, wanted))
                else:
                    group["lr"] = apply_change(own, wanted)
        return before, float(optimizers[0].param_groups[0]["lr"])

    def _change_norm(self, wanted: Wanted) -> tuple[Any, Any]:
        before = self.updates.max_grad_norm
        if before is None and isinstance(wanted, str):
            notify(
                f"max_grad_norm={wanted!r} changed nothing: gradients are not clipped, so nothing can be multiplied. "
                "Set a number, such as 1.0."
            )
        else:
            self.updates.max_grad_norm = None if wanted is None else apply_change(before or 0.0, wanted)
        return before, self.updates.max_grad_norm

    def _change_steps(self, wanted: Wanted) -> tuple[Any, Any]:
        before = self.gradient_state.num_steps
        self.gradient_state.num_steps = wanted
        return before, self.gradient_state.num_steps


def scale_rates(optimizer: torch.optim.Optimizer, schedulers: list[Any], factor: float) -> None:
    """Multiply the learning rates of all parameter groups, and what their schedulers compute them from.

    So the curve of a schedule keeps its shape, and groups keep the ratios of their rates.
    """
    for group in optimizer.param_groups:
        for name in GROUP_RATES:
            if isinstance(group.get(name), torch.Tensor):
                group[name].mul_(factor)
            elif name in group:
                group[name] *= factor
    pending = list(schedulers)
    while pending:
        scheduler = pending.pop()
        for name in SCHEDULER_RATES:
            if isinstance(rates := getattr(scheduler, name, None), list):
                setattr(scheduler, name, [rate * factor for rate in rates])
        pending += getattr(scheduler, "_schedulers", ())  # Of ChainedScheduler and SequentialLR.


def _change_tunable(name: str, wanted: Wanted) -> tuple[Any, Any]:
    context = current()
    assert context is not None
    before = context.tunables.get(name)
    if before is not None:
        context.tunables[name] = type(before)(apply_change(before, wanted))
    elif not isinstance(wanted, str):  # This rank has not read the setting yet, so a factor has nothing to multiply.
        context.tunables[name] = apply_change(0.0, wanted)
    return before, context.tunables.get(name)
