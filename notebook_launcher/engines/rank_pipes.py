"""The kernel's ends of one rank's channel and pipes."""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING

from notebook_launcher.channel import channel_pair

if TYPE_CHECKING:
    from notebook_launcher.engines.events import Stream

__all__ = ["RankEnd"]

PIPE_SIZE = 1 << 20
"""The most an unprivileged process may ask for: a rank that prints in bursts need not wait for the kernel."""
F_SETPIPE_SZ = 1031


class RankEnd:
    """The kernel's end of one rank."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.stacks_fd: int | None = None
        self.has_hung_up = False
        self.channel, self.their_channel = channel_pair()
        self.pipes: dict[int, Stream] = {}
        self.their_pipes: list[int] = []
        try:
            self._open_pipes()
        except OSError:
            self.close()
            raise

    def _open_pipes(self) -> None:
        streams: tuple[Stream, ...] = ("stdout", "stderr")
        for stream in streams:
            ours, theirs = os.pipe()
            self.pipes[ours] = stream
            self.their_pipes.append(theirs)
            os.set_blocking(ours, False)
            with contextlib.suppress(OSError):
                _widen(ours)

    def all_fds(self) -> list[int]:
        """Return every open descriptor, those of the rank too."""
        return [self.channel.fileno(), self.their_channel.fileno(), *self.pipes, *self.their_pipes]

    def fds_for_rank(self) -> list[int]:
        """Return the descriptors that the rank gets: its channel, its standard output, its standard error."""
        return [self.their_channel.fileno(), *self.their_pipes]

    def close_theirs(self) -> None:
        """Close the descriptors that the rank has got; idempotent."""
        self.their_channel.close()
        while self.their_pipes:
            os.close(self.their_pipes.pop())

    def close(self) -> None:
        """Close every descriptor; idempotent."""
        self.close_theirs()
        self.channel.close()
        for fd in self.pipes:
            os.close(fd)
        self.pipes.clear()
        if self.stacks_fd is not None:
            os.close(self.stacks_fd)
            self.stacks_fd = None


def _widen(fd: int) -> None:
    fcntl.fcntl(fd, F_SETPIPE_SZ, PIPE_SIZE)
