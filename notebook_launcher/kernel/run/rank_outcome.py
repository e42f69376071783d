"""The outcome of a call on one rank."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_launcher.messaging import messages

__all__ = ["RankOutcome"]


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
    """True if the process has exited after `raised`, because its GPU context was lost."""
    pid: int | None = None
    """Process number of the rank; None if the process did not start."""
    parcel_fd: int | None = None
    """Descriptor of the value's or the exception's parcel; None if there is none, or once it is unpacked."""
    after_stop: bool = False
    """True if the outcome came after a stop of the run had begun; then it is not a failure of the rank's own."""

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

    def close(self) -> None:
        """Close the parcel's descriptor; idempotent."""
        if self.parcel_fd is not None:
            os.close(self.parcel_fd)
            self.parcel_fd = None
