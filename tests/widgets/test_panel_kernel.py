"""The panel in a real kernel: clicked, it launches real ranks, and their results come back; and the table of runs."""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher import runs
from tests.kernel.test_ipykernels import installed
from tests.support.kernels import ROOT
from tests.support.warm_kernels import evaluate, final, run_cell, unchanged, warm_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.kernels import Kernel, Outcome

PANEL = """
import threading, time
from notebook_launcher import report
from notebook_launcher.widgets import ConfigPanel

def train(lr: float = 0.1, fails: bool = False, endless: bool = False):
    import torch.distributed as dist
    print(f"lr is {lr}")
    report(step=1, loss=lr)
    if fails and dist.get_rank() == 1:
        raise ValueError("bo<b>o</b>m")
    while endless:
        time.sleep(0.01)
    dist.barrier()
    return lr * (dist.get_rank() + 1)

panel = ConfigPanel(train, 2)

class Waiting:  # for a widget's trait to have a value that is wanted
    def __init__(self, widget, name, is_wanted):
        self.event = threading.Event()
        widget.observe(lambda change: is_wanted(change["new"]) and self.event.set(), name)
    def wait(self):
        assert self.event.wait(30), (panel.run, panel.run_area.status_text, panel.run_area.error)

def run_by_click():
    over = Waiting(panel.launch_button, "disabled", lambda is_disabled: not is_disabled)
    panel.launch_button.click()
    over.wait()
    return panel.run_area.status_text

panel
"""


@pytest.fixture(scope="module")
def kernel_and_cell() -> Iterator[tuple[Kernel, str]]:
    with warm_kernel(env={"NOTEBOOK_LAUNCHER_RUNS": "off"}) as kernel:
        shown = run_cell(kernel, PANEL)
        yield kernel, shown.msg_id


@pytest.fixture
def kernel(kernel_and_cell: tuple[Kernel, str]) -> Kernel:
    evaluate(kernel_and_cell[0], "panel.arguments = {}; panel.config = type(panel.config)(num_processes=2); 0")
    return kernel_and_cell[0]


@pytest.fixture
def cell(kernel_and_cell: tuple[Kernel, str]) -> str:
    """The cell that shows the panel."""
    return kernel_and_cell[1]


def click(kernel: Kernel, button: str, panel: str = "panel") -> None:
    """Click as a front end does: by a message to the widget."""
    kernel.send_comm(evaluate(kernel, f"{panel}.comm.comm_id"), {"method": "custom", "content": {"type": button}})


def test_panel_works_with_the_oldest_ipywidgets() -> None:
    path = os.pathsep.join([str(installed("7.7.5", "ipywidgets", "ipython-genutils")), str(ROOT)])
    with warm_kernel(env={"PYTHONPATH": path, "NOTEBOOK_LAUNCHER_RUNS": "off"}) as kernel:
        shown = run_cell(kernel, "import ipywidgets; print(ipywidgets.__version__)" + PANEL)
        assert shown.stdout == "7.7.5\n"
        before = set(final(shown))
        put = {"type": "put", "key": "arguments.endless", "value": True}
        kernel.send_comm(evaluate(kernel, "panel.comm.comm_id"), {"method": "custom", "content": put})
        click(kernel, "launch")
        kernel.wait(shown.msg_id, until=lambda _: bool(monitors(kernel)))
        (comm_id,) = monitors(kernel)
        while not evaluate(kernel, "panel.run_area.monitor is not None"):  # No page answers before it has drawn.
            pass
        kernel.send_comm(comm_id, {"method": "custom", "content": {"type": "hello"}})
        kernel.wait(shown.msg_id, until=lambda cell: "reset" in sent(kernel, comm_id) and "lr is 0.1" in cell.stdout)
        kernel.send_comm(comm_id, {"method": "custom", "content": {"type": "interrupt"}})
        ended = kernel.wait(shown.msg_id, until=lambda cell: new_picture(cell, before, "stopped"))
        assert "update" in sent(kernel, comm_id)
        assert "stopped after" in ended.stdout
        closed = run_cell(kernel, "monitor = panel.run_area.monitor; monitor.close(); monitor")
        assert "stopped" in str(closed.result)


