"""Functions that ranks call in these tests, and the options of their launches."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_launcher import report

if TYPE_CHECKING:
    from notebook_launcher import Run


QUIET: dict[str, Any] = {"output": "none", "monitor": False, "threads_per_process": 1, "runs_folder": None}
"""No output, no view and no folder: the tests look at results and processes."""


def sum_up() -> float:
    """Return the number of ranks, as a collective counts them."""
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def kill_rank(rank: int) -> None:
    """Kill one rank, while the others wait for it in a collective."""
    if os.environ["RANK"] == str(rank):
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def wait_for_rank_0() -> None:
    """Report, and let all ranks but rank 0 wait in a collective."""
    report(up=1)
    if os.environ["RANK"] == "0":
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


def all_up(run: Run) -> bool:
    """Return True once each of four ranks has reported."""
    return len(run.metrics) == 4
