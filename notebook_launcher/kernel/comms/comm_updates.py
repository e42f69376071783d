"""Updates of ranks to their widgets in the page: limited in rate, and of several updates only the last."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_launcher.kernel.display.sink import Sink
    from notebook_launcher.messaging.messages import CommMessage

__all__ = ["CommUpdates", "supersedes"]

TICK = 0.05
"""Seconds between two batches: the eye sees no more, and Jupyter's server drops what comes above 1000 messages/s."""
MAX_WAITING = 1000
"""Messages that wait for the next batch; more than these go at once, so that nothing is lost."""


def supersedes(new: CommMessage, old: CommMessage) -> bool:
    """Return True if a message changes all that an earlier message to the same widget changes."""
    return new.comm_id == old.comm_id and bool(_names(old)) and _names(new) >= _names(old)


def _names(record: CommMessage) -> frozenset[str]:
    """Return the names of what an update changes; nothing for other messages."""
    if record.kind != "comm_msg" or record.data.get("method") != "update":
        return frozenset()
    return frozenset(record.data.get("state", ())) | {str(path[0]) for path in record.data.get("buffer_paths", ())}


class CommUpdates:
    """The ranks' messages that wait for the next batch; used in the run's thread alone."""

    def __init__(self) -> None:
        self._waiting: list[tuple[CommMessage, Sink]] = []
        self._last = float("-inf")
        """Time of the last batch."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, record: CommMessage, sink: Sink) -> None:
        """Add a message; an update takes the place of earlier ones to its widget, but not past other messages to it."""
        if record.parent is None and _names(record):
            for at in range(len(self._waiting) - 1, -1, -1):
                earlier = self._waiting[at][0]
                if earlier.comm_id == record.comm_id:
                    if earlier.parent is None and (merged := _merged(earlier, record)) is not None:
                        del self._waiting[at]
                        record = merged
                    break
        self._waiting.append((record, sink))
        if len(self._waiting) >= MAX_WAITING:
            self.publish(None)

    def next_due(self, now: float) -> float | None:
        """Return the seconds until the next batch; None: nothing waits."""
        return max(0.0, self._last + TICK - now) if self._waiting else None

    def publish(self, now: float | None) -> None:
        """Send the waiting messages, if a batch is due or `now` is None."""
        if now is not None and self.next_due(now) != 0:
            return
        waiting, self._waiting = self._waiting, []
        self._last = time.monotonic() if now is None else now
        for record, sink in waiting:
            sink.comm(record)


def _merged(earlier: CommMessage, record: CommMessage) -> CommMessage | None:
    """Return one update for two; None if they cannot be merged."""
    if supersedes(record, earlier):
        return record
    if not _names(earlier) or earlier.buffers or record.buffers:
        return None
    state = {**earlier.data["state"], **record.data["state"]}
    return dataclasses.replace(record, data={**record.data, "state": state})
