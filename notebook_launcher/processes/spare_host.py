"""A host that is forked ahead: it waits for the next detached launch, which would otherwise wait for three forks."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING

from notebook_launcher.messaging.channel import Channel, channel_pair

if TYPE_CHECKING:
    import socket

    from notebook_launcher.messaging import messages

__all__ = ["SpareHost"]


class SpareHost:
    """The fork server's side of a host that waits for its request; there is at most one.

    It ends with the fork server, by the end of file on its channel.

    Args:
        keep_for: Seconds after a detached launch for which a host is kept ready.
    """

    def __init__(self, *, keep_for: float) -> None:
        self._keep_for = keep_for
        self._until = -math.inf
        """Until then, by the monotonic clock, a detached launch is expected."""
        self._channel: Channel | None = None
        """The channel to the waiting host; None if there is none."""
        self.module = ""
        """Module whose `main` is the life of the expected host."""

    def expect(self, module: str) -> None:
        """Expect another detached launch soon."""
        self.module = module
        self._until = time.monotonic() + self._keep_for

    @property
    def is_missing(self) -> bool:
        """True if a detached launch is expected and no host waits for it."""
        return self._channel is None and time.monotonic() < self._until

    def next_due(self, idle: float) -> float | None:
        """Return the seconds until a host is to be forked, after `idle` seconds, or dismissed; None: neither."""
        if self._channel is None:
            return idle if self.is_missing else None
        return max(0.0, self._until - time.monotonic())

    def prepare(self) -> socket.socket:
        """Return the end of a channel for the host that is forked next, which receives its request there."""
        self._channel, theirs = channel_pair()
        return theirs

    def take(self, request: messages.StartHost, host_fd: int) -> bool:
        """Pass a request and its descriptor to the waiting host; return False without effect if there is none."""
        channel, self._channel = self._channel, None
        if channel is None:
            return False
        try:
            channel.send(request, [host_fd])
        except OSError:  # The system has killed the waiting host.
            return False
        finally:
            channel.close()
        os.close(host_fd)
        return True

    def dismiss(self) -> None:
        """End the waiting host, if there is one; in a fork of this process, close the copy of its channel."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
