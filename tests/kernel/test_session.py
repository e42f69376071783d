"""Ranks that stay: what they keep between runs, and what a session survives."""

from __future__ import annotations

import builtins
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from notebook_launcher import Session
from notebook_launcher.kernel.latch import can_hold_interrupts
from tests.support.interrupts import interrupt_at
from tests.support.waiting import until
from tests.support.warm_kernels import run_cell, unchanged

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.kernels import Kernel, Outcome

DEFINITIONS = """
def rank():
    return int(os.environ["RANK"])

def keep(value):
    import builtins, torch.distributed as dist
    builtins.kept = value
    return os.getpid(), id(dist.group.WORLD)

def kept():
    import builtins
    return getattr(builtins, "kept", None)

def add():
    import torch, torch.distributed as dist
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()

def wait_for_peer():
    import torch.distributed as dist
    print("up", flush=True)
    if rank() == 0:
        dist.barrier()
    time.sleep(60)

def both_wait():
    import torch, torch.distributed as dist
    print("up", flush=True)
    dist.recv(torch.ones(1), src=1 - rank())

def fail():
    import torch.distributed as dist
    if rank() == 1:
        raise ValueError("boom")
    dist.barrier()

def die():
    import torch.distributed as dist
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

session = Session(2)
"""

KERNEL_FILES: dict[str, str] = {}


@pytest.fixture
def kernel(module_kernel: Kernel) -> Iterator[Kernel]:
    with unchanged(module_kernel):
        run_cell(module_kernel, DEFINITIONS + "session.run(keep, args=('before',))")
        yield module_kernel
        run_cell(module_kernel, "session.close(); session.close()")


def last_line(kernel: Kernel, code: str) -> str:
    return run_cell(kernel, code).stdout.splitlines()[-1]


def interrupted(kernel: Kernel, code: str, word: str) -> Outcome:
    """Interrupt a call once both ranks have printed this word."""
    cell = kernel.start(code)
    kernel.wait(cell, until=lambda now: now.done or now.stdout.count(word) + ("ranks" in now.stdout) > 1)
    kernel.interrupt()
    return kernel.wait(cell)


def test_session_keeps_processes_group_and_memory(kernel: Kernel) -> None:
    kernel.execute("a = session.run(keep, args=(1,)); b = session.run(keep, args=(2,))")
    code = "print(list(a) == list(b), *session.run(kept))"
    assert last_line(kernel, code) == "True 2 2"


ENDED = {
    "fail": ("ValueError: boom", "before before"),
    "die": ("RankFailedError: rank 1 of 2 was killed by SIGKILL(-9)", "before None"),
    # A peer that leaves the group releases the rank that is stuck in C++. Where both are stuck, one must be killed,
    # which releases the other.
    "wait_for_peer": ("KeyboardInterrupt: wait_for_peer was stopped", "before before"),
    "both_wait": ("KeyboardInterrupt: both_wait was stopped", "None before"),
}
"""By function: its error, and what the ranks have kept."""


@pytest.mark.parametrize("what", ENDED)
def test_session_survives_a_failed_run_and_an_interrupt_in_a_collective(kernel: Kernel, what: str) -> None:
    code, (error, memory) = f"session.run({what})", ENDED[what]
    outcome = interrupted(kernel, code, "up") if "wait" in what else kernel.execute(code)
    assert (outcome.error or "").startswith(error)
    assert ("rank 1 had died and was restarted" in outcome.stdout) == (what == "die")
    assert last_line(kernel, "print(*session.run(add))") == "2.0 2.0"
    assert last_line(kernel, "print(*session.run(kept))") == memory


WRAP = """
def wrap():
    import torch
    global model
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))

def step():
    import torch
    model(torch.ones(1, 1)).sum().backward()
    return "stepped"

def typo():
    return lerning_rate

def sleep():
    print("asleep", flush=True)
    time.sleep(60)

def alone():
    import torch.distributed as dist
    if rank() == 0:
        raise ValueError("alone")
    dist.barrier()

import time
session.run(wrap)
"""
BROKEN = "the next run makes a new process group: models that the ranks keep must be wrapped again"


@pytest.mark.parametrize("what", ["typo", "sleep", "alone"])
def test_wrapped_models_survive_what_breaks_no_group_and_a_broken_one_is_reported(kernel: Kernel, what: str) -> None:
    kernel.execute(WRAP)
    code = f"session.run({what})"
    outcome = interrupted(kernel, code, "asleep") if what == "sleep" else kernel.execute(code)
    assert (outcome.error or "").startswith(("NameError: ", "KeyboardInterrupt: ", "ValueError: alone"))
    assert (BROKEN in outcome.stdout) == (what == "alone")
    wrapped = "session.run(wrap); " if what == "alone" else ""
    assert last_line(kernel, f"{wrapped}print(*session.run(step))") == "stepped stepped"


