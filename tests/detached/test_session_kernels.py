"""Detached sessions of real kernels: killed, restarted, interrupted, and found again with their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from notebook_launcher import attach_session
from tests.detached.hosts import release
from tests.support.kernels import Kernel
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEFINE = """
import os, time
from notebook_launcher import Session, attach_session

class Weights:
    def __init__(self, values):
        self.values = values

def load():
    import torch, torch.distributed as dist
    global weights
    weights = Weights(torch.ones(3) * (dist.get_rank() + 1))

def use():
    import torch.distributed as dist
    dist.all_reduce(weights.values)
    return weights

def wait_for(gate):
    print("started", flush=True)
    while not os.path.exists(gate):
        time.sleep(0.02)
    return "through"
"""
OPEN = "session = Session(2, name='exp', detached=True); session.activate()"
COME_BACK = "session = attach_session('exp'); session.activate()"


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


@pytest.fixture
def closed() -> Iterator[None]:
    """Close the session after the test, whatever became of its kernel."""
    yield
    attach_session("exp", show=False).close()


@pytest.mark.usefixtures("closed")
def test_ranks_keep_their_memory_over_the_kill_of_their_kernel(gate: Path, kernel: Kernel) -> None:
    with Kernel() as first:
        first.execute(f"{DEFINE}\n{OPEN}")
        first.execute("session.run(load)")
        assert first.execute("%%ranks\ndef double(x):\n    return 2 * x\nlearned = double(3)\nlearned").error is None
        cell = first.start(f"session.run(wait_for, args=({str(gate)!r},))")
        first.wait(cell, until=lambda outcome: "started" in outcome.stdout)
        first.kill()
    kernel.execute(DEFINE)
    shown = kernel.start(f"{COME_BACK}; call = session.latest; print(list(call.result()))")
    kernel.wait(shown, until=lambda outcome: "started" in outcome.stdout)
    release(gate)
    outcome = kernel.wait(shown)
    assert outcome.error is None
    assert "['through', 'through']" in outcome.stdout
    used = kernel.execute("values = session.run(use); print([v.values.tolist() for v in values])")
    assert "[[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]" in used.stdout
    assert "[all] 12" in kernel.execute("%%ranks\ndouble(learned)").stdout
    assert kernel.execute("print(type(values[0]) is Weights)").stdout == "True\n"
    shown_table = kernel.execute("session.who()").result
    assert shown_table is not None
    assert "learned" in shown_table
    assert kernel.execute("'learned' in session").result == "True"
    assert kernel.execute("del session['learned']; 'learned' in session").result == "False"


@pytest.mark.usefixtures("closed")
def test_the_first_interrupt_lets_go_and_the_second_stops_the_call(gate: Path, kernel: Kernel) -> None:
    kernel.execute(f"{DEFINE}\n{OPEN}")
    kernel.execute("session['x'] = 5")
    cell = kernel.start(f"session.run(wait_for, args=({str(gate)!r},))")
    kernel.wait(cell, until=lambda outcome: "started" in outcome.stdout)
    kernel.interrupt()
    outcome = kernel.wait(cell)
    assert outcome.error is not None
    assert outcome.error.startswith("KeyboardInterrupt")
    assert "is still running; attach(" in outcome.traceback
    busy = kernel.execute("session['x']")
    assert busy.error is not None
    assert "the session is busy with wait_for" in busy.error
    again = kernel.start("session.latest.wait_in_cell()")
    kernel.wait(again, until=lambda outcome: "started" in outcome.stdout)
    kernel.interrupt()
    kernel.wait(again, until=lambda outcome: "interrupt again within 3 s" in outcome.stdout)
    kernel.interrupt()
    assert "was stopped" in kernel.wait(again).traceback
    until(lambda: not attach_session("exp", show=False).is_busy)
    assert kernel.execute("print(list(session['x']))").stdout == "[5, 5]\n"


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
