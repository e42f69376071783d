"""How a call ended on one rank."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_launcher import messages

__all__ = ["RankOutcome"]


@dataclasses.dataclass(slots=True)
class RankOutcome:
    """How the call ended on one rank."""

    rank: int
    time: float
    returned: messages.Returned | None = None
    raised: messages.Raised | None = None
    exited: messages.RankExited | None = None
    pid: int | None = None
    """Number of the rank's process; None if the process did not start."""
    parcel_fd: int | None = None
    """Descriptor of the value or of the exception."""
    after_stop: bool = False
    """Whether it came after the run was being stopped: then it is no failure of its own."""

    @property
    def is_over(self) -> bool:
        """Whether the process has ended, or never was."""
        return self.exited is not None or (self.returned is None and self.raised is None)

    @property
    def group(self) -> messages.GroupState | None:
        """How the rank's process group stands; None if the process has ended."""
        record = self.returned or self.raised
        return None if record is None or self.is_over else record.group

    @property
    def failed(self) -> bool:
        """Whether the rank gave no value."""
        return self.returned is None

    def close(self) -> None:
        """Let go of the parcel."""
        if self.parcel_fd is not None:
            os.close(self.parcel_fd)
            self.parcel_fd = None
