"""Arrivals of ranks before a collective, counted in the group's store, so that a rank can print for whom it waits.

Collectives pair with whatever the peers call next, so a call on one rank alone hangs without a word, or mixes
with the peers' gradients. Keys in a store pair with nothing.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from typing import TYPE_CHECKING

import torch.distributed as dist

from notebook_launcher.context import WAITING, activity, call_id, current
from notebook_launcher.training.queued_work import mark_queued_work
from notebook_launcher.wording.counts import rank_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from notebook_launcher.training.queued_work import QueuedWork

__all__ = ["EVALUATION", "describe_ahead", "find_ahead", "meet"]

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

    Returns:
        False before an evaluation whose absent ranks have all returned: nobody needs its broadcast.

    Raises:
        RuntimeError: A peer waits in another call that this rank has not made, so both would wait for ever.

    Args:
        call: Function that the user calls, for the line: `"save_state"`.
        patience: Seconds after which a rank continues to the collective without a notice, if that is sooner.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return True
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no other name for it
    if store is None:  # MPI's groups have none.
        return True
    # The store counts the visits, so callers need no state of their own.
    visit = store.add(_key(call, dist.get_rank()), 1)
    absent = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    begin = time.monotonic()
    queued: QueuedWork | None = mark_queued_work()
    is_marked = has_noticed = False
    with contextlib.ExitStack() as stack:
        # The store's own wait cannot be interrupted, and prints warnings.
        while absent := [rank for rank in absent if store.add(_key(call, rank), 0) < visit]:
            # A peer that begins a gather for which this rank's GPU still waits is not too late.
            if not is_marked and (queued is None or queued.query()):
                stack.enter_context(activity(WAITING))
                is_marked = True
            waited = time.monotonic() - begin
            has_ended = call == EVALUATION and _have_ended(absent)
            if has_ended or waited > patience:
                return not has_ended
            if waited > CROSSED_AFTER:
                _refuse_crossing(call, absent)
            if waited > NOTICE_AFTER and not has_noticed:
                has_noticed = True
                if store.add(_key(call, "notices"), 1) == 1:
                    _print_notice(call, absent)
                if call != EVALUATION or not _is_one_machine():
                    return True
            time.sleep(min(max(waited / 8, SHORTEST_PAUSE), LONGEST_PAUSE))
    return True


def _is_one_machine() -> bool:
    context = current()
    return context is not None and context.num_nodes == 1


def _have_ended(ranks: Iterable[int]) -> bool:
    """Return True if the function has returned on all of these ranks."""
    context = current()
    return context is not None and set(ranks).issubset(context.ended_peers())


def _key(call: str, what: int | str) -> str:
    return f"run {call_id()}/{call}/{what}"


def _refuse_crossing(call: str, absent: Iterable[int]) -> None:
    context = current()
    ahead = find_ahead(set(absent).intersection([] if context is None else context.waiting_peers()))
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


def _print_notice(call: str, absent: list[int]) -> None:
    text = f"{call} waits for {rank_list(absent)}: every rank must call it, not inside `if accelerator.is_main_process`"
    way_out = f" {ON_ONE_RANK}" if call == EVALUATION else ""
    print(f"{text}. If a rank is only busy, nothing is wrong.{way_out}", file=sys.stderr, flush=True)  # noqa: T201
