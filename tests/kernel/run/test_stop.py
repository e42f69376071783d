"""Stopping a run: the kernel's interrupt button, `run.stop()`, and what the stuck ranks were doing."""

from __future__ import annotations

import itertools
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from notebook_launcher import launch, live_runs
from tests.support.interrupts import interrupt_at
from tests.support.waiting import until
from tests.support.warm_kernels import takes_less_than, unchanged

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.kernel.run.handle import Run
    from tests.support.kernels import Kernel, Outcome

KERNEL_CODE = """
def rank():
    return int(os.environ["RANK"])

def say_up():
    import torch.distributed as dist
    dist.barrier()
    print("up", flush=True)

def sleeping():
    say_up()
    try:
        while True:
            time.sleep(60)
    finally:
        print("finally ran", flush=True)

def say_up_once_in(name):
    import sys, threading
    main = threading.get_ident()
    def watch():
        frame = None
        while frame is None or frame.f_code.co_name != name:
            frame = frame.f_back if frame is not None else sys._current_frames()[main]
        print(f"rank {rank()} is up", flush=True)
    threading.Thread(target=watch, daemon=True).start()

def asleep():
    time.sleep(60)

def ignoring():
    import torch, torch.distributed as dist
    for name in ("SIGINT", "SIGTERM"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    dist.barrier()
    say_up_once_in("asleep" if rank() else "all_reduce")
    if rank() == 0:
        dist.all_reduce(torch.ones(1))
    asleep()

def cooperative():
    say_up()
    for step in range(10**9):
        report(step=step, loss=1.0)
        time.sleep(0.001)

def exiting():
    import atexit
    atexit.register(lambda: (print("up", flush=True), time.sleep(60)))

def threading_on():
    import threading
    ended = threading.main_thread().join  # Returns once the process waits for its other threads.
    threading.Thread(target=lambda: (ended(), print("up", flush=True), time.sleep(60))).start()

def in_c_code():
    import torch
    say_up()
    x = torch.randn(3000, 3000)
    while True:
        x = (x @ x).clamp(-1, 1)
"""


@pytest.fixture(scope="module")
def kernel(module_kernel: Kernel) -> Kernel:
    return module_kernel


def is_up(outcome: Outcome) -> bool:
    return outcome.done or "up" in outcome.stdout


def is_stuck(outcome: Outcome) -> bool:
    """Return True once both ranks of `ignoring` are where they stay for good."""
    return outcome.done or all(f"rank {rank} is up" in outcome.stdout for rank in (0, 1))


PRESSED = {"sleeping": (1, 1), "ignoring": (2, 1), "cooperative": (4, 1), "in_c_code": (1, 1), "exiting": (2, 1)}
"""By function: its number of ranks, and of presses of the button."""


@pytest.mark.parametrize(("name", "numbers"), [*PRESSED.items(), ("threading_on", (2, 2))])
def test_interrupt_button_ends_the_run(kernel: Kernel, name: str, numbers: tuple[int, int]) -> None:
    num_processes, presses = numbers

    def attempt() -> float:
        with unchanged(kernel):
            cell = kernel.start(f"notebook_launch({name}, {num_processes})")
            kernel.wait(cell, until=is_up)
            began = time.monotonic()
            for _ in range(presses):
                kernel.interrupt()
            outcome = kernel.wait(cell)
            seconds = time.monotonic() - began
        assert outcome.error == f"KeyboardInterrupt: {name} was stopped"
        assert ("finally ran" in outcome.stdout) == (name == "sleeping")
        killed = "was killed: as the run was stopped it was still running exit handlers or threads" in outcome.stderr
        assert killed == (name in ("exiting", "threading_on"))
        return seconds

    assert takes_less_than(3, attempt)


@pytest.mark.parametrize(
    ("name", "rung"),
    [("cooperative", "ask"), ("sleeping", "interrupt"), ("ignoring", "kill")],
)
def test_stop_uses_no_more_rungs_than_needed(kernel: Kernel, name: str, rung: str) -> None:
    with unchanged(kernel):
        cell = kernel.start(
            f"run = launch({name}, 2)\n"
            "while 'up' not in run.logs(0) + run.logs(1): time.sleep(0.01)\n"
            "began = time.monotonic()\n"
            "print(run.stop(), run.stop(), run.state, time.monotonic() - began < 3, run.exception().__class__.__name__)"
        )
        outcome = kernel.wait(cell)
    assert outcome.error is None, outcome.traceback
    assert outcome.stdout.endswith(f"{rung} {rung} stopped True RunStoppedError\n")


def test_function_may_catch_the_interrupt_and_return(kernel: Kernel) -> None:
    with unchanged(kernel):
        cell = kernel.start(
            "def saving():\n    try: cooperative()\n    except KeyboardInterrupt: return 'saved'\n"
            "try: notebook_launch(saving, 2)\n"
            "except KeyboardInterrupt as interrupt: print(list(interrupt.results))"
        )
        kernel.wait(cell, until=is_up)
        kernel.interrupt()
        outcome = kernel.wait(cell)
    assert "saving: stopped after " in outcome.stdout
    assert outcome.stdout.endswith("s; every rank had returned\n['saved', 'saved']\n")