def monitors(kernel: Kernel) -> list[str]:
    """Return the comms of all monitors so far."""
    opened = (message["content"] for message in kernel.received if message["msg_type"] == "comm_open")
    return [content["comm_id"] for content in opened if {"_esm", "title"} <= set(content["data"].get("state", {}))]


def sent(kernel: Kernel, comm_id: str) -> list[str]:
    """Return the kinds of messages that a monitor's page was sent."""
    contents = (message["content"] for message in kernel.received if message["msg_type"] == "comm_msg")
    mine = (content["data"].get("content", {}) for content in contents if content["comm_id"] == comm_id)
    return [content.get("type", "") for content in mine]


def test_click_on_launch_runs_with_the_values_of_the_fields_and_writes_into_the_panels_cell(
    kernel: Kernel, cell: str
) -> None:
    shown, kept = (content["data"] for content in kernel.outcome(cell).displays[:2])
    assert "notebook_launch(train, 2)" in kept["text/html"]
    assert shown["text/plain"] == "<ConfigPanel(train): not launched yet>"
    assert shown["application/vnd.jupyter.widget-view+json"]["model_id"] == evaluate(kernel, "panel.model_id")
    before = set(final(kernel.outcome(cell)))
    msg_id = kernel.start(
        'panel._receive({"type": "put", "key": "arguments.lr", "value": "0.25"}); status = run_by_click()'
    )
    ended = kernel.wait(cell, until=lambda cell: "lr is 0.25" in cell.stdout and new_picture(cell, before, "done, "))
    assert re.match(r'<div data-nbl-kept="\w+"><style>[^<]+</style><details ', new_picture(ended, before)["text/html"])
    assert kernel.wait(msg_id).stdout == ""
    assert "✓ train: done in " in evaluate(kernel, "status")
    assert evaluate(kernel, "list(panel.results), panel.run.config.num_processes") == ([0.25, 0.5], 2)
    assert evaluate(kernel, "panel.running['monitor'] == panel.run_area.monitor.model_id, panel.folded") == (True, True)


def new_picture(cell: Outcome, before: set[str], says: str = "") -> Any:
    """Return the newest picture of a run, if it says that the run is so."""
    shown = final(cell)
    pictures = [shown[key] for key in shown if key not in before]
    return pictures[-1] if pictures and f">train on 2 ranks: {says}" in pictures[-1].get("text/html", "") else None


def test_failure_is_shown_above_the_monitor_and_launch_is_enabled_again(kernel: Kernel) -> None:
    assert "✕ train: failed after" in evaluate(kernel, 'panel.arguments["fails"] = True; run_by_click()')
    error = evaluate(kernel, "''.join(text for text, _ in panel.run_area.error)")
    assert "rank 1 of 2 failed first; rank 0 failed as a consequence." in error
    assert "ValueError: bo<b>o</b>m" in error
    assert "raise ValueError(" not in error  # The monitor below has the traceback.
    reset = evaluate(kernel, "panel.run_area.monitor._feed.reset()['errors']['culprits'][0]['traceback']")
    assert "raise ValueError(" in reset
    outcome = kernel.execute("panel.results")
    assert outcome.error == "ValueError: bo<b>o</b>m"


