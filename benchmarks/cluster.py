"""Measure ranks on two nodes beside ranks on one machine: `python benchmarks/cluster.py [repeats]`.

The nodes are two agents on this machine, so the figures are what the agents and their links cost, and not what a
network does. In turns: 4 ranks on one machine, 2 ranks on each of two nodes, and two torchruns that are started as the
agents are, by the same commands. Ratios are those of medians.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from support.report import machine, milliseconds, table

from notebook_launcher import Commands, Session, notebook_launch

if TYPE_CHECKING:
    from collections.abc import Callable

OPTIONS: dict[str, Any] = {"devices": "cpu", "output": "none", "monitor": False, "runs_folder": None}
SCRIPT = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
data = torch.ones(4 << 20)
dist.all_reduce(data)
began = time.perf_counter()
for _ in range(10):
    dist.all_reduce(data)
if dist.get_rank() == 0:
    print("seconds", (time.perf_counter() - began) / 10)
dist.destroy_process_group()
"""


def rank() -> str:
    """Return what is at hand, so that the launch alone takes time."""
    return os.environ["RANK"]


def reduce_gradients() -> float:
    """Return the seconds of an all-reduce of 16 MB."""
    data = torch.ones(4 << 20)
    dist.all_reduce(data)
    began = time.perf_counter()
    for _ in range(10):
        dist.all_reduce(data)
    return (time.perf_counter() - began) / 10


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def torchruns(script: Path) -> float:
    """Run the script by a torchrun on each node; return the seconds of one all-reduce there."""
    with tempfile.TemporaryDirectory() as store:
        options = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=bench"]
        options += [f"--rdzv-endpoint=127.0.0.1:{29000 + os.getpid() % 2000}", "--local-addr=127.0.0.1"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, str(script)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": store}
        nodes = [
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            for _ in range(2)
        ]
        shown = "".join(node.communicate()[0] for node in nodes)
    return float(shown.partition("seconds ")[2].split()[0])


def main() -> None:
    """Measure and print."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    found = Found()
    for _ in range(3):
        with Commands([[], []]) as engine:
            found.note("agents up", "two nodes", seconds_of(engine.look))
    with Commands([[], []]) as engine:
        places: dict[str, dict[str, Any]] = {"one machine": OPTIONS, "two nodes": {**OPTIONS, "engine": engine}}
        measure_launches(found, places, repeats)
        measure_sessions(found, places, repeats)
    print(f"{machine()}\n{report(found)}")


class Found(dict[str, dict[str, list[float]]]):
    """Seconds, by what was measured and by contender."""

    def note(self, what: str, who: str, seconds: float) -> None:
        """Add one measurement."""
        self.setdefault(what, {}).setdefault(who, []).append(seconds)


def measure_launches(found: Found, places: dict[str, dict[str, Any]], repeats: int) -> None:
    """Measure launches after the first one."""
    for options in places.values():
        notebook_launch(rank, 4, **options)
    for _ in range(repeats):
        for who, options in places.items():
            found.note("warm launch", who, seconds_of(functools.partial(notebook_launch, rank, 4, **options)))


def measure_sessions(found: Found, places: dict[str, dict[str, Any]], repeats: int) -> None:
    """Measure calls of sessions, and what their ranks reduce."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        script = Path(folder, "reduce.py")
        script.write_text(SCRIPT)
        sessions = {who: stack.enter_context(Session(4, **options)) for who, options in places.items()}
        for session in sessions.values():
            session.run(rank)
        for _ in range(repeats):
            for who, session in sessions.items():
                found.note("session call", who, seconds_of(functools.partial(session.run, rank)))
        for _ in range(max(3, repeats // 3)):
            for who, session in sessions.items():
                found.note("all-reduce of 16 MB", who, session.run(reduce_gradients)[0])
            found.note("all-reduce of 16 MB", "two torchruns", torchruns(script))


def report(found: Found) -> str:
    """Return the table: medians with quartiles in ms, and the ratio to one machine."""
    contenders = ("one machine", "two nodes", "two torchruns")
    rows = []
    for what, by in found.items():
        cells = [milliseconds(by[who]) if who in by else "-" for who in contenders]
        ratio = "-"
        if "one machine" in by:
            ratio = f"{statistics.median(by['two nodes']) / statistics.median(by['one machine']):.2f}"
        rows.append([what, *cells, ratio])
    return table(["ms: median (quartiles)", *contenders, "two nodes / one machine"], rows)


if __name__ == "__main__":
    main()
