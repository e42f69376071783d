"""The live monitor in real kernels; the test plays the page: it says hello and clicks while the cell is busy."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import re
import time
import uuid
import weakref
from typing import TYPE_CHECKING, Any

import nbclient
import nbformat
import pytest

from notebook_launcher import ConfigError, LaunchConfig, launch, report, track
from notebook_launcher.widgets import Monitor
from tests.kernel.test_ipykernels import VERSIONS, installed
from tests.support.kernels import ROOT, Outcome
from tests.support.warm_kernels import evaluate, final, unchanged, warm_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.kernels import Kernel

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
NEWEST = "installed"

TRAIN = """
from notebook_launcher.widgets import Monitor
def train(steps=10_000):
    for step in track(range(steps)):
        time.sleep(0.01)
        report(step=step, loss=1 / (step + 1))
"""
LEFTOVERS = """
import comm
from ipywidgets.widgets import widget
from notebook_launcher.widgets.monitor import tap
k = get_ipython().kernel
on_recv = k.shell_stream._recv_callback
[len(comm.get_comm_manager().comms), len(widget._instances), len(tap._TAPS), "Tap" in repr(on_recv)]
"""


FORGET = """
from notebook_launcher.widgets.place import open_widgets
for widget_ in open_widgets():
    if getattr(widget_, "explorable_since", 0): widget_.close()
