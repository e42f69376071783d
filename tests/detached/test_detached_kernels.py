"""Runs and sessions that outlive a real kernel: killed, interrupted, and found again from another kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from notebook_launcher import attach_session, runs
from notebook_launcher.detached.attaching import attach
from notebook_launcher.history.run_folders import SOCKET
from tests.detached.hosts import host_of
from tests.support.kernels import Kernel, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
DEFINE = """
import os, time
from notebook_launcher import Session, attach, attach_session, launch, notebook_launch

class Weights:
    def __init__(self, values):
        self.values = values

def train(gate):
    import torch, torch.distributed as dist
    from notebook_launcher import report
    print("started", flush=True)
    report(step=1, loss=0.5)
    while not os.path.exists(gate):
        time.sleep(0.02)
    mine = torch.ones(3) * (dist.get_rank() + 1)
    dist.all_reduce(mine)
    print("ended", flush=True)
    return Weights(mine)

def load():
    import torch, torch.distributed as dist
    global weights
    weights = Weights(torch.ones(3) * (dist.get_rank() + 1))

def use():
    import torch.distributed as dist
    dist.all_reduce(weights.values)
    return weights

def wait_for(gate):
    print("up", flush=True)
    while not os.path.exists(gate):
        time.sleep(0.02)
    return "through"
