"""Measure how large tensors travel: `python benchmarks/large.py`.

In turns, at each size: one write of a tensor into new shared memory; a launch of 4 ranks that captures the tensor, less
one that captures a small one; a child that this process forks, and that makes such a tensor and writes it into shared
memory, which is then mapped; and a call of a session whose rank 0 returns such a tensor. Ratios are of the same turn.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from support.measurements import say
from support.program import parse, publish
from support.report import milliseconds, table

from notebook_launcher import Session, notebook_launch

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

OPTIONS: dict[str, Any] = {
    "devices": "cpu", "output": "none", "monitor": False, "runs_folder": None, "threads_per_process": 1,
}  # fmt: skip
RANKS = 4
SIZES = {256: 15, 1024: 7}
"""By megabytes of a tensor: the number of turns."""
QUICK = {64: 3}
GOAL = 1.1
CHORES = 6.0
"""Seconds that the fork server's chores take after the first launches."""
HEAD = ["size", "one write", "captured by 4 ranks", "made and written by a forked child", "returned by rank 0"]


def main() -> None:
    """Measure, print and write the report."""
    options = parse(__doc__ or "", contenders=("ours",))
    torch.set_num_threads(1)  # The forked child would wait for the threads of a pool that it does not have.
    publish("large", "Large tensors, there and back", options, measure(options))


def measure(options: argparse.Namespace) -> Iterator[str]:
    """Measure in turns, and yield the tables."""
    warm_up()
    rows, promises = [], []
    with Session(RANKS, **OPTIONS) as session:
        for megabytes, turns in (QUICK if options.quick else SIZES).items():
            tensor, found = torch.ones(megabytes * 2**18), []
            returned(session, megabytes)
            for turn in range(options.repeats or turns):
                say(f"{megabytes} MB, turn {turn + 1}")
                small = captured(torch.ones(1))
                there = captured(tensor) - small
                found.append((written(tensor), there, made_by_hand(megabytes), returned(session, megabytes)))
            rows.append([f"{megabytes} MB", *(milliseconds(list(times)) for times in zip(*found, strict=True))])
            promises += [
                promise(f"{megabytes} MB captured", "one write", [there / write for write, there, _, _ in found]),
                promise(f"{megabytes} MB returned", "a forked child", [back / hand for _, _, hand, back in found]),
            ]
    yield "## A tensor there and back\n\nMilliseconds: median (quartiles).\n\n" + table(HEAD, rows)
    yield "## Promises\n\n" + table(["promise", "measured", "held"], promises)


def promise(what: str, beside: str, ratios: list[float]) -> list[str]:
    """Return a row about ratios of the same turn."""
    ratio = statistics.median(ratios)
    return [f"{what}: <= {GOAL} x {beside}", f"{ratio:.2f} x", "yes" if ratio <= GOAL else "**no**"]


def warm_up() -> None:
    """Launch until the fork server has done its chores."""
    for _ in range(2):
        captured(torch.ones(1))
    time.sleep(CHORES)
    captured(torch.ones(1))


def written(tensor: torch.Tensor) -> float:
    """Return the seconds of one write of a tensor into new shared memory."""
    began = time.perf_counter()
    os.close(write(tensor))
    return time.perf_counter() - began


def write(tensor: torch.Tensor, fd: int = -1) -> int:
    """Write a tensor into shared memory, new unless `fd` is given; return its descriptor."""
    fd = os.memfd_create("large") if fd < 0 else fd
    array: Any = tensor.numpy()
    rest = memoryview(array).cast("B")
    while rest:
        rest = rest[os.write(fd, rest) :]
    return fd


def captured(tensor: torch.Tensor) -> float:
    """Return the seconds of a launch whose function captures a tensor and reads an element of it."""

    def read() -> object:
        return tensor[0].item()

    began = time.perf_counter()
    notebook_launch(read, RANKS, **OPTIONS)
    return time.perf_counter() - began


def made_by_hand(megabytes: int) -> float:
    """Return the seconds until a tensor that a forked child makes can be read here."""
    began = time.perf_counter()
    fd = os.memfd_create("large")
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            write(torch.ones(megabytes * 2**18), fd)
        os._exit(0)
    os.waitpid(pid, 0)
    with mmap.mmap(fd, 0) as memory:
        torch.frombuffer(memory, dtype=torch.float32)[0].item()
        seconds = time.perf_counter() - began
    os.close(fd)
    return seconds


def returned(session: Session, megabytes: int) -> float:
    """Return the seconds until a tensor that rank 0 makes and returns can be read here."""

    def make() -> torch.Tensor | None:
        return torch.ones(megabytes * 2**18) if os.environ["RANK"] == "0" else None

    began = time.perf_counter()
    session.run(make)[0][0].item()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