def test_stop_asks_and_then_kills_and_a_folded_picture_stands_below_the_panel(kernel: Kernel, cell: str) -> None:
    before = set(final(kernel.outcome(cell)))
    evaluate(
        kernel,
        'panel.arguments["endless"] = True\n'
        'can_stop = Waiting(panel.stop_button, "disabled", lambda is_off: not is_off)\n'
        'over = Waiting(panel.launch_button, "disabled", lambda is_off: not is_off)\n'
        "panel.launch_button.click(); can_stop.wait(); 0",
    )
    first = evaluate(kernel, "panel.run.id")
    assert evaluate(kernel, "panel.results, panel.launch_button.disabled") == (None, True)
    evaluate(kernel, "panel.launch_button.click(); 0")  # harmless while a run goes on
    assert evaluate(kernel, "panel.run.id") == first
    shown = kernel.wait(cell, until=lambda cell: new_picture(cell, before, "running"))
    assert "<img" in new_picture(shown, before)["text/html"]
    assert evaluate(kernel, "panel.stop_button.click(); panel.stop_button.description") == "Kill"
    evaluate(kernel, "panel.stop_button.click(); over.wait(); 0")
    assert evaluate(kernel, "panel.run.state, panel.stop_button.disabled") == ("stopped", True)
    assert "train: stopped after" in evaluate(kernel, "panel.run_area.status_text")
    shown = kernel.wait(cell, until=lambda cell: new_picture(cell, before, "stopped"))
    assert len(set(final(shown)) - before) == 1


def test_run_forked_from_the_kernel_works_from_a_click(kernel: Kernel) -> None:
    code = 'panel.config = type(panel.config)(num_processes=1, start_method="fork"); run_by_click()'
    assert "done in" in evaluate(kernel, code)


def test_shown_panel_reports_after_the_cell_that_defines_its_function_again(kernel: Kernel) -> None:
    callbacks = 'len(get_ipython().events.callbacks["post_run_cell"])'
    look = "'again was defined again: run this cell again' in mine.run_area.status_text, mine.form['code']['text']"
    before = evaluate(kernel, callbacks)
    run_cell(kernel, "def again(): return 1\nmine = ConfigPanel(again, 1)\nmine")
    assert evaluate(kernel, callbacks) == before + 1
    is_told, code = evaluate(kernel, look)
    assert not is_told
    assert "notebook_launch(again, 1)" in code
    run_cell(kernel, "def again(): return 2")
    is_told, code = evaluate(kernel, look)
    assert is_told
    assert "notebook_launch(mine.fn, 1)" in code
    run_cell(kernel, "mine.close()")
    assert evaluate(kernel, callbacks) == before


def test_status_of_a_run_gives_way_to_a_field_that_has_to_be_fixed(kernel: Kernel) -> None:
    evaluate(kernel, "bool(panel.run or run_by_click())")
    put = 'panel._receive({"type": "put", "key": "seed", "value": %r})\n'
    typed = put % "x" + "said = panel.run_area.status_text\n" + put % "1"
    said, then = evaluate(kernel, typed + "said, panel.run_area.status_text")
    assert said == "✕ Fix Seed to enable Launch."
    assert then.startswith("2 CPU ranks, gloo")


def test_refused_launch_is_shown_in_the_panel(kernel: Kernel) -> None:
    code = (
        "captured = threading.Lock()\n"
        "broken, panel = panel, ConfigPanel(lambda: captured, 2)\n"
        "status = run_by_click()\n"
        "error, panel = str(panel.run_area.error), broken\n"
        "status, error"
    )
    status, error = evaluate(kernel, code)
    assert "Nothing was started" in status
    assert "CaptureError" in error
    assert "captured" in error


def test_launch_from_code_writes_into_its_own_cell_and_is_shown_in_the_panel(kernel: Kernel) -> None:
    outcome = kernel.execute("panel.launch(None, lr=0.75).result()[0]")
    assert outcome.result == "0.75", outcome.traceback
    assert "lr is 0.75" in outcome.stdout
    assert evaluate(kernel, "panel.results[1]") == 1.5
    refused = kernel.execute("run = panel.launch(None, endless=True)\npanel.launch()")
    assert refused.error is not None
    assert refused.error.startswith("CallOrderError: this panel's run is not over")
    assert evaluate(kernel, 'over = Waiting(panel.launch_button, "disabled", bool); run.stop(); run.state') == "stopped"


