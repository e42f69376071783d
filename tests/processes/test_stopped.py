"""Processes of a run that are stopped (SIGSTOP), so that they answer to nothing: every wait for them has an end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support.waiting import until
from tests.support.warm_kernels import takes_less_than

if TYPE_CHECKING:
    from tests.support.kernels import Kernel, Outcome

KERNEL_IS_NEW = True  # The last test kills it.
SLEEPING = """
def sleeping():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(os.getpid(), "is up", flush=True)
    time.sleep(600)
"""


def is_up(outcome: Outcome) -> bool:
    return outcome.done or outcome.stdout.count("is up") == 2


def family_of(outcome: Outcome) -> dict[str, psutil.Process]:
    """Return the processes of a run that is up."""
    rank = psutil.Process(int(next(line.split()[-3] for line in outcome.stdout.splitlines() if "is up" in line)))
    supervisor = rank.parent()
    assert supervisor is not None
    server = supervisor.parent()
    assert server is not None
    return {"rank": rank, "supervisor": supervisor, "fork server": server}


def keep_stopped(pid: int, over: threading.Event) -> None:
    """Stop a process as often as it is continued."""
    with contextlib.suppress(ProcessLookupError):
        while not over.wait(0.0):
            os.kill(pid, signal.SIGSTOP)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # It has gone between the two questions.
        return False


@pytest.mark.parametrize("victim", ["rank", "supervisor", "fork server"])
def test_time_limit_holds_whatever_process_is_stopped(kernel: Kernel, victim: str) -> None:
    def attempt() -> float:
        cell = kernel.start(f"{SLEEPING}\nnotebook_launch(sleeping, 2, timeout=1)")
        process = family_of(kernel.wait(cell, until=is_up))[victim]
        process.suspend()
        began = time.monotonic()
        outcome = kernel.wait(cell)
        seconds = time.monotonic() - began
        assert (outcome.error or "").startswith(
            "RunTimeoutError: the run was stopped: it had not ended after timeout=1"
        )
        return seconds

    assert takes_less_than(1 + 5, attempt)


def test_second_stop_ends_a_run_whose_supervisor_is_stopped_again_and_again(kernel: Kernel) -> None:
    def attempt() -> float:
        cell = kernel.start(
            f"{SLEEPING}\nrun = launch(sleeping, 2, output='all')\n"
            "while input() != 'stop': pass\n"
            "run.stop(wait=False)\nbegan = time.monotonic()\n"
            "print(run.stop(at_once=True), run.state, time.monotonic() - began)",
            allow_stdin=True,
        )
        family = family_of(kernel.wait(cell, until=is_up, answer_input=lambda *_: ""))
        over = threading.Event()
        stopper = threading.Thread(target=keep_stopped, args=(family["supervisor"].pid, over))
        stopper.start()
        outcome = kernel.wait(cell, answer_input=lambda *_: "stop")
        over.set()
        stopper.join()
        assert outcome.error is None, outcome.traceback
        *words, seconds = outcome.stdout.splitlines()[-1].split()
        assert words == ["kill", "stopped"]
        return float(seconds)

    assert takes_less_than(3, attempt)


def test_stopped_processes_go_with_their_kernel(module_kernel: Kernel) -> None:
    """The last test of this file, as it kills the file's kernel."""
    cell = module_kernel.start(f"{SLEEPING}\nnotebook_launch(sleeping, 2)")
    family = family_of(module_kernel.wait(cell, until=is_up))
    for process in family.values():
        process.suspend()
    module_kernel.kill()
    until(lambda: not any(map(is_alive, family.values())))
