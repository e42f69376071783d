"""Arrivals of ranks before a collective, counted in the group's store, so that a rank can print for whom it waits.

Collectives pair with whatever the peers call next, so a call on one rank alone hangs without a word, or mixes
with the peers' gradients. Keys in a store pair with nothing.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import sys
import time
import traceback
import uuid
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from notebook_launcher.context import ENDED, WAITING, activity, call_id, current
from notebook_launcher.training.queued_work import mark_queued_work
from notebook_launcher.training.user_warnings import warn_user
from notebook_launcher.wording import rank_list

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


EVALUATION = "a forward of the prepared model without gradients"
"""The first one after training shares rank 0's buffers, such as BatchNorm's, with all ranks."""
ON_ONE_RANK = "To evaluate on one rank alone, call accelerator.unwrap_model(model) there."
CALLS = (EVALUATION, "save_model", "get_state_dict", "save_state", "load_state", "wait_for_everyone", "iter(loader)")
"""The calls that ranks meet at."""

NOTICE_AFTER = 10.0
"""Seconds after which a rank prints for which ranks it waits. Waiting is not an error: a peer may be evaluating."""
CROSSED_AFTER = 1.0
"""Seconds after which a rank checks if the ranks that it waits for wait in another call."""
SHORTEST_PAUSE, LONGEST_PAUSE = 5e-5, 1e-2
"""Seconds between two looks into the store; an eighth of the wait so far, within these."""


def meet(call: str, patience: float = math.inf) -> bool:
    """Wait until every rank has called this as often as this rank has; after `NOTICE_AFTER` seconds print for whom.

    Every rank must call it. Each run of a session counts anew, because a failure may have come on one rank before its
    call. After the notice a rank continues to the collective, which waits or fails; before an evaluation it waits on
    for ranks of its machine, since its broadcast would pair with one of training and succeed. One line is written to
    stderr for each group and name of a call. It took two ranks 0.2 ms (CPU).

    A rank whose patience (in seconds) ends sooner continues to the collective without a notice. Where a peer waits in
    another call that this rank has not made, both would wait for ever, and this rank raises RuntimeError.

    Returns False before an evaluation whose absent ranks have all returned: nobody needs its broadcast.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return True
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no other name for it
    if store is None:  # MPI's groups have none.
        return True
    # The store counts the visits, so callers need no state of their own.
    visit = store.add(_key(call, dist.get_rank()), 1)
    absent = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    begin, context = time.monotonic(), current()
    queued = mark_queued_work()
    is_marked = has_noticed = False
    with contextlib.ExitStack() as stack:
        # The store's own wait cannot be interrupted, and prints warnings.
        while absent := [rank for rank in absent if store.add(_key(call, rank), 0) < visit]:
            # A peer that begins a gather for which this rank's GPU still waits is not too late.
            if not is_marked and (queued is None or queued.query()):
                stack.enter_context(activity(WAITING))
                is_marked = True
            waited = time.monotonic() - begin
            has_ended = call == EVALUATION and context is not None and set(absent).issubset(context.peers_in(ENDED))
            if has_ended or waited > patience:
                return not has_ended
            if waited > CROSSED_AFTER:
                _refuse_crossing(call, absent)
            if waited > NOTICE_AFTER and not has_noticed:
                has_noticed = True
                if store.add(_key(call, "notices"), 1) == 1:
                    text = (
                        f"{call} waits for {rank_list(absent)}: every rank must call it, not inside "
                        "`if accelerator.is_main_process`. If a rank is only busy, nothing is wrong."
                    )
                    text += f" {ON_ONE_RANK}" if call == EVALUATION else ""
                    print(text, file=sys.stderr, flush=True)  # noqa: T201
                if call != EVALUATION or context is None or context.num_nodes > 1:
                    return True
            time.sleep(min(max(waited / 8, SHORTEST_PAUSE), LONGEST_PAUSE))
    return True


def _key(call: str, what: int | str) -> str:
    return f"run {call_id()}/{call}/{what}"


def _refuse_crossing(call: str, absent: Iterable[int]) -> None:
    context = current()
    ahead = find_ahead(set(absent).intersection([] if context is None else context.peers_in(WAITING)))
    if ahead:
        raise RuntimeError(
            f"rank {dist.get_rank()} waits in {call}, and {describe_ahead(ahead)}: they would wait for each other for "
            "ever. Make both calls on every rank, in the same order, not inside `if accelerator.is_main_process`."
            + (f" {ON_ONE_RANK}" if EVALUATION in (call, *ahead.values()) else "")
        )


def describe_ahead(ahead: Mapping[int, str]) -> str:
    """Return `ranks 1, 2 wait in save_model`."""
    calls: dict[str, list[int]] = {}
    for rank, call in ahead.items():
        calls.setdefault(call, []).append(rank)
    return ", ".join(
        f"{rank_list(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {call}" for call, ranks in calls.items()
    )


def find_ahead(ranks: Iterable[int]) -> dict[int, str]:
    """Return which of these ranks have made a call that this rank has not made as often, with the call."""
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - as above
    if store is None:
        return {}
    found: dict[int, str] = {}
    for rank in ranks:
        for call in CALLS:
            if store.add(_key(call, rank), 0) > store.add(_key(call, dist.get_rank()), 0):
                found[rank] = call
    return found


