"""The start of one rank, as the supervisor hands it over."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_launcher.messaging import messages

__all__ = ["RankStart"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """Everything that a rank gets when it is started."""

    rank: int
    setup: messages.Setup
    """The settings that all ranks of the tree share."""
    channel_fd: int
    stdout_fd: int
    stderr_fd: int
    board_fd: int