def test_second_click_on_launch_starts_nothing_and_a_run_leaves_no_thread_and_no_process(
    kernel: Kernel, cell: str
) -> None:
    evaluate(kernel, "run_by_click()")
    before = kernel.outcome(cell).stdout.count("train: 2 CPU ranks")
    with unchanged(kernel):
        evaluate(kernel, 'over = Waiting(panel.launch_button, "disabled", lambda is_off: not is_off); 0')
        click(kernel, "launch")
        click(kernel, "launch")
        kernel.execute("over.wait()")
    assert evaluate(kernel, "panel.run.state, panel.run_area.error") == ("done", [])
    assert kernel.outcome(cell).stdout.count("train: 2 CPU ranks") == before + 1


AGAIN = """
def loop(lr: float = 0.1):
    while True:
        time.sleep(0.01)

again = ConfigPanel(loop, 2)
again
"""
LEFT = "len(__import__('comm').get_comm_manager().comms), sorted(each.name for each in threading.enumerate())"


def start_by_click(kernel: Kernel, name: str) -> None:
    code = (
        f'can_stop = Waiting({name}.stop_button, "disabled", lambda is_off: not is_off)\n{name}.launch_button.click()'
    )
    run_cell(kernel, f"{code}\ncan_stop.wait()")
    deadline = time.monotonic() + 60
    while evaluate(kernel, f"{name}.run.state") == "starting":  # Its run can be stopped before its ranks run.
        assert time.monotonic() < deadline, evaluate(kernel, f"repr({name}.run)")


def pictures(cell: Outcome) -> list[str]:
    return [data.get("text/html", "") for data in final(cell).values()]


def test_panel_of_a_cell_that_is_run_again_adopts_the_live_run(kernel: Kernel) -> None:
    kernel.execute(AGAIN)
    start_by_click(kernel, "again")
    kernel.execute("first, run = again, again.run")
    shown = run_cell(kernel, AGAIN)
    assert evaluate(kernel, "again is first, again.run is run, run.state") == (False, True, "running")
    assert evaluate(kernel, "again.launch_button.disabled, again.stop_button.disabled") == (True, False)
    assert "loop is running on 2 ranks" in evaluate(kernel, "again.run_area.status_text")
    (comm_id,) = monitors(kernel)[-1:]
    assert evaluate(kernel, "again.run_area.monitor.comm.comm_id") == comm_id
    for name in ("again", "first"):
        refused = kernel.execute(f"{name}.launch()")
        assert (refused.error or "").startswith("CallOrderError: this panel's run is not over")
    click(kernel, "stop", panel="again")
    assert evaluate(kernel, "run.wait(30) and run.state") == "stopped"
    kernel.wait(shown.msg_id, until=lambda cell: any(">loop on 2 ranks: stopped" in each for each in pictures(cell)))


def test_panel_of_a_cell_that_is_run_again_adopts_a_run_that_is_starting(kernel: Kernel) -> None:
    cell = "slow = ConfigPanel(loop, 1, start_method='spawn'); slow"
    kernel.execute(AGAIN)
    kernel.execute(cell)
    kernel.execute("slow.launch_button.click(); first = slow")
    kernel.execute(cell)
    assert evaluate(kernel, "slow is first, slow.launch_button.disabled") == (False, True)
    kernel.execute("slow.stop_button.disabled and Waiting(slow.stop_button, 'disabled', lambda off: not off).wait()")
    click(kernel, "stop", panel="slow")
    assert evaluate(kernel, "slow.run.wait(30) and slow.run is first.run and slow.run.state") == "stopped"


def test_each_panel_of_a_cell_adopts_the_run_of_its_function(kernel: Kernel) -> None:
    cell = f"other = ConfigPanel(train, 2)\ndisplay(other)\n{AGAIN}"
    kernel.execute(cell)
    start_by_click(kernel, "again")
    kernel.execute("first, idle = again, other")
    run_cell(kernel, cell)
    assert evaluate(kernel, "again.run is first.run, other.run, idle.comm, first.comm") == (True, None, None, None)
    kernel.execute("elsewhere = again; again")
    kernel.execute(AGAIN)  # another cell: the panel that is still shown keeps its run
    assert evaluate(kernel, "again is elsewhere, again.run, elsewhere.stop_button.disabled") == (False, None, False)
    assert evaluate(kernel, "elsewhere.comm is not None and elsewhere.run.stop()")


