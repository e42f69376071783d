"""Two network namespaces joined by a cable, and a program that carries an agent's link over that cable.

As a program, `python namespaces.py NEAR FAR COMMAND ...` runs a command in the namespace FAR, with its standard input
and output carried over a TCP connection from the namespace NEAR: what ssh does between two machines. So a cut of the
cable cuts the link, too, and nobody is told.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ADDRESSES = "203.0.113.1", "203.0.113.2"
"""Of TEST-NET-3, which nobody has."""


def ip(*words: str) -> None:
    """Run `ip`."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Cable:
    """Two namespaces whose eth0 are the ends of one cable; raises OSError or CalledProcessError where that is refused.

    Attributes:
        names: The namespaces.
    """

    def __init__(self) -> None:
        mark = uuid.uuid4().hex[:6]
        self.names = f"nla{mark}", f"nlb{mark}"
        try:
            for name in self.names:
                ip("netns", "add", name)
            near, far = self.names
            ip(*f"-n {near} link add eth0 type veth peer name eth0 netns {far}".split())
            for name, address in zip(self.names, ADDRESSES, strict=True):
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
        except BaseException:
            self.remove()
            raise

    def commands(self) -> list[list[str]]:
        """Return a command for each namespace that runs what follows there."""
        return [["ip", "netns", "exec", name] for name in self.names]

    def far_command(self, near: int, far: int) -> list[str]:
        """Return a command that runs what follows in one namespace, with its link from the other over the cable."""
        return [sys.executable, __file__, self.names[near], self.names[far]]

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Cut the cable for a while."""
        ip("-n", self.names[0], "link", "set", "eth0", "down")
        try:
            yield
        finally:
            ip("-n", self.names[0], "link", "set", "eth0", "up")

    @contextlib.contextmanager
    def slowed(self, rate: str) -> Iterator[None]:
        """Let the cable carry no more than `rate` in each direction, such as `"10mbit"`, for a while."""
        shaped = [["ip", "netns", "exec", name, "tc", "qdisc"] for name in self.names]
        try:
            for words in shaped:
                limit = ["tbf", "rate", rate, "burst", "16kb", "latency", "500ms"]
                subprocess.run([*words, "add", "dev", "eth0", "root", *limit], check=True, capture_output=True)
            yield
        finally:
            for words in shaped:
                subprocess.run([*words, "del", "dev", "eth0", "root"], check=False, capture_output=True)

    def remove(self) -> None:
        """Remove the namespaces."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _carry(near: str, far: str, command: list[str]) -> int:
    """Run a command far away, and this end of its connection near; return the exit status."""
    here = ["ip", "netns", "exec"]
    this = [sys.executable, __file__]
    with subprocess.Popen(
        [*here, far, *this, "--far", *command], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    ) as one:
        assert one.stdout is not None
        address, port = one.stdout.readline().decode().split()
        # Not waited for: the other end may be out of reach for longer than this one.
        os.execvp("ip", [*here, near, *this, "--near", address, port])


def _far(command: list[str]) -> None:
    """Take one connection, and become the command."""
    shown = subprocess.run(
        ["ip", "-4", "-o", "addr", "show", "eth0"], capture_output=True, text=True, check=True
    ).stdout
    address = shown.split()[3].partition("/")[0]
    with socket.create_server((address, 0)) as server:
        print(address, server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 2)
    for fd in (0, 1):
        os.dup2(connection.fileno(), fd)
    os.execvp(command[0], command)


def _near(address: str, port: str) -> None:
    """Carry standard input and output over a connection until the other end closes it."""
    connection = socket.create_connection((address, int(port)))
    threading.Thread(target=_send, args=(connection,), daemon=True).start()
    with contextlib.suppress(OSError):
        while data := connection.recv(1 << 16):
            while data:
                data = data[os.write(1, data) :]


def _send(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(0, 1 << 16):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    if sys.argv[1] == "--far":
        _far(sys.argv[2:])
    elif sys.argv[1] == "--near":
        _near(sys.argv[2], sys.argv[3])
    else:
        _carry(sys.argv[1], sys.argv[2], sys.argv[3:])
