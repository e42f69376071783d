"""Measure what it costs to launch detached and to attach: `python benchmarks/detached.py [launches] [reports]`.

In turns, all warm: a plain launch of 2 ranks that do nothing, a detached one, `attach(...)` with a first snapshot of a
run in progress, and the parts of a detached launch. Between them it rests, as a person does. Then, in turns, a call
of a session in the kernel and in a host.

With a number of reports: only memory and descriptors of host and client while one rank reports so often, as fast as it
can, which stands for a day of reports. A host keeps the newest million.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from notebook_launcher import Session, attach, launch, notebook_launch, report

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
REST = 0.6
"""Seconds between two launches; after 0.1 s without one the fork server begins to fork a host."""
QUIET: dict[str, Any] = {"output": "none", "monitor": False}


def nothing() -> None:
    """Return."""


def report_often(num: int) -> None:
    """Report, and write a line now and then."""
    for step in range(num):
        report(step=step, loss=1.0, accuracy=0.5)
        if step % 100 == 0:
            print(f"step {step}: as many words as a line of a training has")


def wait_for(gate: str) -> None:
    """Return once a file is there."""
    while not Path(gate).exists():
        time.sleep(0.02)


def main() -> None:
    """Measure and print."""
    num = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NOTEBOOK_LAUNCHER_RUNS"] = folder
        if len(sys.argv) > 2:
            measure_long_run(int(sys.argv[2]))
            return
        for _ in range(3):
            plain(), detached()
        time.sleep(20)  # The fork server's chores.
        gate = Path(folder) / "gate"
        run = launch(wait_for, 2, args=(str(gate),), detached=True, **QUIET)
        while run.state != "running":
            time.sleep(0.02)
        turns = [(rested(plain), rested(detached), attached(run.id), *rested(started)) for _ in range(num)]
        gate.touch()
        run.wait()
        calls = session_calls(num)
    plain_ms, detached_ms, attach_ms, begun, over = (statistics.median(times) for times in zip(*turns, strict=True))
    say(f"a plain launch of 2 ranks: {plain_ms:.0f} ms, a detached one: {detached_ms:.0f} ms")
    say(f"a detached launch takes {detached_ms / plain_ms:.2f} times as long")
    say(f"attach and first snapshot: {attach_ms:.0f} ms (goal: 200 ms)")
    here_ms, hosted_ms = (statistics.median(times) for times in zip(*calls, strict=True))
    say(f"a call of a session of 2 ranks: {here_ms:.1f} ms in the kernel, {hosted_ms:.1f} ms in a host")
    say(f"of a detached launch: {begun:.0f} ms until the handle is there, {over:.0f} ms more until the results are")


def measure_long_run(num: int) -> None:
    """Print what host and client hold after each tenth of the reports; the client reads each of them once."""
    run = launch(report_often, 1, args=(num,), detached=True, output="all", monitor=False)
    host = psutil.Process(json.loads((run.folder / "summary.json").read_text())["kernel"]["pid"])
    position, due = 0, 0
    while not run.wait(0):
        _, position = run.metrics_since(position)
        if position < due:
            time.sleep(0.1)
            continue
        processes = host, psutil.Process()
        held = [(each.memory_info().rss / 1e6, each.num_fds(), each.num_threads()) for each in processes]
        (host_mb, host_fds, host_threads), (mb, fds, threads) = held
        say(
            f"{position:>9,} reports: host {host_mb:.0f} MB, {host_fds} descriptors, {host_threads} threads; "
            f"client {mb:.0f} MB, {fds} descriptors, {threads} threads",
            to=sys.stderr,
        )
        due = position + num // 10
    run.result()


def rested(measure: Callable[[], T]) -> T:
    """Rest, and then measure."""
    time.sleep(REST)
    return measure()


def timed_since(began: float) -> float:
    """Return the milliseconds since a time of `perf_counter`."""
    return 1000 * (time.perf_counter() - began)


def plain() -> float:
    """Return the milliseconds of a plain launch."""
    began = time.perf_counter()
    notebook_launch(nothing, 2, **QUIET)
    return timed_since(began)


def detached() -> float:
    """Return the milliseconds of a detached launch."""
    began = time.perf_counter()
    notebook_launch(nothing, 2, detached=True, **QUIET)
    return timed_since(began)


def attached(run_id: str) -> float:
    """Return the milliseconds of an attach and the first snapshot."""
    began = time.perf_counter()
    attach(run_id, show=False).snapshot()
    return timed_since(began)


def started() -> tuple[float, float]:
    """Return the milliseconds until a detached run has a handle, and from then on until it has results."""
    began = time.perf_counter()
    run = launch(nothing, 2, detached=True, **QUIET)
    handle = timed_since(began)
    run.result()
    return handle, timed_since(began) - handle


def session_calls(num: int) -> list[tuple[float, float]]:
    """Return the milliseconds of calls of a session in the kernel and of a detached one, in turns."""
    with Session(2, **QUIET) as here, Session(2, detached=True, **QUIET) as hosted:
        for session in (here, hosted):
            session.run(nothing)
        return [(call(here), call(hosted)) for _ in range(5 * num)]


def call(session: Session) -> float:
    """Return the milliseconds of a session's call."""
    began = time.perf_counter()
    session.run(nothing)
    return timed_since(began)


def say(text: str, to: Any = None) -> None:
    """Print a line of the result."""
    print(text, file=to)


if __name__ == "__main__":
    main()