"""
OPEN = "session = Session(2, name='exp', detached=True); session.activate()"
COME_BACK = "session = attach_session('exp'); session.activate()"


@pytest.fixture
def closed() -> Iterator[None]:
    """Close the session after the test, whatever became of its kernel."""
    yield
    attach_session("exp", show=False).close()


@pytest.mark.usefixtures("closed")
def test_a_run_and_a_sessions_memory_outlive_the_kill_of_their_kernel(gate: Path, kernel: Kernel) -> None:
    with Kernel() as first:
        first.execute(f"{DEFINE}\n{OPEN}")
        first.execute("session.run(load)")
        assert first.execute("%%ranks\ndef double(x):\n    return 2 * x\nlearned = double(3)\nlearned").error is None
        first.execute(f"launch(train, 2, args=({str(gate)!r},), detached=True)")
        cell = first.start(f"session.run(wait_for, args=({str(gate)!r},))")
        first.wait(cell, until=lambda outcome: "up" in outcome.stdout)
        first.kill()
    run = next(run for run in runs() if run.name == "train")  # The newest: other tests have launched a train, too.
    attached = attach(run.id, show=False)
    host = host_of(attached)
    kernel.execute(DEFINE)
    shown = kernel.start(
        f"{COME_BACK}; run = attach({run.id!r}); values = run.result(); print([w.values.tolist() for w in values])"
    )
    kernel.wait(shown, until=lambda outcome: "started" in outcome.stdout and "up" in outcome.stdout)
    assert attached.state == "running"
    gate.touch()
    outcome = kernel.wait(shown)
    assert outcome.error is None
    # In one line if both ranks print it at the same time.
    for word in ("started", "ended"):
        lines = {line for line in outcome.stdout.splitlines() if line.endswith(f"] {word}")}
        assert lines in ({f"[ranks 0,1] {word}"}, {f"[rank 0] {word}", f"[rank 1] {word}"})
    assert "[[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]" in outcome.stdout
    assert kernel.execute("print(type(values[0]) is Weights, run.state)").stdout == "True done\n"
    host.wait(20)
    assert not (run.folder / SOCKET).exists()

    assert kernel.execute("print(list(session.latest.result()))").stdout == "['through', 'through']\n"
    used = kernel.execute("values = session.run(use); print([v.values.tolist() for v in values])")
    assert "[[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]" in used.stdout
    assert "[all] 12" in kernel.execute("%%ranks\ndouble(learned)").stdout
    assert kernel.execute("print(type(values[0]) is Weights)").stdout == "True\n"
    assert "learned" in (kernel.execute("session.who()").result or "")
    assert kernel.execute("del session['learned']; 'learned' in session").result == "False"


def test_the_first_interrupt_lets_go_of_the_cell_and_the_second_stops_the_run(gate: Path, kernel: Kernel) -> None:
    kernel.execute(DEFINE)
    cell = kernel.start(f"notebook_launch(train, 2, args=({str(gate)!r},), detached=True)")
    kernel.wait(cell, until=lambda outcome: "started" in outcome.stdout)
    run = attach(show=False)
    kernel.interrupt()
    outcome = kernel.wait(cell)
    assert outcome.error is not None
    assert outcome.error.startswith("KeyboardInterrupt")
    assert f'is still running; attach("{run.id}") reconnects to it' in outcome.traceback
    assert run.state == "running"
    again = kernel.start("attach(show=False).wait_in_cell()")
    kernel.wait(again, until=lambda outcome: "started" in outcome.stdout)
    kernel.interrupt()
    kernel.wait(again, until=lambda outcome: "interrupt again within 3 s" in outcome.stdout)
    kernel.interrupt()
    assert "train was stopped" in kernel.wait(again).traceback
    assert run.wait(60)
    assert run.snapshot().state == "stopped"


PATIENT_MONITOR = """
from notebook_launcher.widgets.monitor import monitor
monitor.END_BUDGET = 1000.0
"""


def shows_monitor(outcome: Outcome) -> bool:
    return any(WIDGET_VIEW in display["data"] for display in outcome.displays)


def test_a_monitor_stays_live_below_a_cell_that_is_let_go(gate: Path, kernel: Kernel) -> None:
    kernel.execute(DEFINE + PATIENT_MONITOR)
    cell = kernel.start(f"notebook_launch(train, 2, args=({str(gate)!r},), detached=True, monitor=True)")
    kernel.wait(cell, until=shows_monitor)
    kernel.interrupt()
    outcome = kernel.wait(cell)
    assert "is still running; attach(" in outcome.traceback
    assert not outcome.of("comm_close")
    gate.touch()
    ended = kernel.wait(cell, until=lambda outcome: bool(outcome.of("comm_close")))
    pictures = [update["data"].get("text/plain", "") for update in ended.updates]
    assert any(picture.startswith("train on 2 ranks: done") for picture in pictures), pictures


@pytest.mark.parametrize(
    "launch", ["notebook_launch(fail, 2, detached=True)", "Session(2, name='exp', detached=True).run(fail)"]
)
def test_a_failure_names_the_cell_and_is_shown_once(kernel: Kernel, launch: str) -> None:
    kernel.execute("from notebook_launcher import Session, attach_session, notebook_launch")
    kernel.execute("def fail():\n    1 / 0")
    failed = kernel.execute(launch)
    if "Session" in launch:
        kernel.execute("attach_session('exp', show=False).close()")
    assert 'File "Cell In[' in failed.traceback
    assert "ipykernel" not in failed.traceback
    assert "ZeroDivisionError" in failed.traceback
    assert "fail: failed after" in failed.stdout
    assert "ZeroDivisionError" not in failed.stdout


@pytest.mark.usefixtures("closed")
def test_cells_on_ranks_have_their_traceback_their_debugger_and_their_figures(kernel: Kernel) -> None:
    kernel.execute(f"{DEFINE}\n{OPEN}")
    failed = kernel.execute("%%ranks 1\nsecret = 41\nsecret / 0")
    assert failed.error is not None
    assert failed.error.startswith("ZeroDivisionError")
    assert "secret / 0" in failed.traceback
    answers = iter(["p secret + 1", "q"])
    asked: list[str] = []

    def answer(prompt: str, _is_password: bool) -> str:  # as `Kernel.wait` calls it
        asked.append(prompt)
        return next(answers)

    debugged = kernel.wait(kernel.start("%debug", allow_stdin=True), answer_input=answer)
    assert debugged.error is None
    assert asked == ["(rank 1 pdb) "] * 2
    assert "42" in debugged.stdout
    assert kernel.execute("%%ranks 1\nsecret").stdout == "[1] 41\n"
    nothing = kernel.execute("session.debug()")
    assert nothing.error is not None
    assert "no rank is to blame" in nothing.error or "must be answered" in nothing.error
    kernel.execute("%%ranks\nfrom IPython.display import HTML, display")
    shown = kernel.execute("%%ranks\ndisplay(HTML('<b>figure</b>'))")
    assert [bundle["data"].get("text/html") for bundle in shown.displays] == ["<b>figure</b>"]
    tabs = kernel.execute("%%ranks -d all\ndisplay(HTML('<b>figure</b>'))")
    assert len(tabs.displays) == 1
    assert "ranks 0, 1</h4><div><b>figure</b>" in tabs.displays[0]["data"]["text/html"]
    assert kernel.execute("%ranks").result is not None
    kernel.execute("session.close()")
    opened = kernel.execute("%ranks 2 detached=True name=exp")
    assert "2 ranks: <AttachedSession 'exp'" in opened.stdout