def test_panels_of_a_cell_that_is_run_again_leave_no_comm_and_no_thread(kernel: Kernel) -> None:
    kernel.execute(AGAIN)
    start_by_click(kernel, "again")
    kernel.execute(AGAIN)
    num_comms, threads = evaluate(kernel, LEFT)
    for _ in range(3):
        run_cell(kernel, AGAIN)
    deadline = time.monotonic() + 10
    # The closed monitors' threads end with their next look; those of the first may still have been there before.
    while (left := evaluate(kernel, LEFT)) and (left[0] > num_comms or len(left[1]) > len(threads)):
        assert time.monotonic() < deadline, (num_comms, threads, left)
    assert evaluate(kernel, "again.run.stop()")


def test_panel_of_a_cell_that_is_run_again_keeps_what_was_typed_and_the_code_does_not_say(kernel: Kernel) -> None:
    cell = "keeps = ConfigPanel(train, 2, kwargs={'lr': 0.3}); keeps"
    answers: dict[str, Any] = {"answer_input": lambda _prompt, _password: ""}  # as a front end with a reader
    kernel.execute(cell, **answers)
    changed = "keeps.config = type(keeps.config)(num_processes=1, seed=4); keeps.arguments = {'lr': 0.7, 'fails': True}"
    run_cell(kernel, changed)
    kernel.execute(cell, **answers)
    assert evaluate(kernel, "keeps.config.num_processes, keeps.config.seed, dict(keeps.arguments)") == (
        *(2, 4),
        {"lr": 0.3, "fails": True},
    )
    assert "As you left the panel: Seed 4, fails True." in evaluate(kernel, "keeps.form['recalled']")
    kernel.execute(cell)  # by a program: it gets what the code says
    assert evaluate(kernel, "keeps.config.seed, dict(keeps.arguments)") == (None, {"lr": 0.3})


def test_picture_below_a_panel_is_renewed_with_it_and_what_is_replaced_shows_it(kernel: Kernel) -> None:
    cell = "pictured = ConfigPanel(train, 2)\npictured"
    shown = kernel.execute(cell)
    evaluate(kernel, "pictured.arguments['lr'] = 0.625; 0")
    kernel.wait(shown.msg_id, until=lambda cell: any("0.625" in each for each in pictures(cell)))
    kernel.execute("old = pictured")
    kernel.execute(cell)
    (left,) = (content["data"] for content in kernel.execute("old").displays)
    assert "0.625" in left["text/html"]
    assert set(left) == {"text/html", "text/plain"}


RUNS = """
import os
from notebook_launcher import launch, runs
os.environ["NOTEBOOK_LAUNCHER_RUNS"] = {folder!r}
for name in ("one", "two"): launch(lambda: report(loss=1.0), 1, name=name, output="none").result()
runs()
"""


def test_cell_shows_the_table_of_runs_and_the_page_deletes_a_run(kernel: Kernel, tmp_path: Path) -> None:
    shown = kernel.wait(kernel.start(RUNS.format(folder=str(tmp_path)), allow_stdin=True))
    assert shown.error is None, shown.traceback
    live, kept = (display["data"] for display in shown.displays[-2:])
    assert "two" in kept["text/plain"]
    assert "<table" in kept["text/html"]
    names = [run.id for run in runs(tmp_path)]
    model = live["application/vnd.jupyter.widget-view+json"]["model_id"]
    kernel.send_comm(model, {"method": "custom", "content": {"type": "delete", "ids": names[:1]}})
    assert run_cell(kernel, "len(runs())").result == str(len(names) - 1)
    assert [run.id for run in runs(tmp_path)] == names[1:]
    run_cell(kernel, "os.environ['NOTEBOOK_LAUNCHER_RUNS'] = 'off'")