def test_interrupt_at_any_moment_of_the_start_ends_that_run() -> None:
    def wait() -> None:
        time.sleep(60)

    def interrupt(delay: float) -> None:
        while not over.wait(delay):
            sent.append(delay)
            os.kill(os.getpid(), signal.SIGINT)
            delay = 5.0

    sent: list[float] = []
    with Session(2, output="none") as session:
        assert list(session.run(os.getppid))
        for at in range(12):
            over = threading.Event()
            thread = threading.Thread(target=interrupt, args=(0.0004 * at,))
            with pytest.raises(KeyboardInterrupt):
                thread.start()
                session.run(wait)
            over.set()
            thread.join()
            assert len(session.launch(os.getpid).result()) == 2
    # Python drops an interrupt that meets it in a weak reference's callback, one in 5,000 here.
    assert len(sent) <= 13


def test_rank_that_died_between_runs_is_replaced(kernel: Kernel) -> None:
    kernel.execute("pid = session.run(keep, args=(1,))[0][0]; os.kill(pid, signal.SIGKILL)")
    kernel.execute("while os.path.exists(f'/proc/{pid}'): time.sleep(0.01)")
    outcome = kernel.execute("print(*session.run(add))")
    assert "rank 0 had died and was restarted" in outcome.stdout
    assert outcome.stdout.endswith("2.0 2.0\n")


def test_session_imports_an_edited_module_again(kernel: Kernel, tmp_path: Path) -> None:
    kernel.execute(
        f"import pathlib; file = pathlib.Path({str(tmp_path)!r}, 'elsewhere.py'); file.write_text('VALUE = 1')\n"
        f"def use():\n    import sys; sys.path.append({str(tmp_path)!r})\n"
        "    import elsewhere\n    return elsewhere.VALUE\n"
    )
    assert last_line(kernel, "print(*session.run(use))") == "1 1"
    for value in (22, 333):  # The same module each time, so that the ranks import nothing that is new by name.
        outcome = kernel.execute(f"file.write_text('VALUE = {value}'); print(*session.run(use))")
        assert "elsewhere.py changed: the ranks import the notebook's own modules again" in outcome.stdout
        assert outcome.stdout.endswith(f"{value} {value}\n")