def test_second_interrupt_kills_at_once(kernel: Kernel) -> None:
    def attempt() -> float:
        with unchanged(kernel):
            cell = kernel.start("notebook_launch(ignoring, 2)")
            kernel.wait(cell, until=is_stuck)
            began = time.monotonic()
            kernel.interrupt()
            kernel.wait(cell, until=lambda outcome: outcome.done or "was in" in outcome.stdout)
            kernel.interrupt()
            outcome = kernel.wait(cell)
            seconds = time.monotonic() - began
        assert outcome.error == "KeyboardInterrupt: ignoring was stopped"
        return seconds

    assert takes_less_than(1.5, attempt)  # The ladder alone takes 1.5 s before it kills.


@pytest.mark.parametrize("wait", [lambda run: run.wait(0.01), lambda run: run.stacks()])
def test_interrupt_at_any_bytecode_of_a_wait_does_not_hang_the_run(wait: Callable[[Run], object]) -> None:
    def sleep() -> None:
        import time

        time.sleep(60)

    run = launch(sleep, 1, output="none", monitor=False)
    numbers = itertools.count()
    while (number := next(numbers)) < 400 and interrupt_at(number, lambda: wait(run)):
        pass
    run.stop(wait=False, at_once=True)
    for thread in threading.enumerate():
        if thread.name == f"notebook-launcher {run.name}":
            thread.join(5)
            assert not thread.is_alive()
    assert run.wait(0)


def test_stop_on_request_leaves_no_error_in_cell_and_record(kernel: Kernel, tmp_path: Path) -> None:
    outcome = kernel.execute(
        f"run = launch(ignoring, 2, runs_folder={str(tmp_path)!r})\n"
        "while not (all('up' in run.logs(rank) for rank in (0, 1)) and run.stacks()[0].waiting_in): time.sleep(0.01)\n"
        "run.stop()\n"
        "for reader in (run, open_run(run.id, run.config.runs_folder)):\n"
        "    snapshot = reader.snapshot()\n"
        "    print([snapshot.state, snapshot.error, snapshot.failures, [rank.reason for rank in snapshot.ranks]])\n"
        "    print(snapshot.waiting)\n"
        "run.result()\n"
    )
    assert outcome.stderr == ""
    assert outcome.stdout.count("['stopped', '', (), ['', '']]\n") == 2
    place = r"Cell In\[\d+\], line \d+"
    sentence = rf"rank 0 was in all_reduce \({place}\); rank 1 was not in it: asleep, {place}: time\.sleep\(60\)\n"
    assert len(re.findall(sentence, outcome.stdout)) == 3, outcome.stdout  # in the cell, of the run, of its record
    assert outcome.error == "RunStoppedError: the run was stopped before ranks 0, 1 returned"
    assert outcome.traceback == "the run was stopped before ranks 0, 1 returned"


def test_run_handle_gives_state_and_waits(kernel: Kernel) -> None:
    with unchanged(kernel):
        outcome = kernel.execute(
            "run = launch(cooperative, 2)\n"
            "while len(run.metrics) < 10: time.sleep(0.01)\n"
            "print([r.state for r in run.ranks], all(r.pid for r in run.ranks), run.wait(0.01))\n"
            "try: run.result(timeout=0.01)\n"
            "except TimeoutError as error: print(error)\n"
            "try: run.logs(2)\n"
            "except LookupError as error: print(error)\n"
            "print(run.metrics[0].values, run.metrics[0].step); run.stop(); print(run)\n"
            "try: run.stacks()\n"
            "except CallOrderError as error: print(error)\n"
        )
    assert "['running', 'running'] True False" in outcome.stdout
    assert re.search(r"the run is still running after 0.01 s \(.*\): .* or stop\(\) to end it", outcome.stdout)
    assert "there is no rank 2: this run has 2 ranks, 0 to 1" in outcome.stdout
    assert "{'loss': 1.0} 0" in outcome.stdout
    assert "<Run of cooperative on 2 ranks: stopped," in outcome.stdout
    assert "the run is over (stopped): its ranks are gone, and so are their stacks" in outcome.stdout


def wait_for(path: str) -> str:
    until(Path(path).exists)
    return path


def test_runs_whose_handles_were_lost_are_found_until_they_end(tmp_path: Path) -> None:
    gates = [tmp_path / "first", tmp_path / "second"]
    for gate in gates:
        launch(wait_for, 1, args=(str(gate),), devices="cpu", output="none", name=gate.name)
    second, first = live_runs()
    assert [first.name, second.name] == ["first", "second"]
    assert first.stop() is not None
    assert [run.id for run in live_runs()] == [second.id]
    gates[1].touch()
    assert list(second.result()) == [str(gates[1])]
    assert live_runs() == []
