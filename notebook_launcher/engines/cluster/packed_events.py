"""Events on their way from an agent to the kernel: packed, and many at once.

Training ranks cause the same few kinds many times a second: output, metrics, progress, phases. Output travels as plain
tuples, because a pickled dataclass costs the kernel ten times as much, and the other three as `LiveRecords`. They are
calm, as are the start of a rank and of its call: they wait a moment for others. All other events are urgent: they go at
once, behind calm events that wait.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from notebook_launcher.engines.events import FromRank, Output, Woken
from notebook_launcher.engines.live_records import LiveRecords, pack_record
from notebook_launcher.messaging import messages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from notebook_launcher.engines.events import Event

__all__ = ["HeldEvents", "unpack_event"]

MIN_HOLD, MAX_HOLD = 0.05, 0.5
MESSAGES = 500
"""Messages of all nodes together that the kernel takes per second without effort, each with what was held."""


def unpack_event(packed: tuple[Any, ...] | bytes, offset: float) -> LiveRecords | Output:
    """Return the event that was packed; `offset`: seconds by which the kernel's clock is ahead of the node's."""
    return LiveRecords(packed, offset) if isinstance(packed, bytes) else Output(*packed)


def _is_calm(event: Event) -> bool:
    record = event.record if isinstance(event, FromRank) else event
    return isinstance(record, (Output, messages.RankStarted, messages.CallStarted))


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
        """Events, and live records as tuples."""
        self._due = float("inf")
        """Time at which they are to be sent."""

    def add(self, events: Iterable[Any], now: float, *, are_calm: bool = False) -> None:
        """Add events, or what carries them; with `are_calm` all may wait."""
        for event in events:
            if isinstance(event, Woken):
                continue
            live = pack_record(event.rank, event.record) if isinstance(event, FromRank) else None
            self._events.append(live or event)
            self._due = min(self._due, now + self.hold if live or are_calm or _is_calm(event) else now)

    def next_due(self, now: float) -> float:
        """Return the seconds until there is something to send; infinity: nothing waits."""
        return max(0.0, self._due - now)

    def take(self) -> tuple[Any, ...]:
        """Return all events, packed if they are of a kind that comes often, and forget them."""
        taken, self._events, self._due = tuple(_pack(self._events)), [], float("inf")
        return taken


def _pack(events: Iterable[Any]) -> Iterator[Any]:
    for is_live, group in itertools.groupby(events, key=lambda event: type(event) is tuple):
        if is_live:
            yield LiveRecords.pickle(group)
            continue
        for event in group:
            yield (event.rank, event.stream, event.data) if isinstance(event, Output) else event
