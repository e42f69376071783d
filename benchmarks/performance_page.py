"""Write `docs/performance.md` from the newest report of each program: `python benchmarks/performance_page.py`."""

from __future__ import annotations

import re
from pathlib import Path

from support import plots

RESULTS = Path(__file__).resolve().parent / "results"
PAGE = RESULTS.parents[1] / "docs" / "performance.md"
THEMES = (
    "launch",
    "kernel_imports",
    "large",
    "cluster",
    "step_overhead",
    "gpu",
    "gradient_sync",
    "comm_hooks",
    "sharding",
    "cells_on_ranks",
    "monitor",
    "growth",
)
"""The programs, in the order of the page; one without a report is left out."""
MACHINE = ("date", "processor", "GPU", "cores", "memory", "Python", "torch", "commit", "load before")
HEAD = """# Performance

Figures that the programs in `benchmarks/` measured, and nothing else: each section has the date, the machine, the
commit and the command of its run, and a figure belongs to its commit. `make bench` measures everything again and writes
this page; `python benchmarks/performance_page.py` writes it from the reports that are there. Only the section "On one
GPU" was measured on a GPU. In "Launching" the rows "notebook_launch" are from commits that kept ranks ready for a
launch like the last one; today's launches are those "unlike the one before".
"""


def main() -> None:
    """Write the page and its pictures."""
    for theme, path in newest().items():
        plots.draw(theme, path.read_text(encoding="utf-8"))
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written to {PAGE}")


def page() -> str:
    """Return the page."""
    sections = (section(theme, path.read_text(encoding="utf-8")) for theme, path in newest().items())
    return "\n".join([HEAD, *sections])


def newest() -> dict[str, Path]:
    """Return the newest report of each program that has one."""
    found = {theme: max(RESULTS.glob(f"{theme}_*.md"), key=measured_at, default=None) for theme in THEMES}
    return {theme: path for theme, path in found.items() if path is not None}


def measured_at(path: Path) -> str:
    """Return the date of a report."""
    return facts(path.read_text(encoding="utf-8"))["date"]


def facts(report: str) -> dict[str, str]:
    """Return the table of the machine."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]*) \|$", report.split("\nOne run of ", maxsplit=1)[0], re.MULTILINE)
    return {name.strip(): value.strip() for name, value in rows}


def section(theme: str, report: str) -> str:
    """Return a report as a section: its machine in a line, its headings one level lower, with their pictures."""
    title = report.splitlines()[0].removeprefix("# ")
    known = facts(report)
    machine = "; ".join(f"{name} {known[name]}" for name in MACHINE if name in known)
    run, body = report.split("\nOne run of ")[1].split("\n", 1)
    for heading, picture in plots.pictures(theme, report).items():
        body = body.replace(f"\n## {heading}\n", f"\n## {heading}\n\n{picture}\n", 1)
    return f"## {title}\n\nOne run of {run} ({machine})\n{re.sub(r'^##', '###', body, flags=re.MULTILINE)}"


if __name__ == "__main__":
    main()
