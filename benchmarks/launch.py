"""Measure launching side by side with other launchers: `python benchmarks/launch.py [--quick]`.

Every contender is a process of its own. Within a table all contenders are up at the same time and take turns, so
that a noisy moment affects all of them alike. If a contender cannot do something, its row has the reason.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from support.big import big_table, measure_big
from support.calls import launch_tables, measure_cold, measure_warm
from support.first import first_table, measure_first
from support.libraries import library_table, measure_libraries
from support.lives import death_table, idle_table, import_table, measure_deaths, measure_idle, measure_imports
from support.measurements import LABELS, Measurements, say
from support.process import adopt_orphans
from support.promises import promise_table
from support.report import machine, write

if TYPE_CHECKING:
    from collections.abc import Iterator

SECTIONS = ("launch", "libraries", "first", "big", "idle", "imports", "deaths")


def main() -> None:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 ranks only, few repeats, not written to results/")
    parser.add_argument("--write", action="store_true", help="write the report to results/ in any case")
    parser.add_argument("--repeats", type=int, help="warm launches of each contender (20; 5 with --quick)")
    parser.add_argument("--only", help=f"sections and contenders, with commas: {', '.join([*SECTIONS, *LABELS])}")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else []
    if unknown := [word for word in wanted if word not in (*SECTIONS, *LABELS)]:
        parser.error(f"unknown in --only: {', '.join(unknown)}")
    sections = [word for word in SECTIONS if word in wanted] or list(SECTIONS)
    only = [word for word in wanted if word in LABELS] or None
    found = Measurements(options.repeats or (5 if options.quick else 20), only)
    adopt_orphans()
    began = time.monotonic()
    head = f"# Launching, side by side\n\n{machine()}"
    command = " ".join(["python benchmarks/launch.py", *sys.argv[1:]])
    body: list[str] = []
    for part in measure(found, sections, quick=options.quick):
        print(part, flush=True)
        body.append(part)
        minutes = (time.monotonic() - began) / 60
        text = f"{head}\nOne run of `{command}`, {minutes:.0f} minutes.\n\n" + "\n".join(body)
        if options.write or (not options.quick and not wanted):
            say(f"written to {write('launch', text)}")


def measure(found: Measurements, sections: list[str], *, quick: bool) -> Iterator[str]:
    """Measure these sections; yield each table when it is ready."""
    counts, few = ([2] if quick else [1, 2, 4, 8]), (1 if quick else 3)
    for section in sections:
        say(section)
        match section:
            case "launch":
                for count in counts:
                    measure_cold(found, count, few)
                    measure_warm(found, count)
                yield launch_tables(found, counts)
            case "libraries":
                measure_libraries(found, few)
                yield library_table(found)
            case "first":
                measure_first(found, few)
                yield first_table(found)
            case "big":
                measure_big(found, few)
                yield big_table(found)
            case "idle":
                measure_idle(found)
                yield idle_table(found)
            case "imports":
                measure_imports(found, 2 * few + 1)
                yield import_table(found)
            case "deaths":
                measure_deaths(found, few)
                yield death_table(found)
    yield promise_table(found)


if __name__ == "__main__":
    main()
