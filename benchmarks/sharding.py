"""Measure what sharding a model saves and costs on 4 ranks: `python benchmarks/sharding.py`.

A transformer with AdamW, by DistributedDataParallel, by a hand-written `fully_shard` loop, by our Accelerator and by
Hugging Face's: the memory of a rank, the time of an update, and the bytes that a rank sends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from support.links import LINKS, connected
from support.measurements import Measurements, say
from support.process import FailedError
from support.program import parse, publish
from support.ranks import reports
from support.report import median, megabytes, table

from notebook_launcher.processes.libraries import TENSORS_IN_HUGE_PAGES

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

LABELS = {
    "ddp": "DDP by hand",
    "hand": "fully_shard by hand",
    "huge": "the same, large tensors in huge pages",
    "ours": "notebook_launcher",
    "accelerate": "accelerate",
}
ENVIRONMENTS = {"huge": TENSORS_IN_HUGE_PAGES, "ours": TENSORS_IN_HUGE_PAGES}
"""By contender: variables of its ranks. Ours has the one that each launch sets; `huge` is what it brings by itself."""
NUM_RANKS = 4
FULL = {"width": 1024, "num_layers": 10, "window": 2, "num_windows": 3}
QUICK = {"width": 256, "num_layers": 4, "window": 2, "num_windows": 3}
QUIET = 800.0
LARGEST_SHARE = 0.35
"""Largest memory of a rank, as a share of DDP's."""
TOLERANCE = 1.05
"""Largest memory and time, as a share of the hand-written loop's."""


def main() -> None:
    """Measure, print and write the report."""
    options = parse(__doc__, contenders=tuple(LABELS))
    publish("sharding", "What sharding a model saves and costs", options, measure(options))


def measure(options: argparse.Namespace) -> Iterator[str]:
    """Measure each contender `--repeats` times (1), in turns; yield the tables."""
    shape = QUICK if options.quick else FULL
    found = Measurements(0, None)
    sizes: dict[str, int] = {}
    for _ in range(options.repeats or 1):
        for name in options.only:
            say(LABELS[name])
            with found.guarded(name), connected(LINKS["node"]) as network:
                (row,) = reports(
                    network,
                    "sharding_rank.py",
                    {"name": name, **shape},
                    limit=QUIET,
                    world_size=NUM_RANKS,
                    more=ENVIRONMENTS.get(name, {}),
                )
                if "failed" in row:
                    raise FailedError(row["failed"])
                sizes = row["ranks"][0]["sizes"]
                keep(found, name, row["ranks"])
    yield introduction(shape, sizes)
    yield memory_table(found, options.only)
    yield wire_table(found, options.only, sizes, shape["window"])
    yield promise_table(found)


def keep(found: Measurements, name: str, ranks: list[dict[str, Any]]) -> None:
    """Keep the figures of a run: memory of the largest rank, times and bytes of rank 0."""
    for what in ("preparing", "training"):
        found.samples.setdefault((name, what), []).append(max(rank[what] for rank in ranks))
    for what in ("seconds", "busy", "sent"):
        found.samples.setdefault((name, what), []).extend(ranks[0][what])


def introduction(shape: dict[str, int], sizes: dict[str, int]) -> str:
    """Return the description of the tables."""
    return (
        f"A transformer of {shape['num_layers']} layers of width {shape['width']}, {megabytes(sum(sizes.values()))} MB "
        f"of fp32 parameters, with AdamW on {NUM_RANKS} ranks (CPU, gloo, plain processes; ours with the variable of a "
        "launch that puts large tensors into huge pages), in windows of "
        f"{shape['window']} micro-batches of 128 tokens. *Memory* is the largest resident memory of the rank with the "
        "most, less what it had before its model; *preparing* ends before the first forward. Every rank builds the "
        "whole model first. Times and bytes are of the windows after the first; "
        "*busy* is the processor time of a rank, which other work on the machine affects less.\n"
    )


def memory_table(found: Measurements, names: list[str]) -> str:
    """Return the table of memory and time."""
    rows = []
    for name in names:
        if (name, "training") not in found.samples:
            rows.append([LABELS[name], found.reasons.get((name,), "not measured"), *[""] * 6])
            continue
        training = middle(found, name, "training")
        rows.append([
            LABELS[name],
            megabytes(middle(found, name, "preparing")),
            megabytes(training),
            share(training, found, "ddp", "training"),
            f"{middle(found, name, 'seconds'):.2f}",
            share(middle(found, name, "seconds"), found, "hand", "seconds"),
            f"{middle(found, name, 'busy'):.2f}",
            share(middle(found, name, "busy"), found, "hand", "busy"),
        ])  # fmt: skip
    head = [
        "",
        "preparing, MB",
        "training, MB",
        "of DDP's",
        "seconds per window",
        "of fully_shard by hand",
        "busy",
        "of it by hand",
    ]
    return "## Memory and time\n\n" + table(head, rows)


def wire_table(found: Measurements, names: list[str], sizes: dict[str, int], window: int) -> str:
    """Return the table of bytes that a rank sends in a window, with the theory of ring collectives."""
    whole, blocks = sum(sizes.values()), sizes.get("blocks", 0)
    part = (NUM_RANKS - 1) / NUM_RANKS
    # The root's parameters stay after the forward; the blocks' are gathered again for the backward.
    sharded = part * window * (2 * blocks + (whole - blocks) + whole)
    theory = dict.fromkeys(LABELS, sharded) | {"ddp": 2 * part * whole}
    rows = [
        [
            LABELS[name],
            megabytes(middle(found, name, "sent")),
            megabytes(theory[name]),
            f"{middle(found, name, 'sent') / theory[name]:.2f}",
        ]
        for name in names
        if (name, "sent") in found.samples
    ]
    return (
        "## Bytes that a rank sends in a window\n\n"
        "Measured on the loopback, with the headers of TCP and acknowledgements. Theory: each rank sends (n - 1) / n "
        "of the parameters in an all-gather or a reduce-scatter, and twice that in an all-reduce. DDP reduces once in "
        "a window; a sharded model gathers its blocks twice and reduces once in each micro-batch. An "
        "all-reduce in the place of each reduce-scatter, of which a rank keeps its part, would send 1.33 of this "
        "theory, and gloo sends that.\n\n" + table(["", "measured, MB", "theory, MB", "of theory"], rows)
    )


def promise_table(found: Measurements) -> str:
    """Return the table of the promises, with the measured figures."""
    goals = [
        (f"memory at most {LARGEST_SHARE} of DDP's", "training", "ddp", LARGEST_SHARE),
        ("memory within 5 % of fully_shard by hand", "training", "hand", TOLERANCE),
        ("time within 5 % of fully_shard by hand", "seconds", "hand", TOLERANCE),
        ("processor time within 5 % of fully_shard by hand", "busy", "hand", TOLERANCE),
    ]
    rows = []
    for text, what, other, limit in goals:
        if ("ours", what) in found.samples and (other, what) in found.samples:
            value = middle(found, "ours", what) / middle(found, other, what)
            rows.append([text, f"{value:.3f}", "yes" if value <= limit else "**no**"])
        else:
            rows.append([text, "not measured", "-"])
    return "## Promises\n\n" + table(["promise", "measured", "held"], rows)


def middle(found: Measurements, name: str, what: str) -> float:
    """Return a contender's median."""
    return median(found.samples[name, what])


def share(value: float, found: Measurements, name: str, what: str) -> str:
    """Return a figure as a share of another contender's."""
    return f"{value / middle(found, name, what):.2f}" if (name, what) in found.samples else "-"


if __name__ == "__main__":
    main()
