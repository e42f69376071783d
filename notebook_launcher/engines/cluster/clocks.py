"""Times of a node's monotonic clock in the kernel's: failures of all ranks are ordered by the time of each."""

from __future__ import annotations

import dataclasses
from typing import Any

from notebook_launcher.messaging import messages

__all__ = ["in_time_of_kernel"]

TIMED = (messages.Returned, messages.Raised, messages.RankExited, messages.Metrics, messages.Progress, messages.Changed)


def in_time_of_kernel(record: Any, offset: float) -> Any:
    """Return a record with its times in the kernel's, which is `offset` seconds ahead of the node's."""
    if isinstance(record, TIMED):
        return dataclasses.replace(record, time=record.time + offset)
    if isinstance(record, messages.Phases):
        spans = tuple((phase, start + offset, seconds) for phase, start, seconds in record.spans)
        return dataclasses.replace(record, time=record.time + offset, since=record.since + offset, spans=spans)
    return record
