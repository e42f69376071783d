"""Charts of a run: which metrics share one, and what stands on its horizontal axis."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from notebook_launcher.history.curves import Curve, Curves

AxisKind = Literal["step", "time", "epoch"]
AXES: tuple[AxisKind, ...] = ("step", "time", "epoch")
MAX_STEP = 10**15
"""Largest step; a picture cannot show larger steps apart, so they count as this one."""

_PART = "train|training|val|valid|validation|eval|evaluation|test|dev"
_FIRST = re.compile(rf"({_PART})[/_](.+)", re.IGNORECASE)
_LAST = re.compile(rf"(.+)[/_]({_PART})", re.IGNORECASE)
_EPOCHS = re.compile(r"(.*/)?epochs?", re.IGNORECASE)

if TYPE_CHECKING:
    Places = Callable[[Curve], list[tuple[float, float]]]
else:
    Places = "Places"
"""Returns the points of a curve as (place on the axis, value)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chart:
    """Metrics that are drawn in one plot: one, or the same quantity of several parts of the data."""

    title: str
    members: tuple[tuple[str, str], ...]
    """(part, name of the metric): `("train", "train/loss")`."""


def split_name(name: str) -> tuple[str, str]:
    """Return the quantity and the part of the data that a name is about: loss and train of `train/loss`."""
    if first := _FIRST.fullmatch(name):
        return first[2], first[1]
    if last := _LAST.fullmatch(name):
        return last[1], last[2]
    return name, ""


def charts_of(names: Iterable[str], *, grouped: bool) -> list[Chart]:
    """Return the charts of metrics, in the order in which their first members appear.

    Args:
        names: Names of the metrics.
        grouped: True if `train/loss` and `val/loss` share a chart.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        quantity, part = split_name(name) if grouped else (name, "")
        groups.setdefault(quantity, []).append((part or name, name))
    # A name alone in its group is shown whole.
    return [
        Chart(quantity if len(members) > 1 else members[0][1], tuple(members)) for quantity, members in groups.items()
    ]


def places_on(axis: AxisKind, curves: Curves) -> Places:
    """Return what places the points of these curves on an axis."""
    if axis == "step":
        return by_step
    place = place_of(axis, curves)
    return lambda curve: [(place(time), float(value)) for _, value, time in curve.timed_points()]


def by_step(curve: Curve) -> list[tuple[float, float]]:
    """Return the points of a curve as (step, value)."""
    return [(min(max(step, -MAX_STEP), MAX_STEP), float(value)) for step, value in curve.points()]


def place_of(axis: AxisKind, curves: Curves) -> Callable[[float], float]:
    """Return a function that places a time, in seconds since the launch, on an axis of time or of epochs.

    Epochs come from a metric that counts them, such as `epoch`; without one, they are seconds.
    """
    counting = next(filter(is_epoch, curves.names), None)
    if axis != "epoch" or counting is None:
        return lambda time: time
    ranks = curves[counting]
    changes = _epoch_changes(ranks[min(ranks)])
    return lambda time: _epoch_at(changes, time) if changes else time


def is_epoch(name: str) -> bool:
    """Return True if a metric of this name counts epochs: `epoch`, `train/epochs`."""
    return _EPOCHS.fullmatch(name) is not None


def _epoch_changes(counted: Curve) -> list[tuple[float, float]]:
    """Return (time, epoch) of the first report of each epoch."""
    points = [(time, value) for _, value, time in counted.timed_points() if value == value]  # noqa: PLR0124 - not NaN
    return [point for at, point in enumerate(points) if not at or point[1] != points[at - 1][1]]


def _epoch_at(changes: Sequence[tuple[float, float]], time: float) -> float:
    """Return the epoch at a time; epochs before the first and after the last change are as long as their neighbours."""
    if len(changes) == 1:
        return changes[0][1]
    pairs = list(itertools.pairwise(changes))
    before, after = next((pair for pair in pairs if pair[1][0] > time), pairs[-1])
    per_second = (after[1] - before[1]) / max(after[0] - before[0], 1e-9)
    epoch = before[1] + (time - before[0]) * per_second
    return min(max(epoch, changes[0][1] - 1), changes[-1][1] + 1)
