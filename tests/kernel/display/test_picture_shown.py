"""Picture of a run at the end of its cell: one line, or tables and a drawing, below all that its ranks wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.kernels import Kernel, Outcome

KERNEL_CODE = "def rank(): return int(os.environ['RANK'])"


@pytest.fixture(scope="module")
def kernel(module_kernel: Kernel) -> Kernel:
    return module_kernel


def run(kernel: Kernel, code: str, *, has_audience: bool) -> Outcome:
    return kernel.wait(kernel.start(code, allow_stdin=has_audience))


def outputs(outcome: Outcome) -> list[tuple[str, Any]]:
    """Return what the cell holds in the end, without outputs that take no room: text, or a bundle."""
    kept: list[tuple[str, Any]] = []
    updated = {content["transient"]["display_id"]: content["data"] for content in outcome.updates}
    for message in outcome.messages:
        content = message["content"]
        if message["msg_type"] == "stream":
            kept.append(("text", content["text"]))
        elif message["msg_type"] == "display_data":
            data = updated.get(content["transient"].get("display_id"), content["data"])
            kept += [("picture", data)] if data.get("text/plain") else []
    return kept


@pytest.mark.parametrize("has_audience", [True, False], ids=["in a front end", "in a program"])
def test_short_run_leaves_one_line_that_opens_to_its_record_after_what_was_printed(
    kernel: Kernel, *, has_audience: bool
) -> None:
    code = (
        "def train():\n"
        "    if rank() == 0: print('first')\n"
        "    time.sleep(1.3)\n"
        "    if rank() == 0: print('last')\n"
        "notebook_launch(train, 2)"
    )
    outcome = run(kernel, code, has_audience=has_audience)
    *texts, (kind, picture) = outputs(outcome)
    assert {kind for kind, _ in texts} == {"text"}
    assert "".join(text for _, text in texts).splitlines()[1:] == ["[rank 0] first", "[rank 0] last"]
    assert kind == "picture"
    assert picture["text/plain"].startswith("train: done in ")
    assert "\n" not in picture["text/plain"]
    assert picture["text/html"].startswith("<details")
    assert f">{picture['text/plain']}</summary>" in picture["text/html"]
    assert outcome.result == "Results of 2 ranks: all returned None"


def test_interrupt_while_the_monitor_is_made_stops_the_run_and_leaves_one_picture(kernel: Kernel) -> None:
    code = (
        "import ipywidgets, signal\n"
        "made = []\n"
        "def press(widget):\n"
        "    if type(widget).__name__ == 'Monitor':\n"
        "        made.append(1); os.kill(os.getpid(), signal.SIGINT)\n"
        "ipywidgets.Widget.on_widget_constructed(press)\n"
        "try:\n"
        "    notebook_launch(time.sleep, 2, args=(60,))\n"
        "finally:\n"
        "    ipywidgets.Widget.on_widget_constructed(None)"
    )
    outcome = run(kernel, code, has_audience=True)
    assert outcome.error == "KeyboardInterrupt: sleep was stopped"
    assert [kind for kind, _ in outputs(outcome) if kind == "picture"] == ["picture"]
    assert kernel.execute("len(made)").result == "1"
    assert kernel.execute("del made, press, ipywidgets").error is None


def test_run_with_curves_leaves_them_after_what_was_printed(kernel: Kernel) -> None:
    code = (
        "def train():\n"
        "    for i in range(13): time.sleep(0.1); report(loss=i)\n"
        "    print('last')\n"
        "results = notebook_launch(train, 2)"
    )
    text, (_, tables), (_, drawing) = outputs(run(kernel, code, has_audience=True))[-3:]
    assert text == ("text", "[ranks 0,1] last\n")
    assert tables["text/plain"].startswith("train on 2 ranks: done, ")
    assert not tables["text/html"].startswith("<details")
    assert "image/svg+xml" in drawing


def test_failure_that_a_cell_raises_is_shown_once_in_a_folded_picture(kernel: Kernel) -> None:
    code = (
        "def train():\n"
        "    for i in range(13): time.sleep(0.1); report(loss=i)\n"
        "    if rank() == 1: raise ValueError('boom ' + 'at last')\n"
        "    time.sleep(60)\n"
        "notebook_launch(train, 2)"
    )
    outcome = run(kernel, code, has_audience=True)
    _, picture = outputs(outcome)[-1]
    assert picture["text/plain"].startswith("train: failed after ")
    assert picture["text/plain"].endswith(" on rank 1")
    page = picture["text/html"]
    assert page.startswith("<details")
    assert "Traceback" not in page
    assert page.index("caused by rank 1") > page.index("ValueError: boom at last")
    assert outcome.traceback.count("boom at last") == 1


def test_failure_that_no_cell_raises_is_shown_in_full_by_its_picture(kernel: Kernel) -> None:
    code = (
        "def train():\n"
        "    time.sleep(1.3)\n"
        "    if rank() == 1: raise ValueError('boom ' + 'alone')\n"
        "    time.sleep(60)\n"
        "run = launch(train, 2)"
    )
    cell = kernel.start(code, allow_stdin=False)
    outcome = kernel.wait(cell, until=lambda outcome: "boom alone" in str(outputs(outcome)))
    _, picture = outputs(outcome)[-1]
    assert "\n    ValueError: boom alone\n" in picture["text/plain"]
    assert "boom alone" not in outcome.stdout
    assert kernel.execute("del run").error is None
