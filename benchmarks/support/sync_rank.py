"""A rank of `gradient_sync.py` and `comm_hooks.py`: trains, and reports times and traffic.

Contenders and variants take turns within one pair of processes. Their order is rotated at each repeat, so that a
noisy moment affects all of them alike.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from support.loops import WINDOW, make_contender
from support.ranks import report, start_rank
from support.training import loss_of, make_data, make_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

TEST_SIZE = 4_000_000
"""Numbers in the all-reduce that measures a link's rate: 16 MB."""
HELD_OUT = 16
"""Batches for the final loss, on which no model is trained."""


def main() -> None:
    """Measure times or losses, as specified."""
    spec = start_rank()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if spec["job"] == "time":
        measure_time(spec)
    else:
        measure_loss(spec)
    dist.destroy_process_group()


def measure_time(spec: dict[str, Any]) -> None:
    wire = Wire(spec["interface"])
    gradient = sum(parameter.numel() for parameter in make_model().parameters())
    report(kind="link", rate=wire.measure_rate(), gradient=gradient)
    courses = [course for name, hook in spec["contenders"] for course in courses_of(name, hook, spec)]
    for course in courses:
        course.count()
    for turn in range(spec["repeats"]):
        first = turn % max(1, len(courses))
        for course in courses[first:] + courses[:first]:
            course.measure(wire)


def courses_of(name: str, hook: str, spec: dict[str, Any]) -> Iterator[Course]:
    """Yield a contender's courses, one for each of its variants."""
    with failure_reported(name=name, hook=hook, variant=None):
        contender = make_contender(name, hook)
        loaders = [contender.loader(count) for count in (WINDOW, spec["batches"])]
        for _ in range(2):
            # In these windows DistributedDataParallel orders its buckets, and PowerSGD begins.
            contender.best(loaders[0], WINDOW - 1)
        for variant in contender.variants:
            if spec["all_variants"] or variant == contender.variants[-1]:
                yield Course(name, hook, variant, contender, loaders)


class Course:
    """A contender's epochs in one variant."""

    def __init__(self, name: str, hook: str, variant: str, contender: Any, loaders: list[Any]) -> None:
        self._key = {"name": name, "hook": hook, "variant": variant}
        self._epoch = getattr(contender, variant)
        self._short, self._long = loaders
        self._failed = True

    def count(self) -> None:
        """Report the number of values that are all-reduced in one window."""
        with failure_reported(**self._key):
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
                self._epoch(self._short, WINDOW - 1)
            calls = [event.input_shapes for event in profiled.events() or () if event.name == "gloo:all_reduce"]
            report(kind="count", **self._key, sizes=[sum(map(math.prod, shapes)) for shapes in calls])
            self._failed = False

    def measure(self, wire: Wire) -> None:
        """Run one epoch, and report the seconds per batch and the bytes per full window."""
        if self._failed:
            return
        num_batches = len(self._long)
        num_full = num_batches // WINDOW
        dist.barrier()
        before = wire.count_bytes()
        begin = time.perf_counter()
        self._epoch(wire.marking(self._long, num_full * WINDOW), num_batches - 1)
        seconds = time.perf_counter() - begin
        report(kind="epoch", **self._key, seconds=seconds / num_batches, bytes=(wire.mark - before) / num_full)


class Wire:
    """The counters of an interface that carries the ranks' traffic and nothing else."""

    def __init__(self, interface: str) -> None:
        self._interface = interface
        self.mark = 0
        """The count of bytes at the batch that `marking` was given."""

    def count_bytes(self) -> int:
        """Return the transferred bytes, both directions together; over loopback each byte is both sent and received."""
        counts = psutil.net_io_counters(pernic=True, nowrap=False)[self._interface]
        return counts.bytes_sent + (counts.bytes_recv if self._interface != "lo" else 0)

    def marking(self, batches: Iterable[Any], after: int) -> Iterator[Any]:
        """Yield the batches, and read the counters after `after` of them."""
        for index, batch in enumerate(batches, start=1):
            yield batch
            if index == after:
                self.mark = self.count_bytes()

    def measure_rate(self) -> float:
        """Return the bits per second of one direction in an all-reduce; two ranks send as much as they receive."""
        data = torch.zeros(TEST_SIZE)
        dist.all_reduce(data)
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(data)
        return 32 * TEST_SIZE / (time.perf_counter() - begin)


def measure_loss(spec: dict[str, Any]) -> None:
    """Train each contender's model from the start, and report the loss on held-out data."""
    (held_out,) = make_data(HELD_OUT, 1, seed=2).tensors
    for name, hook in spec["contenders"]:
        with failure_reported(name=name, hook=hook):
            contender = make_contender(name, hook)
            loader = contender.loader(spec["batches"])
            for _ in range(spec["epochs"]):
                contender.best(loader, spec["batches"] - 1)
            with torch.no_grad():
                loss = float(loss_of(contender.model.module, held_out))
            report(kind="loss", name=name, hook=hook, loss=loss)


@contextlib.contextmanager
def failure_reported(**key: Any) -> Iterator[None]:
    """Report an exception as the reason in a contender's row."""
    try:
        yield
    except Exception as error:  # any exception is the answer
        report(kind="failed", **key, reason=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
