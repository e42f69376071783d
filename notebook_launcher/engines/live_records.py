"""Metrics, progress and phases of training on their way from another machine, of which ranks send many a second."""

from __future__ import annotations

import dataclasses
import operator
import pickle
from typing import TYPE_CHECKING, Any

from notebook_launcher.messaging import messages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["LIVE", "LiveRecords", "Packed", "pack_record"]

Packed = tuple[Any, ...]
"""A record as plain values: the place of its kind in `LIVE`, the rank, and the record's fields in their order."""

LIVE: tuple[type[Any], ...] = (messages.Metrics, messages.Progress, messages.Phases)
NAMES = [tuple(field.name for field in dataclasses.fields(kind)) for kind in LIVE]
READERS = {kind: (number, operator.attrgetter(*NAMES[number])) for number, kind in enumerate(LIVE)}


def pack_record(rank: int, record: object) -> Packed | None:
    """Return a record as plain values; None: it is of another kind, which comes seldom."""
    if (reader := READERS.get(type(record))) is None:
        return None
    number, read = reader
    return number, rank, *read(record)


@dataclasses.dataclass(frozen=True, slots=True)
class LiveRecords:
    """Records of ranks on one node, in the order in which they were sent.

    They stay pickled until the run's thread adds them up. A thousand ranks send 12,000 a second. While these wait as
    objects, the garbage collector looks at them again and again: that took a quarter of all work on them.
    """

    pickled: bytes
    offset: float
    """Seconds by which the kernel's clock is ahead of the times in them."""

    @staticmethod
    def pickle(records: Iterable[Packed]) -> bytes:
        """Return packed records as bytes, for `pickled`."""
        return pickle.dumps(tuple(records), protocol=5)

    def __iter__(self) -> Iterator[Packed]:
        return iter(pickle.loads(self.pickled))
