"""The kernel's ends of one rank's channel and pipes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
from typing import TYPE_CHECKING

from notebook_launcher.messaging.channel import channel_pair

if TYPE_CHECKING:
    from notebook_launcher.engines.events import Stream

__all__ = ["RankPipes"]

PIPE_SIZE = 1 << 20
"""The largest size that an unprivileged process may ask for, so that a rank can print in bursts without waiting."""
F_SETPIPE_SZ = 1031


class RankPipes:
    """The kernel's end of one rank: its channel, its output and its process number."""

    def __init__(self) -> None:
        self.pid: int | None = None
        """Process number; None before the rank has started and after it has exited."""
        self.stacks_fd: int | None = None
        """Descriptor of the file to which the rank writes its stacks; None until the rank is ready."""
        self.has_hung_up = False
        """True once the rank's end of the channel is closed."""
        self.channel, self.their_channel = channel_pair()
        """The kernel's end, and the rank's until it is handed over."""
        self.streams: dict[int, Stream] = {}
        """By descriptor: the pipes from which the kernel reads the rank's output."""
        self._output = select.poll()
        """Reports if one of these pipes has something to read."""
        self.their_streams: list[int] = []
        """Descriptors to which the rank writes, until they are handed over."""
        try:
            self._open_streams()
        except OSError:
            self.close()
            raise

    def _open_streams(self) -> None:
        streams: tuple[Stream, ...] = ("stdout", "stderr")
        for stream in streams:
            ours, theirs = os.pipe()
            self.streams[ours] = stream
            self._output.register(ours, select.POLLIN)
            self.their_streams.append(theirs)
            os.set_blocking(ours, False)
            with contextlib.suppress(OSError):
                _widen(ours)

    def all_fds(self) -> list[int]:
        """Return every open descriptor, including the rank's."""
        return [self.channel.fileno(), self.their_channel.fileno(), *self.streams, *self.their_streams]

    def fds_for_rank(self) -> list[int]:
        """Return the descriptors that the rank gets: its channel, its standard output, its standard error."""
        return [self.their_channel.fileno(), *self.their_streams]

    def has_output(self) -> bool:
        """Return True if there is output to read, or a pipe has ended: one system call, and no failed reads."""
        return bool(self._output.poll(0))

    def end_stream(self, fd: int) -> None:
        """Close a pipe that has ended."""
        self._output.unregister(fd)
        self.streams.pop(fd)
        os.close(fd)

    def close_theirs(self) -> None:
        """Close the descriptors that the rank has got; idempotent."""
        self.their_channel.close()
        while self.their_streams:
            os.close(self.their_streams.pop())

    def close(self) -> None:
        """Close every descriptor; idempotent."""
        self.close_theirs()
        self.channel.close()
        for fd in self.streams:
            os.close(fd)
        self.streams.clear()
        if self.stacks_fd is not None:
            os.close(self.stacks_fd)
            self.stacks_fd = None


def _widen(fd: int) -> None:
    fcntl.fcntl(fd, F_SETPIPE_SZ, PIPE_SIZE)
