"""The outcome of a call on one rank."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Literal, TypeAlias

from notebook_launcher.messaging import messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

__all__ = ["EndState", "RankOutcome"]

EndState: TypeAlias = Literal["returned", "failed", "stopped"]
"""State of a rank on which the call has ended."""


@dataclasses.dataclass(slots=True)
class RankOutcome:
    """The outcome of a call on one rank. Without `returned`, `raised` and `exited` the rank did not start."""

    rank: int
    time: float
    """Time of the end on this rank, by CLOCK_MONOTONIC."""
    returned: messages.Returned | None = None
    """The rank's record, if the function returned."""
    raised: messages.Raised | None = None
    """The rank's record, if the function raised."""
    exited: messages.RankExited | None = None
    """The supervisor's record, if the process has exited."""
    was_removed: bool = False
    """True if the process has exited after `raised`, because it was spent: see `messages.Raised.is_spent`."""
    pid: int | None = None
    """Process number of the rank; None if the process did not start."""
    parcel_fd: int | None = None
    """Descriptor of the value's or the exception's parcel; None if there is none, or once it is unpacked."""
    after_stop: bool = False
    """True if the outcome came after a stop of the run had begun; then it is not a failure of the rank's own."""

    @classmethod
    def of_record(cls, rank: int, record: messages.Returned | messages.Raised, fds: Sequence[int]) -> Self:
        """Return the outcome of a rank whose function has ended; `fds`: the descriptors beside the record."""
        outcome = cls(rank=rank, time=record.time, parcel_fd=fds[0] if fds else None)
        if isinstance(record, messages.Returned):
            outcome.returned = record
        else:
            outcome.raised = record
        return outcome

    @property
    def state(self) -> EndState:
        """State of the rank, apart from other ranks: the victim of another rank's failure counts as failed here."""
        return "returned" if not self.failed else "stopped" if self.after_stop else "failed"

    @property
    def is_over(self) -> bool:
        """True if the process has exited or never started."""
        return self.exited is not None or self.was_removed or (self.returned is None and self.raised is None)

    @property
    def is_spent(self) -> bool:
        """True if the process is alive and of no further use."""
        return not self.is_over and self.raised is not None and self.raised.is_spent

    @property
    def group(self) -> messages.GroupState | None:
        """State of the rank's process group; None if the process has exited."""
        record = self.returned or self.raised
        return None if record is None or self.is_over else record.group

    @property
    def failed(self) -> bool:
        """True if the function did not return on this rank."""
        return self.returned is None

    def take_parcel(self) -> int | None:
        """Return the parcel's descriptor, which the caller closes; None if there is none, and from then on."""
        fd, self.parcel_fd = self.parcel_fd, None
        return fd

    def close(self) -> None:
        """Close the parcel's descriptor; idempotent."""
        if (fd := self.take_parcel()) is not None:
            os.close(fd)
