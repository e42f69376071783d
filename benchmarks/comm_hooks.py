"""Measure the gain and the cost of compressed gradients: `python benchmarks/comm_hooks.py`.

torch's communication hooks on the links of `gradient_sync.py`, with gradients synchronised once per window; and the
loss after the same number of updates on the same data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.courses import cell, problem, run_loss, run_time
from support.links import LINKS
from support.measurements import Measurements
from support.program import LABELS, parse, publish
from support.report import median, milliseconds, table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

HOOKS = {"no": "none", "fp16": "fp16", "bf16": "bf16", "power_sgd": "power_sgd, rank 4"}
BATCHES, QUICK_BATCHES = 29, 9
REPEATS = {"node": 5, "1gbit": 5, "100mbit": 3}
EVEN_BATCHES, EPOCHS = 28, 12
"""The loss is measured after 84 updates. Every window is full, so that all contenders use the same mean gradients."""


def main() -> None:
    """Measure, print and write the report."""
    options = parse(__doc__, links=list(LINKS))
    publish("comm_hooks", "Communication hooks, side by side", options, measure(options))


def measure(options: argparse.Namespace) -> Iterator[str]:
    """Measure link by link, then the losses."""
    found = Measurements(0, None)
    contenders = [(name, hook) for hook in HOOKS for name in options.only]
    for link in options.links:
        found.repeats = options.repeats or (1 if options.quick else REPEATS[link])
        batches = QUICK_BATCHES if options.quick else BATCHES
        run_time(found, link, contenders, batches=batches, all_variants=False)
        yield link_tables(found, link, options.only)
    run_loss(found, contenders, batches=EVEN_BATCHES, epochs=1 if options.quick else EPOCHS)
    yield loss_table(found, options.only, 7 * (1 if options.quick else EPOCHS))


def link_tables(found: Measurements, link: str, names: list[str]) -> str:
    """Return a link's table: a row for each hook."""
    rows = []
    for hook, label in HOOKS.items():
        keys = {name: (link, name, hook, "no_sync" if name == "hand" else "accumulate") for name in names}
        times = [cell(found, "seconds", key, milliseconds) for key in keys.values()]
        sizes = [found.cell("bytes", *key, form=lambda values: f"{median(values) / 1e6:.2f}") for key in keys.values()]
        rows.append([label, *times, *sizes])
    head = ["hook", *(f"{LABELS[name]}: ms" for name in names), *(f"{LABELS[name]}: MB" for name in names)]
    return (
        f"## {LINKS[link].label[0].upper()}{LINKS[link].label[1:]}\n\n{problem(found, link)}"
        "Milliseconds per batch, and megabytes on the wire in a window of 4, both directions together.\n\n"
        + table(head, rows)
    )


def loss_table(found: Measurements, names: list[str], updates: int) -> str:
    """Return the table of final losses."""
    rows = [
        [label, *(found.cell("loss", name, hook, form=lambda values: f"{values[0]:.4f}") for name in names)]
        for hook, label in HOOKS.items()
    ]
    return (
        f"## Loss after {updates} updates\n\nOn held-out data; all models have the same data and first weights. A "
        f"perfect model's loss is 1.39, an untrained model's about 5.5.\n\n{problem(found, 'node')}"
        + table(["hook", *(LABELS[name] for name in names)], rows)
    )


if __name__ == "__main__":
    main()