def test_folders_that_the_kernel_adds_to_its_import_path_reach_ranks_in_their_order(
    kernel: Kernel, tmp_path: Path
) -> None:
    for name, value in (("first", 1), ("last", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "late_module.py").write_text(f"VALUE = {value}")
        (tmp_path / name / f"only_{name}.py").write_text(f"VALUE = {value}")
    kernel.execute(
        "import sys; session.run(add)\n"
        f"sys.path.append({str(tmp_path / 'last')!r}); sys.path.insert(0, {str(tmp_path / 'first')!r})\n"
        "import late_module, only_last\n"
        "def use(): return late_module.VALUE, only_last.VALUE, sys.path.count(sys.path[0])"
    )
    for _ in range(2):
        assert last_line(kernel, "print(*session.run(use))") == "(1, 2, 1) (1, 2, 1)"
    died = kernel.execute("session.execute('import os; os._exit(1)', ranks=1)")
    assert "rank 1 of 2 exited with code 1" in (died.error or "")
    assert last_line(kernel, "print(*session.run(use))") == "(1, 2, 1) (1, 2, 1)"


def test_overwritten_variables_of_ranks_are_reported_once(kernel: Kernel) -> None:
    outcome = run_cell(
        kernel,
        "weights, untouched, counter = None, [1], 0\n"
        "def build():\n    global weights, only_here, counter\n    weights = only_here = [2.0]\n    counter = 5\n"
        "def use():\n    return weights, untouched, only_here\n"
        "with Session(2) as three:\n"
        "    three.run(build)\n"
        "    for _ in range(3):\n        print(three.run(use)[0])\n",
    )
    assert outcome.stdout.count("(None, [1], [2.0])") == 3
    (told,) = (line for line in outcome.stdout.splitlines() if "earlier run" in line)
    assert told == (
        "weights: the notebook's value replaced the value that an earlier run left on the ranks. To keep a variable "
        "on the ranks, give it a name that the notebook does not use."
    )


def test_session_refuses_a_second_run_at_the_same_time_and_any_once_it_is_closed(kernel: Kernel) -> None:
    outcome = kernel.execute("run = session.launch(wait_for_peer)\nsession.run(add)")
    assert "CallOrderError: the session is busy with <Run of wait_for_peer on 2 ranks:" in (outcome.error or "")
    assert kernel.execute("run.stop()").error is None
    assert last_line(kernel, "print(*session.run(add))") == "2.0 2.0"
    outcome = kernel.execute("print(session); session.close(); print(session)\nsession.run(add)")
    assert (outcome.error or "").startswith("CallOrderError: the session is closed. Open a new one")
    assert outcome.stdout.count("<Session of 2 CPU ranks, gloo") == 2


def test_function_may_destroy_the_sessions_group(kernel: Kernel) -> None:
    run_cell(kernel, "import torch.distributed as dist")
    for destroy in ("dist.destroy_process_group()", "rank() or dist.destroy_process_group()"):
        assert last_line(kernel, f"session.run(lambda: {destroy}); print(*session.run(add))") == "2.0 2.0"


def test_closing_can_be_interrupted_and_repeated() -> None:
    for number in range(0, 4000, 131):
        session = Session(1, output="none")
        session.run(os.getpid)
        if not interrupt_at(number, session.close):
            break
        session.close()


def test_session_drops_the_arguments_of_earlier_runs(kernel: Kernel) -> None:
    kernel.execute("import numpy; big = numpy.ones(12_500_000)\ndef use(x): return float(x[0])")
    code = (
        # Of pages that several processes map, such as those of libraries, each has its part.
        "def used():\n    return int(open('/proc/self/smaps_rollup').read().split('Pss:')[1].split()[0]) / 1000\n"
        "def total(x): return float(x.sum())\n"
        "session.run(total, args=(big[:9],)); first = session.run(used)\n"
        "for _ in range(3): session.run(total, args=(big,))\n"
        "print(*(after - before for before, after in zip(first, session.run(used))))"
    )
    grown = last_line(kernel, code).split()
    assert all(float(megabytes) < 50 for megabytes in grown), grown


def test_what_holds_a_group_does_not_cost_the_peers_their_memory() -> None:
    def build() -> None:
        builtins.kept = DistributedDataParallel(torch.nn.Linear(1, 1))  # type: ignore[attr-defined]
        builtins.group = dist.new_group()  # type: ignore[attr-defined]
        builtins.mesh = init_device_mesh("cpu", (1, 2)).get_group(1)  # type: ignore[attr-defined]

    def fail(waits_in: str) -> None:
        if dist.get_rank() == 1:
            raise ValueError("boom")
        if waits_in == "backward":
            builtins.kept(torch.ones(1, 1)).sum().backward()  # type: ignore[attr-defined]
        else:
            dist.all_reduce(torch.ones(1), group=getattr(builtins, waits_in))

    with Session(2, output="none", devices="cpu") as session:
        before = list(session.run(os.getpid))
        for waits_in in ("backward", "group", "mesh"):
            session.run(build)
            with pytest.raises(ValueError, match="boom"):
                session.run(fail, args=(waits_in,))
            assert list(session.run(os.getpid)) == before, waits_in


def test_function_that_answers_a_stop_by_an_exit_leaves_the_ranks_as_they_are(kernel: Kernel) -> None:
    # As Lightning's Trainer does, which also ignores further interrupts.
    outcome = run_cell(
        kernel,
        "def graceful():\n"
        "    import signal, sys\n"
        "    try:\n        wait_for_peer()\n"
        "    except KeyboardInterrupt:\n"
        "        signal.signal(signal.SIGINT, signal.SIG_IGN)\n        sys.exit(1)\n"
        "session.run(keep, args=(7,))\n"
        "for _ in range(2):\n    run = session.launch(graceful)\n    run.stop()\n    print(run.state)\n"
        "print(list(session.run(kept)))",
    )
    assert outcome.stdout.count("stopped\n") == 2
    assert "[7, 7]" in outcome.stdout
    assert "had died" not in outcome.stdout


# Calls that the waiting thread carries out by itself, while they take moments.


@pytest.fixture
def session() -> Iterator[Session]:
    with Session(2, output="none") as session:
        session.run(os.getpid)
        yield session


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that are started during the test."""
    names: list[str] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        names.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    return names


def test_short_call_starts_no_thread_and_a_longer_one_goes_on_in_its_own(session: Session, threads: list[str]) -> None:
    for _ in range(20):  # On a busy machine a call may not be short.
        threads.clear()
        assert [*session.run(lambda: 5)] == [5, 5]
        if not threads:
            break
    assert threads == []
    session.run(time.sleep, args=(0.2,))
    assert threads == ["notebook-launcher sleep"]


def test_interrupt_of_a_call_that_ends_meanwhile_is_not_lost(session: Session, interruptible: None) -> None:
    del interruptible

    def interrupt(kernel: int) -> None:
        if os.environ["RANK"] == "0":
            os.kill(kernel, signal.SIGINT)

    for _ in range(20):
        with pytest.raises(KeyboardInterrupt, match="interrupt was stopped"):
            session.run(interrupt, args=(os.getpid(),))
    assert len(session.run(os.getpid)) == 2


def test_other_handlers_that_may_raise_have_the_call_in_a_thread(session: Session, threads: list[str]) -> None:
    class TooLateError(Exception):
        pass

    def raise_it(*_: Any) -> None:
        raise TooLateError

    before = signal.signal(signal.SIGALRM, raise_it)
    try:
        assert not can_hold_interrupts()
        signal.setitimer(signal.ITIMER_REAL, 0.1)  # Not while the call is packed, also on a busy machine.
        with pytest.raises(TooLateError):
            session.run(time.sleep, args=(1.0,))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert threads == ["notebook-launcher sleep"]
    assert can_hold_interrupts()
    until(lambda: "busy" not in repr(session))
    assert len(session.run(os.getpid)) == 2
