"""Measure how costs grow with ranks, rows, steps, parameters and runs: `python benchmarks/growth.py`.

Each figure is fitted by size ** exponent over its three largest sizes. Work that is proportional to the size has an
exponent of 1 at most, what should be constant of 0.1.
"""

from __future__ import annotations

import concurrent.futures
import math
import multiprocessing
from typing import TYPE_CHECKING, NamedTuple

from support.growths import measure
from support.measurements import say
from support.program import parse, publish
from support.report import table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

RANKS = (1, 2, 4, 8, 16, 32, 64)
PROPORTIONAL, CONSTANT = 1.0, 0.1
NOISE = 0.05
"""Error that one run may make in an exponent."""
LIMIT = 900.0
"""Longest time of a figure, in seconds."""


class Growth(NamedTuple):
    """A cost that is measured at several sizes."""

    title: str
    sizes: tuple[int, ...]
    quick: tuple[int, ...]
    limits: dict[str, float | None]
    """The largest exponent of each figure; None for one that stands beside ours."""


GROWTHS = {
    "launch": Growth(
        "a warm launch, by ranks; by hand a fork and gloo's group, which connects each pair of ranks", RANKS, (1, 2, 4),
        {"ms": None, "by hand ms": None, "ours / by hand": CONSTANT},
    ),
    "call": Growth("a session's call, by ranks", RANKS, (1, 2, 4), {"ms": PROPORTIONAL}),
    "output": Growth("1,000 lines of each rank, by ranks", RANKS, (1, 2, 4), {"ms": PROPORTIONAL}),
    "monitor": Growth(
        "the monitor's messages, by ranks", RANKS, (1, 2, 4), {"first ms": PROPORTIONAL, "later us": PROPORTIONAL}
    ),
    "accumulation": Growth(
        "a micro-batch in windows of 4 on rank 0, alone on its core, by ranks", RANKS[1:], (2, 4),
        {"by hand us": None, "added us": CONSTANT},
    ),
    "printed": Growth(
        "lines that a rank prints, of which 64 MB are kept",
        (10**3, 10**5, 4 * 10**6, 10**7, 2 * 10**7), (10**3, 10**4),
        {"ms": PROPORTIONAL, "kernel MB": CONSTANT, "folder MB": CONSTANT},
    ),
    "reports": Growth(
        "steps that a rank reports, of which a million are kept", (10**4, 10**6, 3 * 10**6, 10**7), (10**3, 10**4),
        {"ms": PROPORTIONAL, "kernel MB": CONSTANT, "folder MB": CONSTANT},
    ),
    "rows": Growth(
        "shuffled rows of a data set", (10**2, 10**4, 10**6, 10**7, 10**8), (10**2, 10**4, 10**6),
        {"first ms": PROPORTIONAL, "batch us": CONSTANT, "MB": PROPORTIONAL},
    ),
    "parameters": Growth(
        "parameter tensors, windows of 2, clipped", (10**2, 10**3, 10**4, 10**5), (10**2, 10**3),
        {"by hand us": None, "ours us": None, "ours / by hand": CONSTANT},
    ),
    "runs_listed": Growth("runs in a folder", (10, 100, 1000), (10, 100), {"ms": PROPORTIONAL}),
}  # fmt: skip


def main() -> None:
    """Measure, print and write the report."""
    options = parse(__doc__, contenders=tuple(GROWTHS))
    publish("growth", "How costs grow", options, measure_everything(options))


def measure_everything(options: argparse.Namespace) -> Iterator[str]:
    """Yield a table for each cost."""
    yield (
        "Each size has a process of its own. *Exponent*: of size ** exponent, fitted over the three largest sizes; "
        f"proportional work may have {PROPORTIONAL:.0f}, constant cost {CONSTANT}, and {NOISE} more is noise.\n"
    )
    for name in options.only:
        growth = GROWTHS[name]
        say(growth.title)
        found = [(size, in_a_process(name, size)) for size in (growth.quick if options.quick else growth.sizes)]
        yield growth_table(growth, found)


def in_a_process(name: str, size: int) -> dict[str, float]:
    """Return the figures of one size, measured in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return pool.submit(measure, name, size).result(timeout=LIMIT)


def growth_table(growth: Growth, found: list[tuple[int, dict[str, float]]]) -> str:
    """Return the table of a cost: a row for each figure, a column for each size."""
    rows = []
    for figure, limit in growth.limits.items():
        values = [figures[figure] for _, figures in found]
        grows = exponent([size for size, _ in found], values)
        held = ["-", "-"] if limit is None else [f"{limit}", "yes" if grows <= limit + NOISE else "**no**"]
        rows.append(
            [figure, *(f"{value:,.{1 if max(values) >= 10 else 2}f}" for value in values), f"{grows:.2f}", *held]
        )
    sizes = [f"{size:,}" for size, _ in found]
    return f"## {growth.title.capitalize()}\n\n" + table(["", *sizes, "exponent", "limit", "held"], rows)


def exponent(sizes: list[int], values: list[float]) -> float:
    """Return the slope of the logarithms over the three largest sizes."""
    x, y = ([math.log(number) for number in numbers[-3:]] for numbers in (sizes, values))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((value - mean_x) ** 2 for value in x)
    return sum((value - mean_x) * (other - mean_y) for value, other in zip(x, y, strict=True)) / spread


if __name__ == "__main__":
    main()
