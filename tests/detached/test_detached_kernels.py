"""Runs that outlive a real kernel: killed, interrupted, and found again from another kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from notebook_launcher.detached.attaching import attach
from notebook_launcher.history.run_folders import SOCKET
from tests.detached.hosts import host_of, release
from tests.support.kernels import Kernel, Outcome

if TYPE_CHECKING:
    from pathlib import Path

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
DEFINE = """
import os, time
from notebook_launcher import attach, launch, notebook_launch

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
"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


def test_a_killed_kernels_run_is_found_again_from_another(gate: Path, kernel: Kernel) -> None:
    with Kernel() as first:
        first.execute(DEFINE)
        cell = first.start(f"notebook_launch(train, 2, args=({str(gate)!r},), detached=True)")
        first.wait(cell, until=lambda outcome: "started" in outcome.stdout)
        first.kill()
        run = attach(show=False)
        host = host_of(run)
        assert {process.pid for process in host.children(recursive=True)}
    kernel.execute(DEFINE)
    shown = kernel.start("run = attach(); values = run.result(); print([w.values.tolist() for w in values])")
    kernel.wait(shown, until=lambda outcome: "started" in outcome.stdout)
    assert run.state == "running"
    release(gate)
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
    release(gate)
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
