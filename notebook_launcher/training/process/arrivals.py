"""Arrivals of ranks before a collective, counted in the group's store, so that a rank can print for whom it waits.

Collectives pair with whatever the peers call next, so a call on one rank alone hangs without a word, or mixes
with the peers' gradients. Keys in a store pair with nothing.
"""

from __future__ import annotations

import math
import sys
import time

import torch.distributed as dist

from notebook_launcher import context
from notebook_launcher.units import rank_list

__all__ = ["meet"]

NOTICE_AFTER = 10.0
"""Seconds after which a rank prints for whom it waits. This is not an error: a peer may be evaluating."""
SHORTEST_PAUSE, LONGEST_PAUSE = 5e-5, 1e-2
"""Seconds between two looks into the store; an eighth of the wait so far, within these."""


def meet(call: str, patience: float = math.inf) -> None:
    """Wait until every rank has called this as often as this rank has; after `NOTICE_AFTER` seconds print for whom.

    Every rank must call it. After the notice a rank continues to the collective, which waits or fails.
    One line is written to stderr for each group and name of a call. It took two ranks 0.2 ms (CPU).

    Args:
        call: What the user calls, for the line: `"save_state"`.
        patience: Seconds after which a rank continues to the collective without a notice, if that is sooner.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no other name for it
    if store is None:  # MPI's groups have none.
        return
    # The store counts the visits, so callers need no state of their own.
    visit = store.add(f"{call}/{dist.get_rank()}", 1)
    absent = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    begin = time.monotonic()
    with context.activity(context.WAITING):
        # The store's own wait cannot be interrupted, and prints warnings.
        while absent := [rank for rank in absent if store.add(f"{call}/{rank}", 0) < visit]:
            waited = time.monotonic() - begin
            if waited > patience:
                return
            if waited > NOTICE_AFTER:
                if store.add(f"{call}/notices", 1) == 1:
                    _print_notice(call, absent)
                return
            time.sleep(min(max(waited / 8, SHORTEST_PAUSE), LONGEST_PAUSE))


def _print_notice(call: str, absent: list[int]) -> None:
    text = f"{call} waits for {rank_list(absent)}: every rank must call it, not inside `if accelerator.is_main_process`"
    print(f"{text}. If a rank is only busy, nothing is wrong.", file=sys.stderr, flush=True)  # noqa: T201
