"""Messages of the monitor's page while the cell is busy, in an older ipykernel, too, and what stays of a monitor."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import time
import uuid
from typing import TYPE_CHECKING, Any

import ipywidgets
import nbclient
import nbformat
import pytest

from notebook_launcher import launch, report, track
from notebook_launcher.widgets import Monitor
from tests.kernel.test_ipykernels import VERSION, installed
from tests.support.front_end import (
    LEFTOVERS,
    TRAIN,
    WIDGET_VIEW,
    Page,
    clean,
    clean_kernel,  # noqa: F401 - a fixture
    kinds,
    last_steps,
    picture_of,
)
from tests.support.kernels import ROOT
from tests.support.warm_kernels import evaluate, final, run_cell, warm_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.kernels import Kernel

KERNEL_CODE = TRAIN


@pytest.fixture(scope="module")
def other_kernel() -> Iterator[Kernel]:
    with warm_kernel(env={"PYTHONPATH": os.pathsep.join([str(installed(VERSION)), str(ROOT)])}) as kernel:
        outcome = kernel.execute(TRAIN + "import ipykernel; print(ipykernel.__version__)")
        assert outcome.stdout.strip() == VERSION
        with clean(kernel):
            yield kernel


def test_stop_button_works_while_the_cell_is_busy(other_kernel: Kernel) -> None:
    page = Page.opened(other_kernel, "notebook_launch(train, 2)")
    page.send("hello")
    messages = page.until(lambda messages: len(messages) > 5 and len(last_steps(messages)) > 1)
    assert kinds(messages) == ["reset"] + ["update"] * (len(messages) - 1)
    assert messages[0]["run"]["actions"]["stop"]
    assert messages[0]["run"]["action_hint"] == ""
    assert last_steps(messages) == sorted(set(last_steps(messages)))
    page.send("stop")
    outcome = other_kernel.wait(page.cell)
    assert (outcome.error or "").startswith("RunStoppedError")
    assert page.messages[-1]["run"]["state"] == "stopped"
    assert page.messages[-1]["run"]["is_over"]
    # Nothing that needs a kernel is left in the cell.
    table, drawing = picture_of(outcome)
    assert "stopped" in table["text/html"]
    assert WIDGET_VIEW not in table
    assert drawing["image/svg+xml"].startswith("<svg")
    assert evaluate(other_kernel, LEFTOVERS)[2:] == [0, False]
    # Its page may go on exploring it: the record names the monitor, which still answers.
    assert not page.is_closed
    key = evaluate(other_kernel, f"widget._instances[{page.comm_id!r}].key")
    assert f'data-nbl-explore="{key}"' in table["text/html"]
    assert f'data-nbl-cover="{key}"' in drawing["text/html"]
    page.send("hello")
    page.until(lambda messages: kinds(messages).count("reset") == 2)
    assert page.messages[-1]["run"]["state"] == "stopped"


def test_page_reloaded_while_the_cell_waits_gets_the_run(kernel: Kernel) -> None:
    page = Page.opened(kernel, "notebook_launch(train, 2)")
    page.send("hello", page="first")
    page.until(lambda messages: len(messages) > 1)
    control, widgets = all_widgets(kernel, page.cell)
    assert widgets[page.comm_id]["state"]["title"] == "train"
    page.send("hello", page="second")
    page.until(lambda messages: kinds(messages).count("reset") == 2)
    page.send("stop")
    assert (kernel.wait(page.cell).error or "").startswith("RunStoppedError")
    # The picture does not come to a page that was reloaded, so it keeps the monitor of the run that is over.
    assert not page.is_closed
    page.send("hello", page="third")
    page.until(lambda messages: kinds(messages).count("reset") == 3)
    assert page.messages[-1]["run"]["state"] == "stopped"
    run_cell(kernel, f"from ipywidgets.widgets import widget; widget._instances[{page.comm_id!r}].close()")
    close_comm(kernel, control)


def test_page_reloaded_while_the_cell_computes_gets_the_run(kernel: Kernel) -> None:
    page = Page.opened(kernel, "import time\nrun = launch(train, 2)\nwhile run.state != 'stopped': time.sleep(0.001)")
    control, widgets = all_widgets(kernel, page.cell)
    assert page.comm_id in widgets
    page.send("stop")
    assert kernel.wait(page.cell).error is None
    close_comm(kernel, control)


def all_widgets(kernel: Kernel, cell: str) -> tuple[str, dict[str, Any]]:
    """Ask for all widgets as a page does that was loaded; return the comm that it opens, and the widgets."""

    def answers() -> list[dict[str, Any]]:
        messages = (
            message["content"]["data"] for message in kernel.received if message["content"].get("comm_id") == control
        )
        return [data["states"] for data in messages if data.get("method") == "update_states"]

    control = uuid.uuid4().hex
    kernel.send_comm(control, {}, opens="jupyter.widget.control")
    kernel.send_comm(control, {"method": "request_states"})
    kernel.wait(cell, until=lambda _: bool(answers()))
    return control, answers()[0]


def close_comm(kernel: Kernel, comm_id: str) -> None:
    run_cell(kernel, f"import comm; comm.get_comm_manager().comms[{comm_id!r}].close()")


def test_other_messages_keep_their_order_and_get_their_replies(kernel: Kernel) -> None:
    # After an error Jupyter would drop the cells that wait.
    page = Page.opened(kernel, "try: notebook_launch(train, 2)\nexcept RunStoppedError: pass")
    first = kernel.start("print('first')")
    page.send("hello")
    second = kernel.start("print('second')")
    page.until(lambda messages: len(messages) > 1)
    assert not kernel.outcome(first).messages
    page.send("stop")
    assert kernel.wait(page.cell).error is None
    assert kernel.wait(first).stdout == "first\n"
    assert kernel.wait(second).stdout == "second\n"


def test_detached_run_shows_its_monitor(kernel: Kernel) -> None:
    page = Page.opened(kernel, "run = launch(train, 2)")
    page.send("hello")
    page.until(lambda messages: len(messages) > 1)
    page.send("interrupt")
    page.until(lambda messages: any(message.get("run", {}).get("is_over") for message in messages))
    outcome = kernel.wait(page.cell, until=lambda outcome: "data-nbl-explore" in str(final(outcome)))
    assert not any(WIDGET_VIEW in data for data in final(outcome).values())
    assert evaluate(kernel, "run.wait(); run.state") == "stopped"


def test_clicks_from_a_front_end_with_subshells_arrive(kernel: Kernel) -> None:
    subshell = kernel.ask_control("create_subshell_request")["subshell_id"]
    page = Page.opened(kernel, "notebook_launch(train, 2)")
    page.send("hello", subshell_id=subshell)
    page.until(lambda messages: len(messages) > 1)
    page.send("stop", subshell_id=subshell)
    assert (kernel.wait(page.cell).error or "").startswith("RunStoppedError")
    kernel.ask_control("delete_subshell_request", subshell_id=subshell)


def test_requests_of_the_page_are_carried_out(kernel: Kernel) -> None:
    def notices(messages: list[dict[str, Any]]) -> str:
        return "\n".join(notice for message in messages for notice in message.get("notices", ()))

    page = Page.opened(kernel, "notebook_launch(train, 2)")
    for kind in ("hello", "stacks", "save", "no such thing"):
        page.send(kind)
    page.until(lambda messages: "Accelerator" in notices(messages) and "train" in notices(messages))
    assert "CallOrderError: no Accelerator has made an update in this run yet" in notices(page.messages)
    assert "time.sleep(0.01)" in notices(page.messages) or "in train" in notices(page.messages)
    for kind in ("stop", "stop", "interrupt", "stop"):
        page.send(kind)
    assert (kernel.wait(page.cell).error or "").startswith("RunStoppedError")


STEERED = """
def steered():
    import torch
    from notebook_launcher import Accelerator, tunable
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    while not tunable("enough", False):
        with accelerator.accumulate(model):
            loss = model(torch.ones(4, 2)).square().mean() * tunable("temperature", 0.7)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            report(loss=loss)
    return optimizer.param_groups[0]["lr"]
