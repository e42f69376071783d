"""Measure launches and the loop on one GPU: `python benchmarks/gpu.py`; needs a GPU of NVIDIA's.

Each launch, call and process computes a product on the GPU; with a process group, it also reduces a tensor over all
ranks. Every process but those of a session makes its CUDA context anew, and *context alone* is a process that does
nothing else. The loop is the one in `step_overhead.py`, in a launch of one rank with NCCL.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support import overhead_rank
from support.measurements import say
from support.process import settle
from support.program import LABELS as EVERYWHERE
from support.program import parse, publish
from support.report import median, milliseconds, table

from notebook_launcher import Session, notebook_launch
from notebook_launcher.machine.devices import detect

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

OPTIONS: dict[str, Any] = {"devices": [0], "output": "none", "monitor": False, "runs_folder": None}
REPEATS, QUICK_REPEATS = 10, 2
TURNS, QUICK_TURNS = {"list": 60, "loader": 12}, {"list": 10, "loader": 3}
NAMES = ("hand", "ours", "accelerate")


def main() -> None:
    """Measure, print and write the report."""
    options = parse(__doc__ or "", contenders=NAMES)
    if detect().why_no_gpu or not detect().gpus:
        sys.exit(f"benchmarks/gpu.py needs a GPU: {detect().why_no_gpu or 'none was found'}")
    publish("gpu", "On one GPU", options, measure(options))


def compute() -> float:
    """Compute on the GPU, and over all ranks if there is a group; return a number that shows that it was done."""
    device = torch.device("cuda", 0)
    square = torch.eye(64, device=device)
    total = (square @ square).trace().reshape(1)
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total)


def measure(options: argparse.Namespace) -> Iterator[str]:
    """Measure both parts; yield their tables."""
    yield launches(options.repeats or (QUICK_REPEATS if options.quick else REPEATS))
    yield loop(options.only, QUICK_TURNS if options.quick else TURNS)


def launches(repeats: int) -> str:
    """Return the table of launches; the contenders take turns."""
    began = time.perf_counter()
    notebook_launch(compute, 1, **OPTIONS)
    first = time.perf_counter() - began
    notebook_launch(compute, 1, **OPTIONS)
    settle(lambda: psutil.Process().children(recursive=True))  # The launcher postpones some work until it is idle.
    with contextlib.ExitStack() as stack:
        sessions = {ranks: stack.enter_context(Session(ranks, **OPTIONS)) for ranks in (1, 2)}
        contenders: dict[str, Callable[[], object]] = {
            "notebook_launch, 1 rank, NCCL": lambda: notebook_launch(compute, 1, **OPTIONS),
            "notebook_launch, 2 ranks that share the GPU, gloo": lambda: notebook_launch(compute, 2, **OPTIONS),
            "Session.run, 1 rank, NCCL": lambda: sessions[1].run(compute),
            "Session.run, 2 ranks that share the GPU, gloo": lambda: sessions[2].run(compute),
            "torch start_processes, spawn, 1 process, NCCL": lambda: spawn(_with_group),
            "the same, context alone": lambda: spawn(_alone),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(-1, repeats):  # The first turn does not count.
            say(f"launches, turn {turn + 1}")
            for name, run in contenders.items():
                began = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - began)
    rows = [[name, milliseconds(times[1:])] for name, times in seconds.items()]
    rows.insert(0, ["notebook_launch, 1 rank, the first of a process", milliseconds([first])])
    return (
        "## Launches\n\nFrom the call to its results, the GPU's work included. Milliseconds: median (quartiles).\n\n"
        + table(["", "milliseconds"], rows)
    )


def spawn(work: Callable[..., None]) -> None:
    """Run a function in a new process, and wait for its end."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, (f"{folder}/store",), nprocs=1, start_method="spawn")


def _alone(_: int, _store: str) -> None:
    compute()


def _with_group(_: int, store: str) -> None:
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    compute()
    dist.destroy_process_group()


def loop(names: list[str], turns: dict[str, int]) -> str:
    """Return the table of the loop in a launch of one rank."""
    say("the loop")
    measured = functools.partial(overhead_rank.measure_all, names, turns, "cuda")
    (found,) = notebook_launch(measured, 1, **OPTIONS)
    wall = {(row["source"], row["window"], row["name"]): row["wall"] for row in found if "wall" in row}
    notes = [f"{EVERYWHERE[row['name']]}: {row['failed']}\n\n" for row in found if "failed" in row]
    present = [name for name in names if ("list", 1, name) in wall]
    compared = [name for name in present if name != "hand"] if "hand" in present else []
    rows = []
    for source, window in dict.fromkeys(key[:2] for key in wall):
        cells = [f"{median(wall[source, window, name]):.0f}" for name in present]
        for name in compared:
            pairs = zip(wall[source, window, name], wall[source, window, "hand"], strict=True)
            cells.append(f"{median([one - by_hand for one, by_hand in pairs]):.1f}")
        rows.append([f"windows of {window}{', with its loader' if source == 'loader' else ''}", *cells])
    head = ["", *(EVERYWHERE[name] for name in present)]
    head += [f"{EVERYWHERE[name]} adds" for name in compared]
    return (
        "## The loop\n\nMicroseconds of a micro-batch; *adds*: the median of the differences from the loop by hand in "
        f"the same round, of {turns['list']} and {turns['loader']} rounds.\n\n{''.join(notes)}{table(head, rows)}"
    )


if __name__ == "__main__":
    main()
