"""Measure the time that an Accelerator adds to each micro-batch: `python benchmarks/step_overhead.py`.

The model is so small that only the work of the loop itself counts. The loops run in one process and on two ranks, as
plain processes and in a launch, which also receives the phases of each step.
"""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING, Any

import psutil
from support.links import LINKS, connected
from support.measurements import Measurements, say
from support.overhead_rank import BATCH_SIZE, STEPS, WINDOWS, measure_all
from support.process import FailedError, settle
from support.program import LABELS as EVERYWHERE
from support.program import parse, publish
from support.ranks import reports
from support.report import median, table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator

LABELS = {
    **{name: label for name, label in EVERYWHERE.items() if name in ("hand", "ours", "accelerate")},
    "unchecked": "notebook_launcher, check_ranks=False",
}
REPEATS, QUICK_REPEATS = {"list": 100, "loader": 16}, {"list": 20, "loader": 4}
LIMIT = 20.0
"""Largest time that an Accelerator may add to a loop over a list, in microseconds."""
LOADER_LIMITS = {("plain", 1): 10.0, ("plain", 2): 20.0, ("launch", 1): 10.0, ("launch", 2): 25.0}
"""Largest time that it may add with its own loader, by place and number of ranks."""
PLACES = {"plain": "Plain processes", "launch": "In a launch"}
SOURCES = {"list": "", "loader": ", with its loader"}
QUIET = 120.0


def main() -> None:
    """Measure, print and write the report."""
    options = parse(__doc__, contenders=tuple(LABELS))
    publish("step_overhead", "What a micro-batch costs besides its model", options, measure_everything(options))


def measure_everything(options: argparse.Namespace) -> Iterator[str]:
    """Measure both places; yield their tables and the promises."""
    repeats = QUICK_REPEATS if options.quick else REPEATS
    if options.repeats:
        repeats = dict.fromkeys(STEPS, options.repeats)
    found = Measurements(0, None)
    yield introduction(repeats)
    for place, label in PLACES.items():
        for num_ranks in (1, 2):
            say(f"{label.lower()}, {_processes(num_ranks)}")
            with found.guarded(place, num_ranks):
                for row in run(place, num_ranks, options.only, repeats):
                    keep(found, row, place, num_ranks)
        yield place_table(found, place, options.only)
    yield promise_table(found)


def introduction(repeats: dict[str, int]) -> str:
    """Return the description of the tables."""
    return (
        f"A linear model of 8 inputs, SGD and batches of {BATCH_SIZE}. Each contender takes {repeats['list']} turns of "
        f"{STEPS['list']} micro-batches; *with its loader*, {repeats['loader']} turns of {STEPS['loader']} batches "
        "from the contender's own loader, its start included. Microseconds per micro-batch: medians of the turns. "
        "*Adds*: the median (quartiles) of the differences from the loop by hand in the same round, which on two ranks "
        "has the same all-reduce; *busy*: these differences in the processor time of the thread that trains, which "
        "excludes waiting for the other rank.\n"
    )


def keep(found: Measurements, row: dict[str, Any], place: str, num_ranks: int) -> None:
    """Keep a row of a rank."""
    if "failed" in row:
        found.reasons[place, num_ranks, row["name"]] = row["failed"]
        say(f"  {row['name']}: {row['failed']}")
        return
    for what in ("wall", "busy"):
        found.samples[place, num_ranks, row["window"], row["source"], row["name"], what] = row[what]


def run(place: str, num_ranks: int, names: list[str], repeats: dict[str, int]) -> Iterable[dict[str, Any]]:
    """Yield the rows of `measure` on rank 0."""
    if place == "plain":
        with connected(LINKS["node"]) as network:
            spec = {"names": names, "repeats": repeats}
            yield from reports(network, "overhead_rank.py", spec, limit=QUIET, world_size=num_ranks)
        return
    from notebook_launcher import notebook_launch, prewarm

    try:
        prewarm()
        # The launcher postpones some work until it is idle.
        settle(lambda: psutil.Process().children(recursive=True))
        options: dict[str, Any] = {"output": "none", "threads_per_process": 1}
        yield from notebook_launch(measure_all, num_ranks, args=(names, repeats), **options)[0]
    except Exception as error:
        raise FailedError(f"{type(error).__name__}: {error}") from error


def place_table(found: Measurements, place: str, names: list[str]) -> str:
    """Return the table of the plain processes or of the launches."""
    rows, notes = [], []
    for num_ranks in (1, 2):
        notes += [
            f"{_processes(num_ranks)}{', ' + LABELS[key[2]] if len(key) > 2 else ''}: {reason}\n\n"
            for key, reason in found.reasons.items()
            if key[:2] == (place, num_ranks)
        ]
        for source, words in SOURCES.items():
            for window in WINDOWS:
                key = (place, num_ranks, window, source)
                cells = [_cell(found.samples.get((*key, name, "wall"))) for name in names]
                for name in names:
                    if name != "hand":
                        cells += [_spread(added(found, key, name, what)) for what in ("wall", "busy")]
                rows.append([f"{_processes(num_ranks)}, windows of {window}{words}", *cells])
    head = ["", *(LABELS[name] for name in names)]
    for name in names:
        if name != "hand":
            head += [f"{LABELS[name]} adds", "busy"]
    return f"## {PLACES[place]}\n\n{''.join(notes)}{table(head, rows)}"


def added(found: Measurements, key: tuple[Any, ...], name: str, what: str) -> list[float] | None:
    """Return the differences between a contender's turns and the turns by hand in the same rounds."""
    mine, by_hand = found.samples.get((*key, name, what)), found.samples.get((*key, "hand", what))
    if mine is None or by_hand is None:
        return None
    return [one - other for one, other in zip(mine, by_hand, strict=True)]


def promise_table(found: Measurements) -> str:
    """Return the table of the promises of an Accelerator, with the measured figures."""
    rows = []
    for (place, label), num_ranks, source, window in itertools.product(PLACES.items(), (1, 2), SOURCES, WINDOWS):
        # On two ranks the time of waiting varies by more than the time to be measured.
        what = "wall" if num_ranks == 1 else "busy"
        values = added(found, (place, num_ranks, window, source), "ours", what)
        limit = LIMIT if source == "list" else LOADER_LIMITS[place, num_ranks]
        text = f"{label.lower()}, {_processes(num_ranks)}, windows of {window}{SOURCES[source]}: adds <= {limit:.0f} us"
        text += " of processor time" if what == "busy" else ""
        held = "-" if values is None else ("yes" if median(values) <= limit else "**no**")
        rows.append([text, "not measured" if values is None else f"{median(values):.1f} us", held])
    return "## Promises\n\nMedians.\n\n" + table(["promise", "measured", "held"], rows)


def _processes(num_ranks: int) -> str:
    return "1 process" if num_ranks == 1 else f"{num_ranks} ranks"


def _cell(values: list[float] | None) -> str:
    return "-" if values is None else f"{median(values):.1f}"


def _spread(values: list[float] | None) -> str:
    if values is None:
        return "-"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.1f} ({low:.0f}-{high:.0f})"


if __name__ == "__main__":
    main()