"""


def test_settings_are_changed_from_the_page_while_the_cell_is_busy(kernel: Kernel) -> None:
    def latest(name: str) -> Any:
        found = [message[name] for message in page.messages if name in message]
        return found[-1] if found else None

    def texts() -> dict[str, str]:
        return {setting["name"]: setting["text"] for setting in latest("settings") or ()}

    kernel.execute(STEERED)
    page = Page.opened(kernel, "notebook_launch(steered, 2)")
    page.send("hello")
    page.until(lambda _: "lr" in texts())
    assert texts() == {
        "lr": "0.5", "max_grad_norm": "none", "gradient_accumulation_steps": "2", "enough": "off", "temperature": "0.7"
    }  # fmt: skip
    for name, value in (("lr", "x0.5"), ("max_grad_norm", "1"), ("temprature", "1"), ("temperature", "warm")):
        page.send("set", name=name, value=value)
    page.until(lambda _: (texts()["lr"], texts()["max_grad_norm"]) == ("0.25", "1"))
    page.until(lambda messages: len(answers(messages)) == 4)
    problems = answers(page.messages)
    assert (problems["lr"], problems["max_grad_norm"]) == ("", "")
    assert problems["temprature"].startswith("temprature=1: this run offers lr, max_grad_norm")
    assert problems["temperature"].startswith("temperature='warm' must be a number")
    changes = [change for message in page.messages for change in message.get("changes", ())]
    assert {change["words"] for change in changes} == {"lr 0.5 → 0.25", "max_grad_norm none → 1"}
    assert all(change["who"].startswith("by the monitor") for change in changes)
    page.send("sample", amount=1)
    page.send("profile", amount=2)
    page.until(lambda messages: findings(messages).keys() == {"sample", "profile"})
    sample, profile = (findings(page.messages)[kind] for kind in ("sample", "profile"))
    assert "steered, line" in sample["drawing"], sample["problem"]
    assert profile["tables"][0]["head"].startswith("rank 0: 2 updates from update "), profile["problem"]
    assert profile["tables"][0]["trace"].endswith(".json.gz")
    assert base64.b64decode(profile["tables"][0]["trace_data"]).startswith(b"\x1f\x8b")
    page.send("pause")
    page.until(lambda _: latest("run")["state"] == "paused")
    assert latest("run")["actions"]["resume"]
    page.send("set", name="temperature", value="0.9")
    page.until(lambda _: texts()["temperature"] == "0.9")
    page.send("resume")
    page.until(lambda _: latest("run")["state"] == "running")
    page.send("set", name="enough", value="on")
    outcome = kernel.wait(page.cell)
    assert (outcome.result or "").startswith("Results of 2 ranks\n  0: 0.25"), outcome
    _, drawing = picture_of(outcome)
    assert "lr 0.5 → 0.25" in drawing["image/svg+xml"]


def answers(messages: list[dict[str, Any]]) -> dict[str, str]:
    return {answer["name"]: answer["problem"] for message in messages for answer in message.get("answers", ())}


def findings(messages: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {finding["kind"]: finding for message in messages for finding in message.get("findings", ())}


def test_buttons_work_after_the_cell_if_ipykernel_has_no_tap(kernel: Kernel) -> None:
    code = (
        "from notebook_launcher.kernel.comms import tap\n"
        "known, tap._running_kernel = tap._running_kernel, lambda: object()\n"
        "run = launch(train, 2, monitor=False)\nMonitor(run)"
    )
    page = Page.opened(kernel, code, allow_stdin=False)
    page.send("hello")
    (message, *_) = page.until(bool)
    assert "interrupt button" in message["run"]["action_hint"]
    page.send("stop")
    page.until(lambda messages: any(message.get("run", {}).get("is_over") for message in messages))
    run_cell(kernel, "tap._running_kernel = known; run.wait()")


# --------------------------------------------------------------------------------------------------------------------
# What stays of a monitor when its run is over, or was read from its folder.


def test_only_the_newest_monitors_of_ended_runs_stay_open(kernel: Kernel) -> None:
    kernel.execute("from notebook_launcher.widgets.monitor import monitor as module; module.MAX_EXPLORABLE = 1")
    pages = []
    for _ in range(2):
        pages.append(Page.opened(kernel, "notebook_launch(train, 2)"))
        pages[-1].send("hello")
        pages[-1].until(lambda messages: len(last_steps(messages)) > 0)
        pages[-1].send("interrupt")
        kernel.wait(pages[-1].cell)
    kernel.wait(pages[-1].cell, until=lambda _: pages[0].is_closed)
    assert not pages[1].is_closed


@pytest.mark.parametrize("reader", ["run", "open_run(run.id)"])
def test_run_that_is_over_can_be_explored(kernel: Kernel, reader: str) -> None:
    run_cell(
        kernel,
        "from notebook_launcher import open_run\n"
        "def short(): print('from a rank'); train(5)\n"
        "run = launch(short, 2, output='none'); run.wait()",
    )
    page = Page.opened(kernel, f"monitor = Monitor({reader}); monitor", allow_stdin=False)
    outcome = kernel.wait(page.cell)
    (shown,) = final(outcome).values()
    assert shown["text/html"].startswith("<div>short on 2 ranks: done")
    assert shown["text/plain"]
    kept = outcome.displays[-1]["data"]["text/html"]
    assert re.match(r'<div data-nbl-kept="\w+"><style>[^<]+</style><details style="[^"]+" open>', kept)
    assert "<img" in kept
    page.send("hello")
    (message,) = page.until(bool)
    assert (message["type"], message["run"]["state"]) == ("reset", "done")
    assert len(message["plots"][0]["lines"][0]["x"]) == 5
    assert [log["text"] for log in message["logs"]] == ["from a rank\n"] * 2
    assert not any(message["run"]["actions"].values())
    outcome = kernel.execute("monitor.close(); monitor")
    assert "done" in outcome.displays[0]["data"]["text/html"]
    assert WIDGET_VIEW not in outcome.displays[0]["data"]


def test_folded_picture_stands_below_the_monitor_of_a_live_run(kernel: Kernel) -> None:
    page = Page.opened(kernel, "notebook_launch(train, 2)")
    page.send("hello")
    outcome = kernel.wait(page.cell, until=lambda outcome: "loss" in str(final(outcome)))
    widget, kept = final(outcome).values()
    assert WIDGET_VIEW in widget
    assert re.match(r'<div data-nbl-kept="\w+"><style>[^<]+</style><details ', kept["text/html"])
    assert "train on 2 ranks: running" in kept["text/html"]
    assert "<img" in kept["text/html"]
    assert kept["text/plain"].startswith("train on 2 ranks: running")
    kernel.interrupt()
    outcome = kernel.wait(page.cell)
    table, drawing = picture_of(outcome)
    assert "stopped" in table["text/html"]
    assert "<img" in drawing["text/html"]
    assert page.messages


def test_metrics_read_for_a_picture_reach_the_page_too() -> None:
    def report_and_wait() -> None:
        report(step=7, loss=1.0)
        for _ in track(range(10**6)):
            time.sleep(0.01)

    run = launch(report_and_wait, 1, output="none")
    monitor = Monitor(run)
    sent: list[Any] = []
    monitor.send = sent.append
    monitor._pages.add("")
    while not run.metrics:
        run.wait(0.01)
    monitor._keep_picture()
    monitor._send_news()
    run.stop()
    monitor.close()
    assert [plot["lines"][0]["x"] for plot in sent[0]["plots"]] == [[7]]


def test_picture_that_stays_is_drawn_as_the_page_drew_the_curves() -> None:
    run = launch(lambda: report(loss=1.0), 1, output="none", monitor=False)
    run.result(50)
    monitor = Monitor(run)
    with contextlib.closing(monitor):
        assert ">step<" in monitor._picture()[1]["image/svg+xml"]
        monitor._receive({"type": "draw", "axis": "time", "grouped": False, "log": True, "smoothing": 7})
        assert ">time<" in monitor._picture()[1]["image/svg+xml"]
        monitor._receive({"type": "draw", "axis": "<b>", "smoothing": "much"})
        assert ">step<" in monitor._picture()[1]["image/svg+xml"]


@pytest.mark.usefixtures("no_loop_left")
def test_notebook_run_by_a_program_keeps_no_widget() -> None:
    source = f"import time\nfrom notebook_launcher import *{TRAIN}\nnotebook_launch(train, 2, kwargs={{'steps': 150}})"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3").execute(
        env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    data = [output.data for output in notebook.cells[0].outputs if output.output_type == "display_data"]
    assert any("done" in bundle.get("text/html", "") for bundle in data)
    # Of the progress nothing is left but an empty output, and the text is the first line.
    assert not any("/150" in bundle.get("text/plain", "") for bundle in data)
    text = "".join(output.text for output in notebook.cells[0].outputs if output.output_type == "stream")
    assert [line.partition(" ")[0] for line in text.splitlines()] == ["No", "train:"]  # "No person waits here: ..."
    assert any("image/svg+xml" in bundle for bundle in data)
    assert not any(WIDGET_VIEW in bundle for bundle in data)
    assert "widgets" not in notebook.metadata


def test_hello_that_comes_as_soon_as_the_comm_is_open_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    run = launch(print, 1, output="none")
    run.wait()
    open_comm = ipywidgets.Widget.open

    def open_and_answer(widget: Any) -> None:
        open_comm(widget)
        widget._handle_custom_msg({"type": "hello"}, [])

    monkeypatch.setattr(ipywidgets.Widget, "open", open_and_answer)
    sent: list[Any] = []
    monkeypatch.setattr(Monitor, "send", lambda _, message: sent.append(message["type"]))
    with contextlib.closing(Monitor(run)) as monitor:
        assert monitor.was_seen
        assert sent == ["reset"]