"""


@pytest.fixture(scope="module", params=[NEWEST, *VERSIONS])
def any_kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    folders = [] if request.param == NEWEST else [str(installed(request.param))]
    with warm_kernel(env={"PYTHONPATH": os.pathsep.join([*folders, str(ROOT)])}) as kernel:
        outcome = kernel.execute(TRAIN + "import ipykernel; print(ipykernel.__version__)")
        assert request.param in (NEWEST, outcome.stdout.strip())
        yield kernel


@pytest.fixture
def every_kernel(any_kernel: Kernel) -> Iterator[Kernel]:
    with clean(any_kernel):
        yield any_kernel


@pytest.fixture(scope="module")
def module_kernel() -> Iterator[Kernel]:
    with warm_kernel() as kernel:
        kernel.execute(TRAIN)
        yield kernel


@pytest.fixture
def kernel(module_kernel: Kernel) -> Iterator[Kernel]:
    with clean(module_kernel):
        yield module_kernel


@contextlib.contextmanager
def clean(kernel: Kernel) -> Iterator[None]:
    """Check that no widget, comm or tap is left, nor anything else."""
    with unchanged(kernel):
        before = evaluate(kernel, LEFTOVERS)
        yield
        kernel.execute(FORGET)
        assert evaluate(kernel, LEFTOVERS) == before == [*before[:2], 0, False]


@dataclasses.dataclass
class Page:
    """A front end with one view of a monitor."""

    kernel: Kernel
    cell: str
    comm_id: str

    @classmethod
    def opened(cls, kernel: Kernel, cell: str, number: int = 0) -> Page:
        """Wait until a cell shows a monitor."""
        outcome = kernel.wait(cell, until=lambda outcome: len(views(outcome)) > number or finished(outcome))
        assert len(views(outcome)) > number, outcome
        return cls(kernel, cell, views(outcome)[number])

    def send(self, kind: str, page: str = "", *, subshell_id: str | None = None, **content: Any) -> None:
        header = {} if subshell_id is None else {"subshell_id": subshell_id}
        message = {"method": "custom", "content": {"type": kind, "page": page, **content}}
        self.kernel.send_comm(self.comm_id, message, **header)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Messages to the page, in order."""
        return [message["content"]["data"]["content"] for message in self._received]

    @property
    def times(self) -> list[float]:
        return [message["header"]["date"].timestamp() for message in self._received]

    @property
    def _received(self) -> list[dict[str, Any]]:
        return [
            message
            for message in self.kernel.received
            if message["msg_type"] == "comm_msg" and message["content"]["comm_id"] == self.comm_id
        ]

    @property
    def is_closed(self) -> bool:
        closed = (message for message in self.kernel.received if message["msg_type"] == "comm_close")
        return any(message["content"]["comm_id"] == self.comm_id for message in closed)

    def until(self, met: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        self.kernel.wait(self.cell, until=lambda _: met(self.messages))
        return self.messages


def executed(kernel: Kernel, code: str) -> Outcome:
    """Run a cell as a front end does, which can ask for input."""
    return kernel.wait(kernel.start(code, allow_stdin=True))


def views(outcome: Outcome) -> list[str]:
    """Return the models that a cell's displays show."""
    bundles = [content["data"] for content in outcome.of("display_data", "execute_result")]
    return [bundle[WIDGET_VIEW]["model_id"] for bundle in bundles if WIDGET_VIEW in bundle]


def finished(outcome: Outcome) -> bool:
    told = outcome.stdout + str(outcome.displays)
    return outcome.error is not None or "done in" in told or ": done, " in told


def record(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the tables and the drawing that a run has left at the end of its cell."""
    assert not any(data["text/plain"] for data in final(outcome).values())
    return [content["data"] for content in outcome.displays[-2:]]


def kinds(messages: list[dict[str, Any]]) -> list[str]:
    return [message["type"] for message in messages]


def last_steps(messages: list[dict[str, Any]]) -> list[int]:
    """Return how far the first curve has come with each message that draws it."""
    drawn = [message["curves"][0]["steps"] for message in messages if message.get("curves")]
    return [max(steps) for steps in drawn if steps]


def test_stop_button_works_while_the_cell_is_busy(every_kernel: Kernel) -> None:
    cell = every_kernel.start("notebook_launch(train, 2)", allow_stdin=True)
    page = Page.opened(every_kernel, cell)
    page.send("hello")
    messages = page.until(lambda messages: len(messages) > 5 and len(last_steps(messages)) > 1)
    assert kinds(messages) == ["reset"] + ["update"] * (len(messages) - 1)
    assert messages[0]["run"]["actions"]["stop"]
    assert messages[0]["run"]["action_hint"] == ""
    assert last_steps(messages) == sorted(set(last_steps(messages)))
    page.send("stop")
    outcome = every_kernel.wait(cell)
    assert (outcome.error or "").startswith("RunStoppedError")
    assert page.messages[-1]["run"]["state"] == "stopped"
    assert page.messages[-1]["run"]["is_over"]
    # Nothing that needs a kernel is left in the cell.
    table, drawing = record(outcome)
    assert "stopped" in table["text/html"]
    assert WIDGET_VIEW not in table
    assert drawing["image/svg+xml"].startswith("<svg")
    assert evaluate(every_kernel, LEFTOVERS)[2:] == [0, False]
    # Its page may go on exploring it: the record names the monitor, which still answers.
    assert not page.is_closed
    key = evaluate(every_kernel, f"widget._instances[{page.comm_id!r}].key")
    assert f'data-nbl-explore="{key}"' in table["text/html"]
    assert f'data-nbl-cover="{key}"' in drawing["text/html"]
    page.send("hello")
    page.until(lambda messages: kinds(messages).count("reset") == 2)
    assert page.messages[-1]["run"]["state"] == "stopped"


def test_page_gets_at_most_four_messages_a_second(kernel: Kernel) -> None:
    kernel.execute("def flood():\n    for step in range(30_000): report(step=step, loss=1.0, other=2.0)")
    cell = kernel.start("notebook_launch(flood, 2, output='none', monitor=True)", allow_stdin=True)
    page = Page.opened(kernel, cell)
    for _ in range(30):
        page.send("hello")
    kernel.wait(cell)
    assert "reset" in kinds(page.messages)
    in_any_second = [sum(1 for other in page.times if 0 <= other - begin < 1) for begin in page.times]
    assert max(in_any_second) <= 6  # Four a second, the answer to the first hello, and the last one.


def test_monitor_of_64_ranks_shows_every_rank(kernel: Kernel) -> None:
    kernel.execute(
        "def many():\n"
        "    for step in range(40):\n"
        "        report(step=step, **{f'metric {number}': step * number for number in range(8)})\n"
        "        print('step', step); time.sleep(0.1)"
    )
    cell = kernel.start("notebook_launch(many, 64, backend=None, output='rank0')", allow_stdin=True)
    page = Page.opened(kernel, cell)
    page.send("hello")
    outcome = kernel.wait(cell)
    assert outcome.error is None, outcome.traceback
    assert {rank["rank"] for rank in page.messages[0]["ranks"]} == set(range(64))
    last = {rank["rank"]: rank["state"] for message in page.messages for rank in message.get("ranks", ())}
    assert set(last.values()) == {"returned"}
    assert max(len(json.dumps(message)) for message in page.messages) < 1_000_000
    table, drawing = record(outcome)
    assert table["text/html"].count("returned") >= 64
    assert len(drawing["image/svg+xml"]) < 2_000_000


def test_page_reloaded_while_the_cell_waits_gets_the_run(every_kernel: Kernel) -> None:
    cell = every_kernel.start("notebook_launch(train, 2)", allow_stdin=True)
    page = Page.opened(every_kernel, cell)
    page.send("hello", page="first")
    page.until(lambda messages: len(messages) > 1)
    control, widgets = all_widgets(every_kernel, cell)
    assert widgets[page.comm_id]["state"]["title"] == "train"
    page.send("hello", page="second")
    page.until(lambda messages: kinds(messages).count("reset") == 2)
    page.send("stop")
    assert (every_kernel.wait(cell).error or "").startswith("RunStoppedError")
    # The picture does not come to a page that was reloaded, so it keeps the monitor of the run that is over.
    assert not page.is_closed
    page.send("hello", page="third")
    page.until(lambda messages: kinds(messages).count("reset") == 3)
    assert page.messages[-1]["run"]["state"] == "stopped"
    closing = f"from ipywidgets.widgets import widget; widget._instances[{page.comm_id!r}].close()"
    assert every_kernel.execute(closing).error is None
    close_comm(every_kernel, control)


def test_page_reloaded_while_the_cell_computes_gets_the_run(kernel: Kernel) -> None:
    cell = kernel.start(
        "import time\nrun = launch(train, 2)\nwhile run.state != 'stopped': time.sleep(0.001)", allow_stdin=True
    )
    page = Page.opened(kernel, cell)
    control, widgets = all_widgets(kernel, cell)
    assert page.comm_id in widgets
    page.send("stop")
    assert kernel.wait(cell).error is None
    close_comm(kernel, control)


def all_widgets(kernel: Kernel, cell: str) -> tuple[str, dict[str, Any]]:
    """Ask for all widgets as a page does that was loaded; return the comm that it opens, and the widgets."""

    def answers() -> list[dict[str, Any]]:
        messages = (one["content"]["data"] for one in kernel.received if one["content"].get("comm_id") == control)
        return [data["states"] for data in messages if data.get("method") == "update_states"]

    control = uuid.uuid4().hex
    kernel.send_comm(control, {}, opens="jupyter.widget.control")
    kernel.send_comm(control, {"method": "request_states"})
    kernel.wait(cell, until=lambda _: bool(answers()))
    return control, answers()[0]


def close_comm(kernel: Kernel, comm_id: str) -> None:
    outcome = kernel.execute(f"import comm; comm.get_comm_manager().comms[{comm_id!r}].close()")
    assert outcome.error is None, outcome.traceback


def test_other_messages_keep_their_order_and_get_their_replies(every_kernel: Kernel) -> None:
    # After an error Jupyter would drop the cells that wait.
    cell = every_kernel.start("try: notebook_launch(train, 2)\nexcept RunStoppedError: pass", allow_stdin=True)
    page = Page.opened(every_kernel, cell)
    first = every_kernel.start("print('first')")
    page.send("hello")
    second = every_kernel.start("print('second')")
    page.until(lambda messages: len(messages) > 1)
    assert not every_kernel.outcome(first).messages
    page.send("stop")
    assert every_kernel.wait(cell).error is None
    assert every_kernel.wait(first).stdout == "first\n"
    assert every_kernel.wait(second).stdout == "second\n"


def test_detached_run_shows_its_monitor(every_kernel: Kernel) -> None:
    cell = every_kernel.start("run = launch(train, 2)", allow_stdin=True)
    page = Page.opened(every_kernel, cell)
    page.send("hello")
    page.until(lambda messages: len(messages) > 1)
    page.send("interrupt")
    page.until(lambda messages: any(message.get("run", {}).get("is_over") for message in messages))
    outcome = every_kernel.wait(cell, until=lambda outcome: "data-nbl-explore" in str(outcome.displays))
    assert not any(WIDGET_VIEW in data for data in final(outcome).values())
    assert evaluate(every_kernel, "run.wait(); run.state") == "stopped"


def test_clicks_from_a_front_end_with_subshells_arrive(kernel: Kernel) -> None:
    subshell = kernel.ask_control("create_subshell_request")["subshell_id"]
    cell = kernel.start("notebook_launch(train, 2)", allow_stdin=True)
    page = Page.opened(kernel, cell)
    page.send("hello", subshell_id=subshell)
    page.until(lambda messages: len(messages) > 1)
    page.send("stop", subshell_id=subshell)
    assert (kernel.wait(cell).error or "").startswith("RunStoppedError")
    kernel.ask_control("delete_subshell_request", subshell_id=subshell)


def test_requests_of_the_page_are_carried_out(kernel: Kernel) -> None:
    def notices(messages: list[dict[str, Any]]) -> str:
        return "\n".join(notice for message in messages for notice in message.get("notices", ()))

    cell = kernel.start("notebook_launch(train, 2)", allow_stdin=True)
    page = Page.opened(kernel, cell)
    for kind in ("hello", "stacks", "save", "no such thing"):
        page.send(kind)
    page.until(lambda messages: "Accelerator" in notices(messages) and "train" in notices(messages))
    assert "CallOrderError: no Accelerator has made an update in this run yet" in notices(page.messages)
    assert "time.sleep(0.01)" in notices(page.messages) or "in train" in notices(page.messages)
    for kind in ("stop", "stop", "interrupt", "stop"):
        page.send(kind)
    assert (kernel.wait(cell).error or "").startswith("RunStoppedError")


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
        return {one["name"]: one["text"] for one in latest("settings") or ()}

    kernel.execute(STEERED)
    cell = kernel.start("notebook_launch(steered, 2)", allow_stdin=True)
    page = Page.opened(kernel, cell)
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
    assert {(one["name"], one["before"], one["after"], one["source"]) for one in changes} == {
        ("lr", "0.5", "0.25", "monitor"), ("max_grad_norm", "none", "1", "monitor"),
    }  # fmt: skip
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
    outcome = kernel.wait(cell)
    assert (outcome.result or "").startswith("Results of 2 ranks\n  0: 0.25"), outcome
    _, drawing = record(outcome)
    assert "lr 0.5 → 0.25" in drawing["image/svg+xml"]


def answers(messages: list[dict[str, Any]]) -> dict[str, str]:
    return {one["name"]: one["problem"] for message in messages for one in message.get("answers", ())}


def findings(messages: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for message in messages for one in message.get("findings", ())}


def test_only_the_newest_monitors_of_ended_runs_stay_open(kernel: Kernel) -> None:
    kernel.execute("from notebook_launcher.widgets.monitor import monitor as module; module.MAX_EXPLORABLE = 2")
    pages = []
    for _ in range(3):
        cell = kernel.start("notebook_launch(train, 2)", allow_stdin=True)
        pages.append(Page.opened(kernel, cell))
        pages[-1].send("hello")
        pages[-1].until(lambda messages: len(last_steps(messages)) > 0)
        pages[-1].send("interrupt")
        kernel.wait(cell)
    kernel.wait(cell, until=lambda _: pages[0].is_closed)
    assert not any(page.is_closed for page in pages[1:])


def test_two_monitors_of_one_run_survive_a_reload(kernel: Kernel) -> None:
    cell = kernel.start("run = launch(train, 2, monitor=False)\ndisplay(Monitor(run))\nMonitor(run)")
    pages = [Page.opened(kernel, cell, number) for number in (0, 1)]
    for page in pages:
        page.send("hello")
        page.until(lambda messages: len(messages) > 1)
    pages[0].send("hello")
    pages[0].until(lambda messages: kinds(messages).count("reset") == 2)
    assert kinds(pages[1].messages).count("reset") == 1
    pages[1].send("stop")
    kernel.wait(cell, until=lambda outcome: str(list(final(outcome).values())).count("data-nbl-cover") == 2)
    shown = final(kernel.outcome(cell)).values()
    assert len(shown) == 4
    assert not any(WIDGET_VIEW in data for data in shown)


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
    assert "done" in shown["text/html"]
    assert shown["text/plain"]
    page.send("hello")
    (message,) = page.until(bool)
    assert (message["type"], message["run"]["state"]) == ("reset", "done")
    assert len(message["curves"][0]["steps"]) == 5
    assert [log["text"] for log in message["logs"]] == ["from a rank\n"] * 2
    assert not any(message["run"]["actions"].values())
    outcome = kernel.execute("monitor.close(); monitor")
    assert "done" in outcome.displays[0]["data"]["text/html"]
    assert WIDGET_VIEW not in outcome.displays[0]["data"]


def test_short_run_shows_no_monitor(kernel: Kernel) -> None:
    for _ in range(3):  # another program can make a run of milliseconds take more than the second that it may
        outcome = executed(kernel, "notebook_launch(train, 2, kwargs={'steps': 1})")
        if not outcome.displays:
            break
    assert not outcome.displays
    assert not outcome.of("comm_open")


@pytest.mark.parametrize("options", ["monitor=False", "output='none'"])
def test_no_monitor_is_shown_when_it_is_off(kernel: Kernel, options: str) -> None:
    outcome = executed(kernel, f"notebook_launch(train, 2, kwargs={{'steps': 120}}, {options})")
    assert outcome.error is None
    assert not outcome.displays
    assert not outcome.of("comm_open")


def test_line_of_progress_appears_if_no_page_answers(kernel: Kernel) -> None:
    """A page that cannot draw widgets: progress as text, and no dead widget in the end."""
    outcome = executed(kernel, "notebook_launch(train, 2, kwargs={'steps': 550})")
    assert outcome.error is None
    assert views(outcome)
    lines = [content["data"].get("text/plain", "") for content in outcome.of("display_data", "update_display_data")]
    assert any(line.startswith("train: ") and "/550, " in line and "loss" in line for line in lines), lines
    assert not any(WIDGET_VIEW in data for data in final(outcome).values())
    assert not outcome.of("comm_msg")


@pytest.mark.parametrize("hellos", [0, 1])
def test_folded_picture_stands_below_the_monitor_of_a_live_run(kernel: Kernel, hellos: int) -> None:
    cell = kernel.start("notebook_launch(train, 2)", allow_stdin=True)
    page = Page.opened(kernel, cell)
    for _ in range(hellos):
        page.send("hello")
    outcome = kernel.wait(cell, until=lambda outcome: "loss" in str(final(outcome)))
    widget, kept = final(outcome).values()
    assert WIDGET_VIEW in widget
    assert re.match(r'<div data-nbl-kept="\w+"><details ', kept["text/html"])
    assert "train on 2 ranks: running" in kept["text/html"]
    assert "<img" in kept["text/html"]
    assert kept["text/plain"].startswith("train on 2 ranks: running")
    kernel.interrupt()
    outcome = kernel.wait(cell)
    table, drawing = record(outcome)
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
    assert [curve["steps"] for curve in sent[0]["curves"]] == [[7]]


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


def test_captured_cell_shows_no_monitor(kernel: Kernel) -> None:
    outcome = executed(kernel, "%%capture\nnotebook_launch(train, 2, kwargs={'steps': 120})")
    assert outcome.error is None
    assert not outcome.of("comm_open", "display_data")


def test_buttons_work_after_the_cell_if_ipykernel_has_no_tap(kernel: Kernel) -> None:
    code = (
        "from notebook_launcher.widgets.monitor import tap\n"
        "known, tap._running_kernel = tap._running_kernel, lambda: object()\n"
        "run = launch(train, 2, monitor=False)\nMonitor(run)"
    )
    page = Page.opened(kernel, kernel.start(code))
    page.send("hello")
    (message, *_) = page.until(bool)
    assert "interrupt button" in message["run"]["action_hint"]
    page.send("stop")
    page.until(lambda messages: any(message.get("run", {}).get("is_over") for message in messages))
    assert kernel.execute("tap._running_kernel = known; run.wait()").error is None


def test_import_error_of_the_view_does_not_fail_the_run(kernel: Kernel) -> None:
    hide = (
        "import sys\nkept = {name: sys.modules.pop(name) for name in list(sys.modules) if 'launcher.widgets' in name}\n"
    )
    code = (
        f"{hide}sys.modules['anywidget'], there = None, sys.modules['anywidget']\n"
        "try: print(notebook_launch(train, 2, kwargs={'steps': 120})[0])\n"
        "finally: sys.modules['anywidget'] = there; sys.modules.update(kept)"
    )
    outcome = executed(kernel, code)
    assert outcome.error is None
    assert "no monitor: ModuleNotFoundError" in outcome.stderr
    assert outcome.stdout.endswith("None\n")


def test_stop_button_ends_a_run_of_a_session(kernel: Kernel) -> None:
    cell = kernel.start("with Session(2) as session: session.run(train)", allow_stdin=True)
    page = Page.opened(kernel, cell)
    page.send("hello")
    page.until(lambda messages: len(messages) > 1)
    page.send("stop")
    outcome = kernel.wait(cell)
    assert (outcome.error or "").startswith("RunStoppedError")
    assert not any(WIDGET_VIEW in data for data in final(outcome).values())


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
    assert [line.partition(" ")[0] for line in text.splitlines()] == ["train:"]
    assert any("image/svg+xml" in bundle for bundle in data)
    assert not any(WIDGET_VIEW in bundle for bundle in data)
    assert "widgets" not in notebook.metadata


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_monitor_option_takes_three_values(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"monitor=.* is unknown. It can be True, False or 'auto'"):
        LaunchConfig(monitor=value)
    assert LaunchConfig().monitor == "auto"


def test_monitor_of_something_else_raises_type_error() -> None:
    with pytest.raises(TypeError, match=r"Monitor\(3\): not a run. Pass what launch\(...\) returned"):
        Monitor(3)  # type: ignore[arg-type]


def test_closed_monitor_is_freed_with_its_last_reference() -> None:
    run = launch(print, 1, output="none")
    run.wait()
    monitor = Monitor(run)
    reference = weakref.ref(monitor)
    monitor._handle_custom_msg({"type": "hello"}, [])
    monitor.close()
    del monitor
    assert reference() is None
