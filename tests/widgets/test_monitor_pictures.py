"""Monitors and their pictures when a run is over, or is read from its folder."""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import TYPE_CHECKING, Any

import ipywidgets
import nbclient
import nbformat
import pytest

from notebook_launcher import launch, report, track
from notebook_launcher.widgets import Monitor
from tests.support.front_end import (
    TRAIN,
    WIDGET_VIEW,
    Page,
    clean_kernel,  # noqa: F401 - a fixture
    last_steps,
    picture_of,
)
from tests.support.kernels import ROOT
from tests.support.warm_kernels import final

if TYPE_CHECKING:
    from tests.support.kernels import Kernel

KERNEL_CODE = TRAIN


def test_only_the_newest_monitors_of_ended_runs_stay_open(kernel: Kernel) -> None:
    kernel.execute("from notebook_launcher.widgets.monitor import monitor as module; module.MAX_EXPLORABLE = 1")
    pages = []
    for _ in range(2):
        cell = kernel.start("notebook_launch(train, 2)", allow_stdin=True)
        pages.append(Page.opened(kernel, cell))
        pages[-1].send("hello")
        pages[-1].until(lambda messages: len(last_steps(messages)) > 0)
        pages[-1].send("interrupt")
        kernel.wait(cell)
    kernel.wait(cell, until=lambda _: pages[0].is_closed)
    assert not pages[1].is_closed


@pytest.mark.parametrize("reader", ["run", "open_run(run.id)"])
def test_run_that_is_over_can_be_explored(kernel: Kernel, reader: str) -> None:
    outcome = kernel.execute(
        "from notebook_launcher import open_run\n"
        "def short(): print('from a rank'); train(5)\n"
        "run = launch(short, 2, output='none'); run.wait()"
    )
    assert outcome.error is None, outcome.traceback
    cell = kernel.start(f"monitor = Monitor({reader}); monitor")
    page = Page.opened(kernel, cell)
    outcome = kernel.wait(cell)
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


@pytest.mark.parametrize("hellos", [1])
def test_folded_picture_stands_below_the_monitor_of_a_live_run(kernel: Kernel, hellos: int) -> None:
    cell = kernel.start("notebook_launch(train, 2)", allow_stdin=True)
    page = Page.opened(kernel, cell)
    for _ in range(hellos):
        page.send("hello")
    outcome = kernel.wait(cell, until=lambda outcome: "loss" in str(final(outcome)))
    widget, kept = final(outcome).values()
    assert WIDGET_VIEW in widget
    assert re.match(r'<div data-nbl-kept="\w+"><style>[^<]+</style><details ', kept["text/html"])
    assert "train on 2 ranks: running" in kept["text/html"]
    assert "<img" in kept["text/html"]
    assert kept["text/plain"].startswith("train on 2 ranks: running")
    kernel.interrupt()
    outcome = kernel.wait(cell)
    table, drawing = picture_of(outcome)
    assert "stopped" in table["text/html"]
    assert "<img" in drawing["text/html"]
    assert bool(page.messages) == bool(hellos)


def test_metrics_read_for_a_picture_reach_the_page_too() -> None:
    def report_and_wait() -> None:
        report(step=7, loss=1.0)
        for _ in track(range(10**6)):
            time.sleep(0.01)

    run = launch(report_and_wait, 1, output="none")
    monitor = Monitor(run)
    sent: list[Any] = []
    monitor.send = sent.append
    monitor._seen.set()
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
