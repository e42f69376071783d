"""Common parts of the programs that measure training: options, and a report that is written part by part."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from support.measurements import say
from support.process import adopt_orphans
from support.report import machine, write

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LABELS = {
    "hand": "by hand",
    "ours": "notebook_launcher",
    "buckets": "notebook_launcher, bucket_cap_mb=1",
    "accelerate": "accelerate",
}
"""Contenders: a loop of torch alone, our Accelerator with three settings, and Hugging Face's."""


def parse(doc: str, *, links: Sequence[str] = (), contenders: Sequence[str] = tuple(LABELS)) -> argparse.Namespace:
    """Return the options: quick, write, repeats, only and, if the program has any, links; the last two as lists."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few batches and repeats, not written to results/")
    parser.add_argument("--write", action="store_true", help="write the report to results/ in any case")
    parser.add_argument("--repeats", type=int, help="number of turns of each contender")
    parser.add_argument("--only", help=f"contenders, with commas: {', '.join(contenders)}")
    if links:
        parser.add_argument("--links", help=f"links, with commas: {', '.join(links)}")
    options = parser.parse_args()
    options.partial = options.quick or options.only is not None or (bool(links) and options.links is not None)
    for name, known in {"only": list(contenders), **({"links": links} if links else {})}.items():
        wanted = (getattr(options, name) or ",".join(known)).split(",")
        if unknown := [word for word in wanted if word not in known]:
            parser.error(f"unknown in --{name}: {', '.join(unknown)}")
        setattr(options, name, [word for word in known if word in wanted])
    return options


def publish(theme: str, title: str, options: argparse.Namespace, parts: Iterable[str]) -> None:
    """Print each part when it is ready; in a full run, also write the report so far."""
    adopt_orphans()
    began = time.monotonic()
    head = f"# {title}\n\n{machine()}"
    command = " ".join([f"python benchmarks/{theme}.py", *sys.argv[1:]])
    body: list[str] = []
    for part in parts:
        print(part, flush=True)
        body.append(part)
        minutes = (time.monotonic() - began) / 60
        text = f"{head}\nOne run of `{command}`, {minutes:.0f} minutes.\n\n" + "\n".join(body)
        if options.write or not options.partial:
            say(f"written to {write(theme, text)}")
