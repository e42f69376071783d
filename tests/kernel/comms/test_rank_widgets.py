"""Widgets that ranks make: drawn by the page, and moved by it, through a real kernel."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.warm_kernels import run_cell

if TYPE_CHECKING:
    from tests.support.kernels import Kernel, Outcome

WIDGET = "application/vnd.jupyter.widget-view+json"
OPEN = """
session = Session(2, devices="cpu", monitor=False)
session.activate()
session.execute("import os, time, ipywidgets as w, torch.distributed as dist; rank = dist.get_rank()")
"""
KERNEL_CODE = f"""
import threading
import comm
from notebook_launcher import Session, notebook_launch
{OPEN}
def left():
    return len(comm.get_comm_manager().comms), sorted(t.name for t in threading.enumerate() if "launcher" in t.name)
at_first = left()
"""


@pytest.fixture(scope="module")
def notebook(module_kernel: Kernel) -> Kernel:
    """A kernel whose session stays for the whole file; each test makes widgets of its own."""
    return module_kernel


@pytest.fixture
def lasting(notebook: Kernel) -> None:
    """Open the session that the tests share again, where a test before has closed it."""
    run_cell(notebook, f"if 'closed' in repr(session):\n{textwrap.indent(OPEN, '    ')}")


def comm_of(outcome: Outcome, model: str) -> str:
    """Return the comm of the one widget of a kind that a cell made."""
    (comm_id,) = [
        content["comm_id"] for content in outcome.of("comm_open") if content["data"]["state"]["_model_name"] == model
    ]
    return str(comm_id)


def update(**state: Any) -> dict[str, Any]:
    """Return what a page sends when its user has moved a widget."""
    return {"method": "update", "state": state, "buffer_paths": []}


def changes(outcome: Outcome, comm_id: str) -> list[dict[str, Any]]:
    """Return the messages to a widget in the page."""
    return [content["data"] for content in outcome.of("comm_msg") if content["comm_id"] == comm_id]


def test_widget_of_rank_0_is_drawn_and_moved_between_cells(notebook: Kernel) -> None:
    made = run_cell(
        notebook, "%%ranks\ns = w.IntSlider(3)\ns.observe(lambda c: print('now', c.new), 'value')\nw.HBox([s])"
    )
    (view,) = made.displays
    assert view["data"][WIDGET]["model_id"] == comm_of(made, "HBoxModel")
    assert "(shown as text, because the cell shows the widgets of rank 0 alone)" in made.stdout
    slider = comm_of(made, "IntSliderModel")
    opened = next(content for content in made.of("comm_open") if content["comm_id"] == slider)
    assert opened["target_name"] == "jupyter.widget"
    asked = notebook.send_comm(slider, update(value=42))
    assert run_cell(notebook, "%%ranks\ns.value").stdout == "[0] 42\n[1] 3\n"
    # What the callback prints comes into the cell that made the widget, and the page is told that its value arrived.
    printed = notebook.wait(made.msg_id, until=lambda outcome: "now" in outcome.stdout).stdout
    assert printed.endswith("[rank 0] now 42\n")
    (echo,) = changes(notebook.outcome(asked), slider)
    assert (echo["method"], echo["state"]) == ("echo_update", {"value": 42})


def test_busy_rank_sees_what_its_user_moves(notebook: Kernel) -> None:
    made = run_cell(
        notebook,
        "%%ranks\ns = w.FloatSlider()\nb = w.Button()\nclicks = []\nb.on_click(lambda _: clicks.append(1))\n"
        "w.HBox([s, b])",
    )
    loop = "%%ranks 0\nprint('ready')\nwhile not (s.value and clicks): time.sleep(0.01)\ns.max = 5\nlen(clicks)"
    busy = notebook.start(loop)
    notebook.wait(busy, until=lambda outcome: "ready" in outcome.stdout)
    slider = comm_of(made, "FloatSliderModel")
    for value in range(1, 40):
        notebook.send_comm(slider, update(value=value / 10))
    notebook.send_comm(comm_of(made, "ButtonModel"), {"method": "custom", "content": {"event": "click"}})
    outcome = notebook.wait(busy)
    assert outcome.stdout.endswith("[0] 1\n")
    assert update(max=5.0) in changes(outcome, slider)
    assert run_cell(notebook, "%%ranks 0\ns.value").stdout == "[0] 3.9\n"


def test_bytes_travel_both_ways(notebook: Kernel) -> None:
    made = run_cell(notebook, "%%ranks 0\npicture = w.Image(value=b'abc')\npicture")
    (opened,) = [m for m in made.messages if m["content"].get("comm_id") == comm_of(made, "ImageModel")]
    assert [bytes(buffer) for buffer in opened["buffers"]] == [b"abc"]
    assert opened["content"]["data"]["buffer_paths"] == [["value"]]
    message = {"method": "update", "state": {}, "buffer_paths": [["value"]]}
    notebook.send_comm(comm_of(made, "ImageModel"), message, buffers=[b"from the page"])
    assert run_cell(notebook, "%%ranks 0\nbytes(picture.value)").stdout == "[0] b'from the page'\n"


def test_many_changes_become_few_messages(notebook: Kernel) -> None:
    made = run_cell(notebook, "%%ranks 0\nbar = w.IntProgress(max=5000)\nbar")
    moved = run_cell(notebook, "%%ranks 0\nfor bar.value in range(5001): pass")
    sent = changes(moved, comm_of(made, "IntProgressModel"))
    assert sent[-1]["state"] == {"value": 5000}
    assert len(sent) < 200


def test_output_widget_takes_what_is_printed_and_shown(notebook: Kernel) -> None:
    made = run_cell(
        notebook,
        "%%ranks 0\nout = w.Output()\ndisplay(out)\n"
        "with out:\n    print('inside')\n    print('more')\n    display({'a': 1})\n    1 / 0\nprint('outside')",
    )
    assert made.stdout == "[rank 0] outside\n"
    text, shown, error = changes(made, comm_of(made, "OutputModel"))[-1]["state"]["outputs"]
    assert (text["name"], text["text"]) == ("stdout", "inside\nmore\n")
    assert shown["data"] == {"text/plain": "{'a': 1}"}
    assert error["name"] == "stderr"
    assert error["text"].endswith("ZeroDivisionError: division by zero\n")
    cleared = run_cell(notebook, "%%ranks 0\nout.clear_output()\nlen(out.outputs)")
    assert cleared.stdout == "[0] 0\n"


def test_widget_of_another_rank_is_shown_when_a_cell_asks_for_it(notebook: Kernel) -> None:
    made = run_cell(notebook, "%%ranks\nhidden = w.Valid(description=str(rank))")
    assert {content["data"]["state"].get("description") for content in made.of("comm_open")} >= {"0"}
    shown = run_cell(notebook, "%%ranks --display 1\nhidden")
    (view,) = shown.displays
    assert view["data"][WIDGET]["model_id"] == comm_of(shown, "ValidModel")
    notebook.send_comm(comm_of(shown, "ValidModel"), update(value=True))
    assert run_cell(notebook, "%%ranks\nhidden.value").stdout == "[0] False\n[1] True\n"


def test_widgets_of_a_rank_that_dies_are_forgotten(notebook: Kernel) -> None:
    run_cell(
        notebook, "before = left()\nother = Session(1, devices='cpu')\nother.execute('import os, ipywidgets as w')"
    )
    made = run_cell(notebook, "_ = other.execute_cell('w.Text()')\nleft()")
    num_open = len(made.of("comm_open"))
    assert num_open == 3  # The widget, its layout and its style.
    dies = "try: other.execute('os._exit(3)')\nexcept Exception as error: print(error)"
    assert "code 3" in run_cell(notebook, dies).stdout
    assert run_cell(notebook, "print(left() == before)\nother.close()").stdout == "True\n"


def test_notebook_bar_of_a_launch_is_a_widget_for_rank_0_and_text_elsewhere(notebook: Kernel) -> None:
    outcome = run_cell(
        notebook,
        "def train():\n"
        "    from tqdm.notebook import tqdm\n"
        "    for _ in tqdm(range(20), desc='epoch'): pass\n"
        "before = left()\n"
        "notebook_launch(train, 2, devices='cpu', monitor=False)\n"
        "print(left() == before)",
    )
    progress = comm_of(outcome, "FloatProgressModel")
    assert {"bar_style": "success"}.items() <= changes(outcome, progress)[-1]["state"].items()
    (view,) = [display for display in outcome.displays if WIDGET in display["data"]]
    assert view["data"]["text/plain"].startswith("epoch:")
    reason = "tqdm.notebook: shown as text, because the cell shows the widgets of rank 0 alone"
    assert f"[rank 1] {reason}\n" in outcome.stdout
    assert "[rank 1] epoch: 100%" in outcome.stdout
    assert "[rank 0] epoch" not in outcome.stdout
    assert outcome.stdout.endswith("True\n")


def test_nothing_is_left_when_the_session_ends(notebook: Kernel) -> None:
    made = run_cell(notebook, "%%ranks\nlast = w.Text()\nlast")
    assert run_cell(notebook, "session.close()\nleft() == at_first").result == "True"
    # The page keeps the widget as it is; what it sends has no receiver any more.
    assert made.of("comm_close") == []
    notebook.send_comm(comm_of(made, "TextModel"), update(value="x"))
    assert run_cell(notebook, "left() == at_first").result == "True"
