"""A process that is forked ahead: it waits for the next launch of its kind, which would otherwise wait for forks."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING, Generic, TypeVar

from notebook_launcher.messaging.channel import Channel, channel_pair

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Spare"]

K = TypeVar("K")


class Spare(Generic[K]):
    """The fork server's side of a process that waits for a launch of one kind; there is at most one.

    The process ends with the fork server, by the end of file on its channel.

    Args:
        become: Life of the process; it gets the kind, and a descriptor at which its request arrives.
        keep_for: Seconds after a launch for which a process is kept ready.
    """

    def __init__(self, become: Callable[[K, int], None], *, keep_for: float) -> None:
        self._become = become
        self._keep_for = keep_for
        self._kind: K | None = None
        """Kind of the launch that is expected; None before the first one."""
        self._until = -math.inf
        """Until then, by the monotonic clock, a launch of this kind is expected."""
        self._channel: Channel | None = None
        """The channel to the waiting process; None if there is none."""
        self.pid = -1
        """Process number of the newest process; -1 if there was none, or the machine could not hold it."""

    def expect(self, kind: K) -> None:
        """Expect a launch of this kind soon."""
        if kind != self._kind:
            self.dismiss()
        self._kind = kind
        self._until = time.monotonic() + self._keep_for

    @property
    def is_missing(self) -> bool:
        """True if a launch is expected and no process waits for it."""
        return self._channel is None and time.monotonic() < self._until

    def next_due(self, idle: float) -> float | None:
        """Return the seconds until a process is to be forked, after `idle` seconds, or dismissed; None: neither."""
        if self._channel is None:
            return idle if self.is_missing else None
        return max(0.0, self._until - time.monotonic())

    @property
    def is_stale(self) -> bool:
        """True if a process waits, and no launch is expected any more."""
        return self._channel is not None and time.monotonic() >= self._until

    def start(self, fork: Callable[[Callable[[], None], int], int]) -> None:
        """Fork the process, which then waits.

        Args:
            fork: Forks a process that lives as its first argument, closes the descriptor in this process, and returns
                the process number.
        """
        self._channel, theirs = channel_pair()
        assert self._kind is not None
        become, kind, fd = self._become, self._kind, theirs.detach()
        self.pid = fork(lambda: become(kind, fd), fd)

    def take(self, kind: K, request: object, fd: int) -> bool:
        """Pass a request and its descriptor, which is closed here, to the waiting process; expect no further launch.

        Returns:
            False, without effect on the descriptor, if no process waits for this kind.
        """
        if self._channel is None or kind != self._kind:
            return False
        channel, self._channel, self._until = self._channel, None, -math.inf
        try:
            channel.send(request, [fd])
        except OSError:  # The system has killed the waiting process.
            return False
        finally:
            channel.close()
        os.close(fd)
        return True

    def renew(self) -> None:
        """End the waiting process, if there is one, and go on to expect a launch."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def dismiss(self) -> None:
        """End the waiting process, if there is one; in a fork of this process, close the copy of its channel."""
        self.renew()
        self._until = -math.inf
