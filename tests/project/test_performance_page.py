"""The page of measured figures: it is what the reports say, with a picture for the tables that have one."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program that writes the page."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("performance_page")


def test_page_is_written_from_the_reports(program: Any) -> None:
    page = program.page()
    assert program.PAGE.read_text(encoding="utf-8") == page, "run python benchmarks/performance_page.py"
    runs = re.findall(
        r"^One run of `python benchmarks/\w+\.py.*date \d{4}-\d\d-\d\d .*commit [0-9a-f]{7}", page, re.MULTILINE
    )
    assert len(runs) == page.count("\n## ")


def test_pictures_of_the_page_show_the_figures_of_their_tables(program: Any) -> None:
    linked = re.findall(r"\]\((pictures/performance/[^)]+)\)", program.page())
    assert len(linked) >= 10
    assert {f"pictures/performance/{path.name}" for path in program.plots.FOLDER.iterdir()} == set(linked)
    for theme, report in program.newest().items():
        for plot in program.plots.PLOTS:
            rows = program.plots.rows_under(report.read_text(encoding="utf-8"), plot.heading)
            if plot.theme == theme and rows and plot.columns:
                picture = plot.path.read_text(encoding="utf-8")
                values = [
                    program.plots.number(row[column])
                    for row in rows[1:]
                    for column in plot.columns
                    if column < len(row)
                ]
                shown = [f"{value:,g}" for value in values if value is not None]
                assert shown
                assert [value for value in shown if f"{value}</text>" not in picture] == []
