"""Memory and load of a run's ranks as curves, so that every view draws them as it draws metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher.history.curves import Curves
from notebook_launcher.history.schema import MetricPoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from notebook_launcher.history.schema import RankUsage

__all__ = ["FEWEST", "usage_curves", "usage_points"]

FEWEST = 3
"""Samples of a rank from which a picture of them is drawn."""
CURVES = (
    ("memory, GB", "memory", 1e9),
    ("load, processors", "load", 1.0),
    ("GPU memory, GB", "gpu_memory", 1e9),
    ("GPU load, %", "gpu_utilization", 0.01),
)
"""Name of each curve, its column, and what one of its unit is in the unit of the column."""


def usage_points(usage: Mapping[int, RankUsage], after: Mapping[int, float] | None = None) -> Iterator[MetricPoint]:
    """Yield the samples as points of curves, each rank's in order.

    Args:
        usage: The samples by rank.
        after: By rank the time, in seconds since the launch, of the last sample that is left out.
    """
    for rank, samples in sorted(usage.items()):
        since = (after or {}).get(rank, -1.0)
        for at, time in enumerate(samples.times):
            if time > since:
                read = ((name, getattr(samples, column)[at], unit) for name, column, unit in CURVES)
                values = {name: value / unit for name, value, unit in read if value is not None}
                yield MetricPoint(rank=rank, step=round(time), time=time, values=values)


def usage_curves(usage: Mapping[int, RankUsage]) -> Curves:
    """Return memory and load as curves; empty if no rank has enough samples."""
    curves = Curves()
    if any(len(samples.times) >= FEWEST for samples in usage.values()):
        curves.fold(usage_points(usage))
    return curves