# --------------------------------------------------------------------------------------------------------------------
# Attempts that all processes make together: if one must give up, all give up, and meet again in a new group.
#
#     process 0            process 1                 process 2
#     function(64) ...     function(64) ...          function(64) returns
#     waits in all-reduce  out of memory
#                          writes it to the store
#                          leaves the group
#     all-reduce fails                                reads what each wrote
#     reads the store
#     leaves the group                                leaves the group
#     ------------------- all of them: a new group, function(57) -------------------
#
# A process that has left cannot be waited for: with gloo its connections close, and a process that waits in a
# collective gets an error. A new group is needed all the same, since the processes may have stopped in different
# collectives, and the next one would meet the rest of the last.


# A process may evaluate and save for hours after the others have returned. One that has died is noticed
# by the process that started it.
PATIENCE = timedelta(days=30)


DONE, GAVE_UP, RELEASED, FAILED = "done", "gave up", "released", "failed"
"""Ends of one process' attempt. It is released if it failed because another rank had given up."""


class Peers:
    """The processes of the default group, for a call that may need several attempts; all make one at the same place."""

    def __init__(self) -> None:
        names = [uuid.uuid4().hex]
        with activity(WAITING):
            dist.broadcast_object_list(names)
        # The group's own store, which outlives it here. torch has no public name for it.
        self._store = dist.PrefixStore(f"attempts/{names[0]}", dist.distributed_c10d._get_default_store())  # noqa: SLF001
        self._rank, self._num_processes = dist.get_rank(), dist.get_world_size()
        self._backend, self._timeout = dist.get_backend(), _group_timeout()
        self._number = 0

    def agree(self, error: BaseException | None, gives_up: Callable[[BaseException], bool]) -> bool:
        """Return True if all processes shall try again; there is a new group then.

        The error is that of this process' attempt, None if it succeeded; `gives_up(error)` if it asks for another one.
        """
        mine = self._outcome(error, gives_up)
        if mine == GAVE_UP:
            # Before it leaves: a process that gets an error from that must find the reason.
            self._store.set(f"{self._number}/given up", "")
        if mine == FAILED:
            # The error of a store that has ended with the others must not hide this error.
            with contextlib.suppress(RuntimeError):
                self._store.set(self._key(self._rank), mine)
            return False
        self._store.set(self._key(self._rank), mine)
        if mine != DONE:
            clear_variables(error)
            _leave_group()
        keys = [self._key(rank) for rank in range(self._num_processes)]
        self._store.wait(keys, PATIENCE)
        outcomes = [self._store.get(key).decode() for key in keys]
        if FAILED in outcomes or GAVE_UP not in outcomes:
            return False
        if mine == DONE:
            _leave_group()
        self._number += 1
        dist.init_process_group(
            self._backend,
            timeout=self._timeout,
            store=dist.PrefixStore(f"group {self._number}", self._store),
            rank=self._rank,
            world_size=self._num_processes,
        )
        return True

    def _outcome(self, error: BaseException | None, gives_up: Callable[[BaseException], bool]) -> str:
        if error is None:
            return DONE
        if gives_up(error):
            return GAVE_UP
        if isinstance(error, Exception) and self._store.check([f"{self._number}/given up"]):
            return RELEASED
        return FAILED

    def _key(self, rank: int) -> str:
        return f"{self._number}/rank {rank}"


def clear_variables(error: BaseException | None) -> None:
    """Clear the variables of all functions that an error came through, because they hold tensors."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _leave_group() -> None:
    """Leave the default group so that its connections close, which the last reference to it does."""
    group = weakref.ref(dist.distributed_c10d._get_default_group())  # noqa: SLF001
    _take_from_torch(group())
    _take_from_models()
    gc.collect()
    context = current()
    if context is not None and context.pid == os.getpid():
        context.rendezvous.leave()
    elif "nccl" in dist.get_backend():
        dist.distributed_c10d._abort_process_group()  # noqa: SLF001 - `destroy` would wait for the collective
    else:
        dist.destroy_process_group()
    if group() is not None:
        warn_user(
            "Something outside of the function still refers to the process group, so a process that waits for this "
            "process in a collective will wait until its timeout. Create the object that holds the group inside the "
            "function."
        )


def _take_from_torch(group: object) -> None:
    # Imported while a group is up (torch's compiler does), this module keeps it in its functions' defaults.
    # Without it, they take the group that is up when they are called.
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in list(vars(module).values()) if module else ():
        defaults = getattr(function, "__defaults__", None)
        if defaults and any(default is group for default in defaults):
            function.__defaults__ = tuple(None if default is group else default for default in defaults)


def _take_from_models() -> None:
    # Such as models of the attempt that an Accelerator still lists.
    for thing in gc.get_objects():
        # `isinstance` would wake lazy objects.
        if issubclass(type(thing), DistributedDataParallel) and "process_group" in vars(thing):
            vars(thing).update(process_group=None, reducer=_Gone(), logger=_Gone())


class _Gone:
    """Stands where a DDP model had what belongs to a group."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            "This DDP model belongs to an attempt that ran out of memory, or was made before it, and its process group "
            "is gone. Create and prepare the model inside the function that is tried again."
        )


def _group_timeout() -> timedelta | None:
    group: Any = dist.distributed_c10d._get_default_group()  # noqa: SLF001
    with contextlib.suppress(AttributeError, RuntimeError):
        timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout  # noqa: SLF001
        return timeout
    return None
