"""Measure the cost of synchronising accumulated gradients: `python benchmarks/gradient_sync.py`.

The four variants of the table in Accelerate's guide on gradient synchronisation, on one node and on two with a
cable of 1 Gbit/s and of 100 Mbit/s between them, which are network namespaces of this machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.courses import cell, problem, run_time
from support.links import LINKS
from support.measurements import Measurements
from support.program import LABELS, parse, publish
from support.report import median, milliseconds, table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

VARIANTS = {
    "baseline": "baseline",
    "mistake": "`no_sync` improperly",
    "no_sync": "`no_sync`",
    "accumulate": "`accumulate`",
}
BATCHES, QUICK_BATCHES = 29, 9
REPEATS = {"node": 9, "1gbit": 7, "100mbit": 3}
NOISE = 1.02
"""Ratio up to which two times count as equal."""
GAIN = 2.2
"""The documented gain of two nodes: 2 s per batch against 0.91 s."""


def main() -> None:
    """Measure, print and write the report."""
    options = parse(__doc__, links=list(LINKS))
    publish("gradient_sync", "Gradient synchronisation, side by side", options, measure(options))


def measure(options: argparse.Namespace) -> Iterator[str]:
    """Measure link by link; yield the tables of each link, and then the promises."""
    found = Measurements(0, None)
    batches = QUICK_BATCHES if options.quick else BATCHES
    yield introduction(batches)
    for link in options.links:
        found.repeats = options.repeats or (1 if options.quick else REPEATS[link])
        run_time(found, link, [(name, "no") for name in options.only], batches=batches, all_variants=True)
        yield link_tables(found, link, options.only)
    yield promise_table(found, options.links)


def introduction(batches: int) -> str:
    """Return the description of the tables."""
    return (
        f"Two ranks of one thread each train the same transformer (3.3 million parameters, 13.2 MB of gradients) on "
        f"{batches} batches each, in windows of 4. *Baseline*: gradients are all-reduced in every micro-batch. "
        "*`no_sync` improperly*: only `backward` is in it. *`no_sync`*: forward and backward are, in all but the last "
        "micro-batch of a window. *`accumulate`*: with `Accelerator.accumulate`. The epochs of all contenders take "
        "turns in the same two processes.\n\nAccelerate's guide gives, in seconds per batch on two nodes with a T4 "
        "each, 2 / 2.13 / 0.91 / 0.91, and on one node with two 0.50 / 0.50 / 0.41 / 0.41.\n"
    )


def link_tables(found: Measurements, link: str, names: list[str]) -> str:
    """Return a link's tables: time, and traffic."""
    times, traffic = [], []
    for name in names:
        keys = [(link, name, "no", variant) for variant in VARIANTS if (name, variant) != ("hand", "accumulate")]
        gap = ["-"] * (len(VARIANTS) - len(keys))
        times.append([LABELS[name], *(cell(found, "seconds", key, milliseconds) for key in keys), *gap])
        traffic.append([LABELS[name], *(traffic_cell(found, key) for key in keys), *gap])
    head = ["loop", *VARIANTS.values()]
    rate = found.median("rate", link)
    measured = f"An all-reduce of 16 MB ran at {rate / 1e6:,.0f} Mbit/s in each direction.\n\n" if rate else ""
    return (
        f"## {LINKS[link].label[0].upper()}{LINKS[link].label[1:]}\n\n{problem(found, link)}{measured}"
        f"Milliseconds per batch: median (quartiles).\n\n{table(head, times)}\n"
        "Traffic of a window of 4, both directions together, and how many times all gradients were all-reduced in "
        f"it.\n\n{table(head, traffic)}"
    )


def traffic_cell(found: Measurements, key: tuple[str, str, str, str]) -> str:
    """Return the bytes of a window and how often its gradients were all-reduced."""
    size = cell(found, "bytes", key, lambda values: f"{median(values) / 1e6:.1f} MB")
    reduced = gradients_reduced(found, key)
    return size if reduced is None else f"{size}, {reduced:.2f} x"


def gradients_reduced(found: Measurements, key: tuple[str, str, str, str]) -> float | None:
    """Return how many times a window's gradients were all-reduced, all of them together being one."""
    numbers, gradient = found.median("numbers", *key), found.median("gradient")
    return None if numbers is None or gradient is None else numbers / gradient


def promise_table(found: Measurements, links: list[str]) -> str:
    """Return the table of the promises of `accumulate`, with the measured figures."""
    rows = []
    for link in links:
        ours, label = (link, "ours", "no", "accumulate"), LINKS[link].label
        by_hand = ratio(found, ours, (link, "hand", "no", "no_sync"))
        theirs = ratio(found, ours, (link, "accelerate", "no", "accumulate"))
        once = gradients_reduced(found, ours)
        rows += [
            promise(f"{label}: `accumulate` <= 1.05 x `no_sync` by hand", by_hand, most=1.05),
            promise(f"{label}: not slower than accelerate's (<= {NOISE} x)", theirs, most=NOISE),
            # Beside the gradients, the weight of the window is reduced.
            promise(f"{label}: gradients are all-reduced once per window", once, least=1.0, most=1.001),
            promise(f"{label}: bytes on the wire within 5 % of theory", wire_ratio(found, ours), least=0.95, most=1.05),
        ]
        if link == "100mbit":
            gain = ratio(found, (link, "ours", "no", "baseline"), ours)
            rows.append(promise(f"{label}: `accumulate` gains {GAIN} x or more over its baseline", gain, least=GAIN))
    return "## Promises\n\nTimes are compared epoch by epoch, within a repeat; the median of the ratios.\n\n" + table(
        ["promise", "measured", "held"], rows
    )


def wire_ratio(found: Measurements, key: tuple[str, str, str, str]) -> float | None:
    """Return the bytes of a window over what two ranks must send, each all gradients once."""
    size, gradient = found.median("bytes", *key), found.median("gradient")
    return None if size is None or gradient is None else size / (2 * 4 * gradient)


def ratio(found: Measurements, mine: tuple[str, str, str, str], base: tuple[str, str, str, str]) -> float | None:
    """Return the median of one's time over another's in the same repeat."""
    pairs = zip(found.samples.get(("seconds", *mine), []), found.samples.get(("seconds", *base), []), strict=False)
    ratios = [one / other for one, other in pairs]
    return median(ratios) if ratios else None


def promise(text: str, times: float | None, *, least: float = 0.0, most: float = float("inf")) -> list[str]:
    """Return a row that holds if `times` lies between the two."""
    if times is None:
        return [text, "not measured", "-"]
    return [text, f"{times:.3f} x", "yes" if least <= times <= most else "**no**"]


if __name__ == "__main__":
    main()
