"""The table of kept runs: its rows, and what the page asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher import RecordedRun, runs
from notebook_launcher.widgets.runs.runs_table import RunsTable
from tests.support.toy_runs import make_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def table(home: Path) -> Iterator[RunsTable]:
    for number in range(3):
        make_run(home, number, config={"tags": [f"tag {number}"]})
    made = RunsTable(runs(home))
    yield made
    layout = made.layout
    made.close()
    layout.close()


def ask(table: RunsTable, kind: str, *ids: str, **content: Any) -> str:
    table._receive({"type": kind, "ids": list(ids), **content})
    answer: str = table.answer
    return answer


def test_rows_have_what_the_page_filters_and_sorts_by(table: RunsTable, home: Path) -> None:
    assert [row["id"] for row in table.rows] == [run.id for run in runs(home)]
    assert {tag for row in table.rows for tag in row["tags"]} == {"tag 0", "tag 1", "tag 2"}
    assert [row["order"]["disk"] for row in table.rows] == [run.size for run in runs(home)]
    assert table.caption == f"3 runs in {home}"


def test_deleted_runs_leave_the_disk_and_the_table(table: RunsTable, home: Path) -> None:
    first, second, third = [row["id"] for row in table.rows]
    assert ask(table, "delete", first, second, "unknown").startswith("2 deleted, ")
    assert [row["id"] for row in table.rows] == [third]
    assert [run.id for run in runs(home)] == [third]


def test_edits_are_written_to_the_folder(table: RunsTable, home: Path) -> None:
    name = table.rows[0]["id"]
    assert ask(table, "edit", name, name="best", tags="a, b,", notes="keep") == "best: saved"
    kept = RecordedRun(home / name)
    assert (kept.name, kept.tags, kept.notes) == ("best", ("a", "b"), "keep")
    assert table.rows[0]["name"] == "best"
    assert "is not a name" in ask(table, "edit", name, name="", tags="", notes="")


def test_selected_runs_are_compared(table: RunsTable) -> None:
    ask(table, "compare", *(row["id"] for row in table.rows))
    assert "3 runs compared" in table.compared
    ask(table, "compare")
    assert table.compared == ""


def test_list_without_a_front_end_is_a_table_of_html(home: Path) -> None:
    make_run(home, 1)
    with pytest.raises(NotImplementedError, match="no front end draws widgets here"):
        runs(home)._ipython_display_()
    assert "<table" in runs(home)._repr_html_()
