"""Signals to every process of a run at every moment: `python benchmarks/chaos.py [words of the cases to try]`.

A case is a victim (a rank, the supervisor, the fork server, the host of a detached run, the agent of a node), a moment
(at the start, in the function, in a collective, while the ranks exit, during a stop) and a signal (SIGKILL, SIGTERM,
SIGSTOP). Every run has a time limit, and must end within 5 s of it; in the cases of a stop, within 3 s of the second
request. Then the next launch must work, and once fork server and engine are closed no process may be left. What goes
wrong is printed at once.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import io
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from support.report import table

from notebook_launcher import Commands, launch
from notebook_launcher.engines.fork_server_handle import fork_server

if TYPE_CHECKING:
    from collections.abc import Callable

MOMENTS = ("start", "function", "collective", "exit", "stop")
VICTIMS = ("rank", "supervisor", "fork server", "host", "agent")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
RANKS = 2
LIMIT = 4.0
"""Seconds of `timeout=`: a launch on nodes that are not up takes two."""
AFTER_LIMIT, AFTER_KILL = 5.0, 3.0
"""Seconds in which a run must end after its limit, and after the second request to stop."""
HUNG = 30.0
"""Seconds after which a run counts as one that does not end."""
GOING = 10.0
"""Seconds for the last processes to go, after the end of a run and of what lasts longer."""
PR_SET_CHILD_SUBREAPER = 36
OPTIONS: dict[str, Any] = {"output": "none", "monitor": False, "threads_per_process": 1, "devices": "cpu"}


class Case(NamedTuple):
    """A signal to one process of a run, at one moment."""

    victim: str
    moment: str
    signum: signal.Signals

    def __str__(self) -> str:
        return f"{self.signum.name} to the {self.victim}, {self.moment}"


def work(moment: str) -> None:
    """Be in a state for ever, or until the exit."""
    if moment == "exit":
        atexit.register(time.sleep, 2.0)
        return
    if moment == "collective" and os.environ["RANK"] != "0":
        dist.all_reduce(torch.ones(1))
    while True:
        sum(range(1000))


def main() -> None:
    """Try the cases, and print a table."""
    words = sys.argv[1:]
    # The children of processes that were killed become ours, where they are found.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    cases = [Case(*case) for case in itertools.product(VICTIMS, MOMENTS, SIGNALS)]
    cases = [case for case in cases if all(word in str(case) for word in words)]
    found: dict[Case, tuple[float, list[str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            said = io.StringIO()  # What the runs themselves say.
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                found[case] = seconds, faults = try_case(case, folder)
            say(f"{case}: {seconds:.1f} s{''.join(f'; {fault}' for fault in faults)}")
    say(result(found))


def try_case(case: Case, folder: str) -> tuple[float, list[str]]:
    """Return the seconds that the run took after its limit or its stop, and what went wrong."""
    options = {**OPTIONS, "runs_folder": folder if case.victim == "host" else None}
    options["engine"] = engine = Commands([[], ["env"]]) if case.victim == "agent" else None
    if case.victim == "host":
        options["detached"] = True
    # A run whose fork server and agents are up: the import of torch takes seconds.
    launch(abs, RANKS, args=(1,), **options).wait()
    over, faults = try_run(case, options)
    try:
        if list(launch(int, RANKS, **options).result(60)) != [0] * RANKS:
            faults.append("the next launch gave other values")
    except Exception as error:  # a fault of any kind is one
        faults.append(f"the next launch: {type(error).__name__}: {error}")
    if engine is not None:
        engine.close()
    fork_server().stop()
    wait_for(lambda: not left(), GOING)
    for process in left():
        faults.append(f"left: {process.pid} {process.name()} {process.status()} {' '.join(process.cmdline())[-60:]}")
        process.kill()
    return over, faults


def try_run(case: Case, options: dict[str, Any]) -> tuple[float, list[str]]:
    """Launch, send the signal, and wait for the end; return as `try_case`."""
    faults: list[str] = []
    began = time.monotonic()
    run = launch(work, RANKS, args=(case.moment,), timeout=LIMIT, **options)
    if case.moment != "start":
        wait_for(lambda: run.wait(0) or has_come_to(case.moment, run), 30.0)
    victims = find(case.victim, run)
    if case.moment == "stop":
        run.stop(wait=False)
    for victim in victims[:1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(case.signum)
    if not victims:
        faults.append("there was no such process")
    # On a busy machine the run may take all of its time to come to the moment.
    allowed = AFTER_LIMIT
    until = max(began + LIMIT, time.monotonic()) + allowed
    if case.moment == "stop":
        run.wait(0.5)
        until, allowed = time.monotonic() + AFTER_KILL, AFTER_KILL
        run.stop(wait=False, at_once=True)
    if not run.wait(max(0.0, until - time.monotonic())):
        faults.append("it had not ended in time")
        run.wait(HUNG)
    return time.monotonic() - until + allowed, faults


def has_come_to(moment: str, run: Any) -> bool:
    """Return True once the ranks are in the state of this moment."""
    states = [rank.state for rank in run.snapshot().ranks]
    if moment == "exit":
        return all(state == "returned" for state in states)
    return all(state == "running" for state in states)


def find(victim: str, run: Any) -> list[psutil.Process]:
    """Return the processes of this kind, the first one being of this run."""
    wait_for(lambda: run.wait(0) or any(rank.pid for rank in run.snapshot().ranks), 30.0)
    ranks = [psutil.Process(rank.pid) for rank in run.snapshot().ranks if rank.pid and psutil.pid_exists(rank.pid)]
    if victim == "rank" or not ranks:
        return ranks
    ancestors = ranks[0].parents()
    names = {
        "supervisor": ancestors[:1],
        "fork server": ancestors[1:2],
        "host": [process for process in ancestors if process.name() == "host"],
        "agent": [process for process in ancestors if "engines.cluster.agent" in " ".join(process.cmdline())],
    }
    return names[victim]


def left() -> list[psutil.Process]:
    """Return the processes below this one that live, and reap the others."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    alive = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def wait_for(is_met: Callable[[], bool], seconds: float) -> None:
    """Wait until a condition is met, at most for so long."""
    until = time.monotonic() + seconds
    while not is_met() and time.monotonic() < until:
        time.sleep(0.01)


def result(found: dict[Case, tuple[float, list[str]]]) -> str:
    """Return the table of all cases."""
    rows = []
    for victim, signum in itertools.product(VICTIMS, SIGNALS):
        took = {case: seconds for case, (seconds, _) in found.items() if (case.victim, case.signum) == (victim, signum)}
        if took:
            good = sum(not found[case][1] for case in took)
            middle, longest = statistics.median(took.values()), max(took.values())
            rows.append([victim, signum.name, f"{good} of {len(took)}", f"{middle:.1f}", f"{longest:.1f}"])
    good = sum(not faults for _, faults in found.values())
    head = ["victim", "signal", "ended, nothing left", "median s after the limit", "longest"]
    return f"{good} of {len(found)} runs ended within their limit, and left nothing\n" + table(head, rows)


def say(text: str) -> None:
    """Print a line at once."""
    print(text, file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main()
