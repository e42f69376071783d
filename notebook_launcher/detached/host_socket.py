"""The socket of a host, in the run's folder: how a host opens it and how a client reaches it.

The folder is closed to other users (mode 0700), and a client checks that it is the user's own. Both ends ask the system
for the other's user, and both send the protocol that they speak before the first record, because records are pickles.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher.detached.requests import PROTOCOL, Ask, HostAnswer
from notebook_launcher.errors import CallOrderError
from notebook_launcher.history import run_folders
from notebook_launcher.history.folder_files import read_json, socket_path
from notebook_launcher.history.run_folders import SOCKET
from notebook_launcher.kernel.display.sink import make_sink
from notebook_launcher.messaging.links import Link, SilentError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


CREDENTIALS = struct.Struct("3i")
TIMEVAL = struct.Struct("ll")
GREETING = f"notebook-launcher host {PROTOCOL}\n".encode("ascii")
PATIENCE = 10.0
"""Seconds after which a host or client that should be sending counts as hung."""


class HostSilentError(TimeoutError):
    """The host is there, and does not answer."""


def listen(folder: Path, socket_name: str = SOCKET) -> socket.socket:
    """Return a listening socket in a new folder, which is removed where there is no room; raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with socket_path(folder, socket_name) as name:
            sock.bind(name)
        (folder / socket_name).chmod(0o600)
        sock.listen(16)
    except OSError:
        sock.close()
        run_folders.remove(folder)
        raise
    return sock


def greet(sock: socket.socket) -> Link:
    """Check the other end and its protocol, in both the host and the client; return the link.

    Raises:
        CallOrderError: The other end speaks another protocol.
        PermissionError: It belongs to another user.
        OSError: It is gone, or hangs.
    """
    _, uid, _ = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    if uid != os.getuid():
        raise PermissionError(
            f"the process at the other end of {SOCKET} belongs to user {uid}, and this one to user {os.getuid()}: "
            f"attach as user {uid}."
        )
    sock.sendall(GREETING)
    link = Link(sock.fileno(), sock.fileno())
    said = link.read_line(PATIENCE)
    if said != GREETING:
        theirs = said.decode("ascii", "replace").split()[-1:] or ["?"]
        raise CallOrderError(
            f"the run's host speaks protocol {theirs[0]}, and this version of notebook-launcher protocol {PROTOCOL}: "
            "attach with the version that launched the run."
        )
    return link


class HostConnection:
    """A client's connection to a host; for one thread, which closes it.

    Raises:
        HostSilentError: A host is there, and does not answer.
        OSError: No host is there; what `greet` raises is raised, too.
    """

    def __init__(self, folder: Path, socket_name: str = SOCKET) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            # A host that is stopped takes 16 connections, without a word, and no further ones.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, TIMEVAL.pack(int(PATIENCE), 0))
            with socket_path(folder, socket_name) as name:
                self._sock.connect(name)
            self._link = greet(self._sock)
        except (SilentError, BlockingIOError) as error:
            self._sock.close()
            raise HostSilentError(_why_silent(folder)) from error
        except BaseException:
            self._sock.close()
            raise

    def request(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the host; return its value, or raise its exception, or OSError if the host is gone."""
        self._link.send(Ask(name, args, kwargs))
        return self._link.receive().open()

    def hand_over(self, fd: int, name: str, *args: Any) -> Any:
        """Call a function of the host as `request` does, with a descriptor as its first argument."""
        self._link.send(Ask(name, args, {}, has_descriptor=True))
        # A link reads ahead, and would lose a descriptor that was sent with the record.
        self._link.receive()
        socket.send_fds(self._sock, [b"\0"], [fd])
        return self._link.receive().open()

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._sock.close()


def continue_host(folder: Path) -> None:
    """Let a host that is stopped (SIGSTOP) go on, because it is to end its run or session."""
    owner: Any = (read_json(folder, run_folders.SUMMARY) or {}).get("kernel")
    if run_folders.is_alive(owner, age=math.inf) and run_folders.is_stopped(owner["pid"]):
        os.kill(owner["pid"], signal.SIGCONT)
        line = f"the host of {folder.name} (process {owner['pid']}) was stopped (SIGSTOP), and was continued"
        make_sink().text("stderr", f"{line}\n")


def _why_silent(folder: Path) -> str:
    pid = run_folders.owner_of(folder)
    what_to_do = "" if pid is None else f": `kill -CONT {pid}` lets it go on, `kill -KILL {pid}` ends it with its ranks"
    return (
        f"the host of {folder.name} does not answer: it has said nothing for {PATIENCE:g} s. It may be stopped "
        f"(SIGSTOP), or its machine is too busy{what_to_do}. open_run({folder.name!r}) reads what it has recorded."
    )


# --------------------------------------------------------------------------------------------------------------------
# The clients of one socket of a host, each served on a thread of its own.


LOOK_EVERY = 5.0
SLOW = 10.0
"""Longest wait in seconds until a client has taken an answer; then the client is dropped."""


class Clients:
    """A socket in the new folder of a run or session, and its clients.

    The folder is held open, so that its host notices when the socket is deleted. A folder that is only moved keeps its
    socket, and clients reach the host in the new place.

    Args:
        folder: The folder.
        find: Returns the function of a name, or raises `TypeError`. What the function raises, the client raises.
        socket_name: Name of the socket.

    Raises:
        OSError: The folder has no room for the socket, and was removed.
    """

    def __init__(self, folder: Path, find: Callable[[str], Callable[..., object]], socket_name: str = SOCKET) -> None:
        self._name = socket_name
        self._listener = listen(folder, socket_name)
        self._folder_fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._find = find
        self._num_clients = 0
        self._changed = threading.Condition()
        """Notified when a client has left; the host's threads alone use it, in which no interrupt can come."""
        self._is_closed = False

    @property
    def are_cut_off(self) -> bool:
        """True if the socket was deleted: no client can reach the host any more."""
        try:
            os.stat(self._name, dir_fd=self._folder_fd)
        except FileNotFoundError:
            return True
        except OSError:  # A network's file system that does not answer for a while.
            pass
        return False

    def serve(self) -> None:
        """Begin to serve clients, in threads."""
        threading.Thread(target=self._accept, daemon=True).start()

    def await_leave(self, patience: float) -> None:
        """Wait until no client is connected, at most `patience` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_clients, patience)

    def close(self) -> None:
        """Remove the socket, and accept no further client."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._name, dir_fd=self._folder_fd)
        os.close(self._folder_fd)
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
                client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, TIMEVAL.pack(int(SLOW), 0))
                link = greet(client)
                while True:
                    ask: Ask = link.receive()
                    fds = [_take_descriptor(client, link)] if ask.has_descriptor else []
                    link.send(self._answer(ask, fds))
        except Exception:  # noqa: S110 - a client that left, is slow, or speaks another protocol is dropped
            pass
        finally:
            with self._changed:
                self._num_clients -= 1
                self._changed.notify_all()

    def _answer(self, ask: Ask, fds: list[int]) -> HostAnswer:
        try:
            return HostAnswer(self._find(ask.name)(*fds, *ask.args, **ask.kwargs))
        except Exception as error:  # the client raises it
            return HostAnswer(error=error)


def _take_descriptor(client: socket.socket, link: Link) -> int:
    """Ask for the descriptor that belongs to the request, and return it; raises OSError if the client is gone."""
    link.send(HostAnswer())
    _, fds, _, _ = socket.recv_fds(client, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not fds:
        raise ConnectionError("the client left before it had sent the parcel")
    return fds[0]
