"""The clients of one socket of a host, each served on a thread of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING

from notebook_launcher.detached import host_socket
from notebook_launcher.detached.requests import Answered, RequestRefused

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.messaging.links import Link

__all__ = ["Caller", "Clients"]

SLOW = 10.0
"""Longest wait in seconds until a client has taken an answer; then the client is dropped."""


class Caller:
    """The client that has sent a request."""

    def __init__(self, sock: socket.socket, link: Link) -> None:
        self._sock = sock
        self._link = link

    @property
    def pid(self) -> int:
        """Its process number."""
        return host_socket.peer_of(self._sock)[0]

    def take_descriptor(self) -> int:
        """Ask for the descriptor that belongs to the request, and return it; raises OSError if the client is gone."""
        self._link.send(Answered(value=None))
        _, fds, _, _ = socket.recv_fds(self._sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not fds:
            raise ConnectionError("the client left before it had sent the parcel")
        return fds[0]


class Clients:
    """Serves the clients of one socket until it is closed.

    Args:
        listener: The socket.
        answer: Returns the answer to a request. What it raises, the client raises.
    """

    def __init__(self, listener: socket.socket, answer: Callable[[object, Caller], object]) -> None:
        self._listener = listener
        self._answer = answer
        self._num_clients = 0
        self._changed = threading.Condition()
        """Notified when a client has left; the host's threads alone use it, in which no interrupt can come."""
        self._is_closed = False

    def serve(self) -> None:
        """Begin to serve clients, in threads."""
        threading.Thread(target=self._accept, daemon=True).start()

    def await_leave(self, patience: float) -> None:
        """Wait until no client is connected, at most `patience` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_clients, patience)

    def close(self) -> None:
        """Accept no further client."""
        self._is_closed = True
        # Closing alone would not wake the thread that waits for a client.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._listener.accept()
                with self._changed:
                    self._num_clients += 1
                threading.Thread(target=self._attend, args=(client,), daemon=True).start()
            except (OSError, RuntimeError):  # noqa: PERF203 - no room for a descriptor or a thread: clients try again.
                if not self._is_closed:
                    time.sleep(0.1)

    def _attend(self, client: socket.socket) -> None:
        try:
            with client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, host_socket.TIMEVAL.pack(int(SLOW), 0))
                link = host_socket.greet(client)
                caller = Caller(client, link)
                while True:
                    link.send(self._answer_to(link.receive(), caller))
        except Exception:  # noqa: S110 - a client that left, is slow, or speaks another protocol is dropped
            pass
        finally:
            with self._changed:
                self._num_clients -= 1
                self._changed.notify_all()

    def _answer_to(self, request: object, caller: Caller) -> object:
        try:
            return self._answer(request, caller)
        except Exception as error:  # the client raises it
            return RequestRefused(error=error)
