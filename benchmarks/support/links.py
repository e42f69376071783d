"""The network between two ranks: one node, or two nodes with a cable of a given rate.

Every node is a network namespace without a name. A helper process holds the namespace and ends with this process, so
no namespace, interface or rate limit is left, however a benchmark ends. A namespace also has its own counters, which
count only the traffic of the ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
from typing import TYPE_CHECKING

from support.process import FailedError

if TYPE_CHECKING:
    from collections.abc import Iterator

CABLE = "cable"
"""Name of both ends of the cable, each in its own namespace."""
ADDRESSES = ("10.77.0.1", "10.77.0.2")
BURST = "256kb"
"""Data that a cable accepts at once: more than one of the kernel's segments (64 kB), and little of a gradient."""
PORT = 29500
"""Port of the store; in a namespace of its own no other process uses it."""


@dataclasses.dataclass(frozen=True)
class Link:
    """The connection between rank 0 and rank 1."""

    name: str
    label: str
    megabits: int | None = None
    """The cable's rate in each direction, in Mbit/s; None: one node, over loopback."""


LINKS = {
    "node": Link("node", "one node, loopback"),
    "1gbit": Link("1gbit", "two nodes, 1 Gbit/s", 1000),
    "100mbit": Link("100mbit", "two nodes, 100 Mbit/s", 100),
}


@dataclasses.dataclass(frozen=True)
class Network:
    """A link that is up, with the settings of its ranks."""

    link: Link
    enter: tuple[list[str], list[str]] = ([], [])
    """Command prefixes that run a command at each end."""
    port: int = PORT

    @property
    def interface(self) -> str:
        return "lo" if self.link.megabits is None else CABLE

    @property
    def environ(self) -> dict[str, str]:
        one_node = self.link.megabits is None
        return {
            "MASTER_ADDR": "127.0.0.1" if one_node else ADDRESSES[0],
            "MASTER_PORT": str(self.port),
            "GLOO_SOCKET_IFNAME": self.interface,
            "LOCAL_WORLD_SIZE": "2" if one_node else "1",
        }


@contextlib.contextmanager
def connected(link: Link) -> Iterator[Network]:
    """Set up the link, and remove it at the end.

    Raises:
        FailedError: namespaces are not allowed or a tool is missing. A link of one node then uses this machine itself.
    """
    with contextlib.ExitStack() as stack:
        try:
            first = stack.enter_context(_namespace(None))
        except FailedError:
            if link.megabits is not None:
                raise
            yield Network(link, port=_free_port())
            return
        if link.megabits is None:
            yield Network(link, (_into(first), _into(first)))
            return
        second = stack.enter_context(_namespace(first))
        nodes = (_into(first), _into(second))
        _run([*nodes[0], "ip", "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", str(second)])
        for node, address in zip(nodes, ADDRESSES, strict=True):
            _run([*node, "ip", "address", "add", f"{address}/30", "dev", CABLE])
            _run([*node, "ip", "link", "set", CABLE, "up"])
            limit = ["tbf", "rate", f"{link.megabits}mbit", "burst", BURST, "latency", "100ms"]
            _run([*node, "tc", "qdisc", "add", "dev", CABLE, "root", *limit])
        yield Network(link, nodes)


@contextlib.contextmanager
def _namespace(owner: int | None) -> Iterator[int]:
    """Make a namespace with its loopback up, and yield the process that holds it; `owner` holds the first namespace."""
    new = ["unshare", "--net"]
    if os.geteuid() != 0:
        # A user who may make a user namespace is root in it; both nodes must belong to the same one.
        new = [*new, "--user", "--map-root-user"] if owner is None else [*_into(owner), *new]
    # The shell ends at the end of its input, so it ends with this process, even if this process is killed.
    script = "ip link set lo up && echo up && exec cat"
    try:
        holder = subprocess.Popen(
            [*new, "sh", "-c", script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise FailedError(f"no network namespace: {error}") from error
    with holder:
        assert holder.stdout is not None
        assert holder.stderr is not None
        assert holder.stdin is not None
        if holder.stdout.readline() != "up\n":
            raise FailedError(f"no network namespace: {holder.stderr.read().strip()}")
        try:
            yield holder.pid
        finally:
            holder.stdin.close()
            holder.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _into(holder: int) -> list[str]:
    as_root = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    return ["nsenter", f"--target={holder}", *as_root, "--net"]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        words = " ".join(command[command.index("--net") + 1 :])
        raise FailedError(f"no cable: `{words}` failed: {done.stderr.strip()}")
