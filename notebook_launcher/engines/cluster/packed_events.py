"""Events on their way from an agent to the kernel: packed, and many at once.

Training ranks cause the same few kinds many times a second: output, metrics, progress, phases. These travel as plain
tuples, because a pickled dataclass costs the kernel ten times as much. They are calm, as are the start of a rank and of
its call: they wait a moment for others. All other events are urgent: they go at once, behind calm events that wait.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any

from notebook_launcher.engines.events import FromRank, Output, Woken
from notebook_launcher.messaging import messages

if TYPE_CHECKING:
    from collections.abc import Iterable

    from notebook_launcher.engines.events import Event

__all__ = ["HeldEvents", "pack_event", "unpack_event"]

MIN_HOLD, MAX_HOLD = 0.05, 0.5
MESSAGES = 500
"""Messages of all nodes together that the kernel takes per second without effort, each with what was held."""
PACKED: tuple[type[Any], ...] = (messages.Metrics, messages.Progress, messages.Phases)
"""Records that are packed, whose first field is their time. A packed event begins with the place of its kind here."""
OUTPUT = len(PACKED)
NAMES = [tuple(field.name for field in dataclasses.fields(kind)) for kind in PACKED]
READERS = {kind: (number, operator.attrgetter(*NAMES[number])) for number, kind in enumerate(PACKED)}
SETTERS = [tuple(getattr(kind, name).__set__ for name in names) for kind, names in zip(PACKED, NAMES, strict=True)]
"""By kind: what sets each field of a frozen record, in half the time of its `__init__`."""
SPANS, SINCE = (NAMES[PACKED.index(messages.Phases)].index(name) for name in ("spans", "since"))


def pack_event(event: Event) -> Any:
    """Return an event as a plain tuple, if it is of a kind that comes often; else the event."""
    if isinstance(event, Output):
        return OUTPUT, event.rank, event.stream, event.data
    if isinstance(event, FromRank) and (reader := READERS.get(type(event.record))) is not None:
        number, read = reader
        return number, event.rank, *read(event.record)
    return event


def unpack_event(packed: tuple[Any, ...], offset: float) -> FromRank | Output:
    """Return the event that was packed, with its times in the kernel's, which is `offset` seconds ahead."""
    number, rank, *values = packed
    if number == OUTPUT:
        return Output(rank, *values)
    values[0] += offset
    if PACKED[number] is messages.Phases:
        values[SINCE] += offset
        values[SPANS] = tuple([(phase, start + offset, seconds) for phase, start, seconds in values[SPANS]])
    record = object.__new__(PACKED[number])
    for set_field, value in zip(SETTERS[number], values, strict=True):
        set_field(record, value)
    return FromRank(rank, record, [])


def _is_calm(packed: Any) -> bool:
    record = packed.record if isinstance(packed, FromRank) else packed
    return isinstance(record, (tuple, messages.RankStarted, messages.CallStarted))


class HeldEvents:
    """The events that an agent has not sent yet, in their order.

    Args:
        num_nodes: Number of nodes of the tree. The more nodes, the longer calm events wait for others: 50 ms on up to
            25 nodes, 0.25 s on 125.
    """

    def __init__(self, num_nodes: int = 1) -> None:
        self.hold = min(MAX_HOLD, max(MIN_HOLD, num_nodes / MESSAGES))
        """Seconds for which a calm event waits for others."""
        self._events: list[Any] = []
        self._due = float("inf")
        """Time at which they are to be sent."""

    def add(self, events: Iterable[Any], now: float, *, are_calm: bool = False) -> None:
        """Add events, or what carries them; with `are_calm` all may wait."""
        for event in events:
            if isinstance(event, Woken):
                continue
            packed = pack_event(event)
            self._events.append(packed)
            self._due = min(self._due, now + self.hold if are_calm or _is_calm(packed) else now)

    def next_due(self, now: float) -> float:
        """Return the seconds until there is something to send; infinity: nothing waits."""
        return max(0.0, self._due - now)

    def take(self) -> tuple[Any, ...]:
        """Return all events, and forget them."""
        taken, self._events, self._due = tuple(self._events), [], float("inf")
        return taken
