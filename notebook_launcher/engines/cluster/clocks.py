"""Times of a node's monotonic clock in the kernel's: failures of all ranks are ordered by the time of each."""

from __future__ import annotations

import dataclasses
from typing import Any

from notebook_launcher.messaging import messages

__all__ = ["in_time_of_kernel"]

TIMED = (messages.Returned, messages.Raised, messages.RankExited, messages.Changed)
"""Kinds of records with a time, except those in `LiveRecords`, whose times are shifted when they are added up."""


def in_time_of_kernel(record: Any, offset: float) -> Any:
    """Return a record with its times in the kernel's, which is `offset` seconds ahead of the node's."""
    if isinstance(record, TIMED):
        return dataclasses.replace(record, time=record.time + offset)
    return record
