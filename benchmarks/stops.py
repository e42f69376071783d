"""Stop runs on two nodes at random moments, many times: `python benchmarks/stops.py [stops] [minutes]`.

The nodes are two agents on this machine with two ranks each. In turns: a launch of ranks that compute, a launch of
ranks that wait in a collective for ever, a session's call whose ranks meet in collectives. Half of the stops come while
the ranks start, half once they run. After each, nothing of a launch may be left, and a session's ranks must serve the
next call. What goes wrong is printed at once, with the stacks of this process's threads if a run did not end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import random
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist
from support.report import table

from notebook_launcher import Commands, Session, launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher import Run

OPTIONS: dict[str, Any] = {
    "output": "none", "monitor": False, "runs_folder": None, "threads_per_process": 1, "devices": "cpu"
}  # fmt: skip
RANKS = 4
LATEST = 0.3
"""Seconds before which a stop comes: a warm launch takes about as long. A session's call takes a tenth."""
SLOW = 5.0
"""Fewest seconds of a stop that is listed: the ladder is over after 2."""
HUNG = 30.0
"""Seconds after which a run counts as one that does not end."""
SEED = 7


def compute() -> None:
    """Compute for ever."""
    data = torch.ones(100)
    while True:
        data = (data * 2).clamp(max=1.0)


def wait_in_a_collective() -> None:
    """Wait for rank 0, which never comes."""
    while os.environ["RANK"] == "0":
        time.sleep(60)
    dist.all_reduce(torch.ones(1))


def meet() -> None:
    """Meet in collectives for ever."""
    while True:
        dist.all_reduce(torch.ones(1000))


def add_up() -> float:
    """Return the number of ranks."""
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def main() -> None:
    """Stop, and print a table."""
    num = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    until = time.monotonic() + 60 * (float(sys.argv[2]) if len(sys.argv) > 2 else 60.0)
    with contextlib.redirect_stdout(io.StringIO()):  # What the runs themselves say of their stops.
        say(result(*stop_many(num, until)))


def stop_many(num: int, until: float) -> tuple[dict[tuple[str, str], list[float]], int]:
    """Return the seconds of all stops, by what was stopped and by the last rung, and how many had a fault."""
    chance = random.Random(SEED)
    seconds: dict[tuple[str, str], list[float]] = {}
    wrong = 0
    with Commands([[], ["env"]]) as engine, Session(RANKS, engine=engine, **OPTIONS) as session:
        session.run(add_up)
        kinds: dict[str, Callable[[], Run]] = {
            "launch": lambda: launch(compute, RANKS, engine=engine, **OPTIONS),
            "collective": lambda: launch(wait_in_a_collective, RANKS, engine=engine, **OPTIONS),
            "session": lambda: session.launch(meet),
        }
        for number in range(num):
            if time.monotonic() > until:
                break
            kind = list(kinds)[number % len(kinds)]
            is_up, after = chance.random() < 0.5, chance.uniform(0.0, LATEST / 10 if kind == "session" else LATEST)
            rung, took, pids, faults = stop(kinds[kind](), after, is_up=is_up)
            if kind == "session" and list(session.run(add_up)) != [float(RANKS)] * RANKS:
                faults.append("the session's next call gave other values")
            if kind != "session" and (left := [pid for pid in pids if psutil.pid_exists(pid)]):
                faults.append(f"left behind: {left}")
            when = "running" if is_up else "starting"
            seconds.setdefault((f"{kind}, {when}", rung), []).append(took)
            wrong += bool(faults)
            for fault in faults:
                say(f"stop {number} ({kind}, {after:.3f} s after it was {when}, {rung}): {fault}")
    return seconds, wrong


def stop(run: Run, after: float, *, is_up: bool) -> tuple[str, float, list[int], list[str]]:
    """Stop a run after some seconds; return the last rung, the seconds that it took, its processes, its faults."""
    faults: list[str] = []
    while is_up and any(rank.state == "starting" for rank in run.ranks):
        run.wait(0.01)
    run.wait(after)
    pids = [rank.pid for rank in run.ranks if rank.pid is not None]
    began = time.monotonic()
    run.stop(wait=False)
    if not run.wait(HUNG):
        faults.append(f"it had not ended after {HUNG:g} s: {run!r}")
        faulthandler.dump_traceback()
        run.stop(at_once=True)
    took = time.monotonic() - began
    if took > SLOW:
        faults.append(f"it took {took:.1f} s")
    if run.state != "stopped":
        faults.append(f"it is {run.state}: {run.exception()!r}")
    return str(run.stop()), took, pids, faults


def result(seconds: dict[tuple[str, str], list[float]], wrong: int) -> str:
    """Return the table of all stops."""
    rows = [
        [kind, rung, str(len(took)), f"{statistics.median(took):.2f}", f"{max(took):.2f}"]
        for (kind, rung), took in sorted(seconds.items())
    ]
    total = sum(map(len, seconds.values()))
    return f"{total} stops, {wrong} with a fault\n" + table(
        ["what", "last rung", "stops", "median s", "longest s"], rows
    )


def say(text: str) -> None:
    """Print a line at once."""
    print(text, file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main()
