"""The first launches of a kernel, while its fork server is still doing its chores."""

from __future__ import annotations

import time

from support.measurements import LIMIT, Measurements
from support.process import Contender
from support.report import median, table

PAUSES = (0.05, 0.2, 0.5, 1.0, 3.0)
"""Seconds between two launches."""
COUNT = 10


def measure_first(found: Measurements, repeats: int) -> None:
    if not found.chosen(["ours"]):
        return
    for _ in range(repeats):
        for pause in PAUSES:
            with found.guarded("first", pause), Contender("ours", 2) as one:
                one.ask("prompt", timeout=LIMIT)
                for number in range(COUNT):
                    time.sleep(pause if number else 0)
                    found.add(one.ask("trivial", timeout=LIMIT)["seconds"], "first", pause, number)


def first_table(found: Measurements) -> str:
    rows = [
        [f"{pause:g} s", *(f"{1e3 * value:.0f}" for value in launches), f"{slowest(launches):.2f}"]
        for pause in PAUSES
        if (launches := first_launches(found, pause))
    ]
    numbers = [str(number) for number in range(1, COUNT + 1)]
    return (
        "## Ten launches from a cold kernel\n\nMilliseconds of each launch of 2 ranks, the first with the import of "
        "the package and the start of the fork server; medians over several kernels. The ratio compares the slowest "
        "launch after the first with the median of the ten.\n\n" + table(["pause", *numbers, "ratio"], rows)
    )


def first_launches(found: Measurements, pause: float) -> list[float]:
    """Return the median time of each of the ten launches; an empty list if they were not measured."""
    launches = [found.median("first", pause, number) for number in range(COUNT)]
    return [value for value in launches if value is not None]


def slowest(launches: list[float]) -> float:
    """Return the slowest launch after the first as a multiple of the median."""
    return max(launches[1:], default=0.0) / median(launches)
