"""The records that a rank receives: in their order; a rank that waits for one record keeps the others for later."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import gc
import os
import resource
import threading
import traceback
from typing import TYPE_CHECKING, Any

from notebook_launcher import context
from notebook_launcher.errors import ResourceError
from notebook_launcher.messaging import messages
from notebook_launcher.processes.rank.rank_process import flush

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.messaging.channel import Channel


class Inbox:
    """Records from the kernel to one rank.

    Args:
        rank: The number of the rank.
        channel: Its end of the channel.
        handle_comm: Handles what the page sends to widgets, while the rank waits for another record.
    """

    def __init__(self, rank: int, channel: Channel, handle_comm: Callable[[messages.CommMessage], None]) -> None:
        self._rank = rank
        self._channel = channel
        self._handle_comm = handle_comm
        self.can_ask = True
        """True if the user can answer: a cell waits for the run, or clients may attach to it."""
        self._answering = threading.Lock()
        """Held while a thread waits for the user's input, so that questions are asked one after another."""
        self._num_asked = 0
        """Number of the last question."""
        self._unread: collections.deque[tuple[Any, list[int]]] = collections.deque()
        """Records that came while the rank waited for another record; they are read first."""
        self._receiving: list[bool] = []
        """Not empty while a thread waits for a record, and so handles what the page sends to widgets."""

    def receive(self) -> tuple[Any, list[int]] | None:
        """Return the next record and the descriptors beside it; None once the kernel is gone."""
        return self._next(lambda _: True)

    def next_change(self) -> messages.Change:
        """Return the next change, and keep other records for later."""
        received = self._next(lambda record: isinstance(record, messages.Change))
        if received is None:
            raise context.RunStopped("the kernel went away")
        change: messages.Change = received[0]
        return change

    def _next(self, is_wanted: Callable[[Any], bool]) -> tuple[Any, list[int]] | None:
        """Return the next record that is wanted, and keep others for later; None if the kernel is gone.

        What the page sends to widgets is handled meanwhile.
        """
        self._receiving.append(True)  # First: from here on `take_comm_messages` leaves all records to this method.
        try:
            for kept in self._unread:
                if is_wanted(kept[0]):
                    self._unread.remove(kept)
                    return kept
            while (received := self._channel.receive()) is not None:
                if isinstance(received[0], messages.CommMessage):
                    self._handle_comm(received[0])
                elif is_wanted(received[0]):
                    return received
                else:
                    self._unread.append(received)
            return None
        finally:
            self._receiving.pop()

    def take_comm_messages(self) -> list[messages.CommMessage]:
        """Return what the page has sent to widgets, without waiting; nothing while a thread waits for a record."""
        comm_messages: list[messages.CommMessage] = []
        if self._receiving:
            return comm_messages
        self._receiving.append(True)
        try:
            with contextlib.suppress(BlockingIOError):
                while (received := self._channel.receive(wait=False)) is not None:
                    if isinstance(received[0], messages.CommMessage):
                        comm_messages.append(received[0])
                    else:
                        self._unread.append(received)
        finally:
            self._receiving.pop()
        return comm_messages

    def ask_text(self, prompt: str) -> str:
        """Return the line that the user types after a prompt; raises EOFError if no user can answer."""
        reply = self.ask(messages.InputRequest(prompt=prompt))
        if reply.text is None:
            raise EOFError(reply.reason)
        return reply.text

    def ask(self, request: messages.InputRequest) -> messages.InputReply:
        """Ask the user, and wait for the answer."""
        if not self.can_ask:
            reason = (
                f"rank {self._rank} asked for input, but this run was launched in the background, so no cell can "
                "answer. Use notebook_launch(...), or detached=True, or pass the value as an argument."
            )
            return messages.InputReply(text=None, reason=reason)
        with self._answering:
            flush()
            self._num_asked += 1
            self._channel.send(dataclasses.replace(request, number=self._num_asked))
            # The answer to an earlier question, whose wait was interrupted, may still come.
            received = self._next(
                lambda record: isinstance(record, messages.InputReply) and record.number == self._num_asked
            )
        if received is None:
            return messages.InputReply(text=None, reason="the kernel went away")
        reply: messages.InputReply = received[0]
        return reply


# --------------------------------------------------------------------------------------------------------------------
# File descriptors of a rank: each call and value travels by one, and user code may have left none.


def has_free() -> bool:
    """Return True if this process can open one more file."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return True


def check_free() -> None:
    """Raise `ResourceError` if this process cannot open one more file, so that no value could leave it."""
    if not has_free():
        raise none_left("the function has returned, but its value cannot travel")


def none_left(what: str) -> ResourceError:
    """Return the error that this process has no descriptor left; `what`: a clause about what failed therefore."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ResourceError(
        errno.EMFILE,
        f"{what}: this rank has no file descriptor left (its limit is {limit:,}). Close files, sockets and memory maps "
        "that the function opens, or raise `ulimit -n` in the shell that starts Jupyter.",
    )


def release_frames(error: BaseException) -> None:
    """Clear the variables of an exception's frames, which may hold open files; the exception can no longer be debugged.

    Line numbers stay, so that the traceback is complete.
    """
    traceback.clear_frames(error.__traceback__)
    gc.collect()
