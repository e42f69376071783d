"""The moment at which a run shows its monitor, and the amount that the page gets, in a real kernel."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.front_end import (
    TRAIN,
    WIDGET_VIEW,
    Page,
    clean_kernel,  # noqa: F401 - a fixture
    executed,
    kinds,
    picture_of,
    views,
)
from tests.support.warm_kernels import final

if TYPE_CHECKING:
    from tests.support.kernels import Kernel

KERNEL_CODE = TRAIN


def test_page_gets_at_most_four_messages_a_second(kernel: Kernel) -> None:
    kernel.execute("def flood():\n    for step in range(30_000): report(step=step, loss=1.0, other=2.0)")
    page = Page.opened(kernel, "notebook_launch(flood, 2, output='none', monitor=True)")
    for _ in range(30):
        page.send("hello")
    kernel.wait(page.cell)
    assert "reset" in kinds(page.messages)
    in_any_second = [sum(1 for other in page.times if 0 <= other - begin < 1) for begin in page.times]
    assert max(in_any_second) <= 6  # Four a second, the answer to the first hello, and the last one.


def test_monitor_of_32_ranks_shows_every_rank(kernel: Kernel) -> None:
    kernel.execute(
        "def many():\n"
        "    for step in range(40):\n"
        "        report(step=step, **{f'metric {number}': step * number for number in range(8)})\n"
        "        print('step', step); time.sleep(0.1)"
    )
    page = Page.opened(kernel, "notebook_launch(many, 32, backend=None, output='rank0')")
    page.send("hello")
    outcome = kernel.wait(page.cell)
    assert outcome.error is None, outcome.traceback
    assert {rank["rank"] for rank in page.messages[0]["ranks"]} == set(range(32))
    last = {rank["rank"]: rank["state"] for message in page.messages for rank in message.get("ranks", ())}
    assert set(last.values()) == {"returned"}
    assert max(len(json.dumps(message)) for message in page.messages) < 1_000_000
    table, drawing = picture_of(outcome)
    assert table["text/html"].count("returned") >= 32
    assert len(drawing["image/svg+xml"]) < 2_000_000


def test_short_run_shows_no_monitor(kernel: Kernel) -> None:
    for _ in range(3):  # another program can make a run of milliseconds take more than the second that it may
        outcome = executed(kernel, "notebook_launch(train, 2, kwargs={'steps': 1})")
        if not outcome.displays:
            break
    assert not outcome.displays
    assert not outcome.of("comm_open")


@pytest.mark.parametrize(
    "code",
    [
        "notebook_launch(train, 2, kwargs={'steps': 120}, monitor=False)",
        "%%capture\nnotebook_launch(train, 2, kwargs={'steps': 120})",
    ],
)
def test_no_monitor_is_shown_when_it_is_off(kernel: Kernel, code: str) -> None:
    outcome = executed(kernel, code)
    assert not outcome.displays
    assert not outcome.of("comm_open")


def test_line_of_progress_appears_if_no_page_answers(kernel: Kernel) -> None:
    """A page that cannot draw widgets: progress as text, and no dead widget in the end."""
    outcome = executed(kernel, "notebook_launch(train, 2, kwargs={'steps': 550})")
    assert views(outcome)
    lines = [content["data"].get("text/plain", "") for content in outcome.of("display_data", "update_display_data")]
    assert any(line.startswith("train: ") and "/550, " in line and "loss" in line for line in lines), lines
    assert not any(WIDGET_VIEW in data for data in final(outcome).values())
    assert not outcome.of("comm_msg")
    assert "VS Code" not in outcome.stdout


def test_cell_of_vs_code_says_where_to_read_if_its_monitor_is_not_drawn(kernel: Kernel) -> None:
    cell = kernel.start(
        "notebook_launch(train, 2)", allow_stdin=True, metadata={"cellId": "vscode-notebook-cell:/a#W0"}
    )
    outcome = kernel.wait(cell, until=lambda outcome: "VS Code has not drawn" in outcome.stdout or outcome.done)
    assert "docs/how-to/vscode-and-colab.md" in outcome.stdout
    kernel.interrupt()
    kernel.wait(cell)


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
    assert "no monitor: ModuleNotFoundError" in outcome.stderr
    assert outcome.stdout.endswith("None\n")
