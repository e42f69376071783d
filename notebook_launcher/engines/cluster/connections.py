"""The carrier of a node's link: two descriptors, and what is known of the other end. Here: a command's pipes."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import ipaddress
import json
import os
import shlex
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import notebook_launcher
from notebook_launcher.installed import version_of
from notebook_launcher.machine import devices
from notebook_launcher.messaging import messages
from notebook_launcher.messaging.channel import AnonymousFile, read_tail

if TYPE_CHECKING:
    from collections.abc import Sequence


LAST_WORDS = 2000
"""Bytes at the end of a file of errors that are shown."""


class CommandConnection:
    """A command that runs an agent, with the link as its standard input and output.

    Raises:
        OSError: The command cannot start.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._errors = AnonymousFile("errors")
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors.fileno(),
                cwd="/",  # With `python -m`, files of the notebook's folder would come before the standard library.
                start_new_session=True,  # The kernel's interrupt goes to the kernel's whole process group.
            )
        except OSError:
            self._errors.close()
            raise
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # Whoever reads and writes closes them.
        self.read_fd, self.write_fd = os.dup(self._process.stdout.fileno()), os.dup(self._process.stdin.fileno())
        self._process.stdin.close()
        self._process.stdout.close()

    @property
    def origin(self) -> str:
        """The command, as one would type it."""
        return f"The command was: {shlex.join(self._command)}"

    def why(self) -> str:
        """Return the command's exit status, once it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"its command ended with {self._process.wait(1.0)}"
        return ""

    def last_words(self) -> str:
        """Return the end of what the command wrote to its standard error."""
        return read_tail(self._errors.fileno(), LAST_WORDS)

    def end(self, patience: float) -> None:
        """Wait for the command's end; after `patience` seconds kill it, with what it has started in its group."""
        self._signal_all(signal.SIGCONT)  # An agent that is stopped ends its ranks by itself then.
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._signal_all(signal.SIGKILL)
            self._process.wait()
        self._errors.close()

    def _signal_all(self, signum: int) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signum)  # It leads a session.


# --------------------------------------------------------------------------------------------------------------------
# The first line of an agent, as text: neither side unpickles anything before the versions agree.


MARK = b"notebook-launcher agent "
"""Begins the line. A login on another machine may print lines of its own before."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """One node, as its agent found it."""

    host: str = "?"
    pid: int = 0
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    namespace: str = ""
    networks: tuple[Network, ...] = ()
    num_cores: int = 1
    gpus: tuple[str, ...] = ()

    @classmethod
    def of_this_machine(cls) -> Greeting:
        """Look at this machine."""
        machine = devices.detect()
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            versions=versions(),
            namespace=network_namespace(),
            networks=look_for_networks(),
            num_cores=machine.num_cores,
            gpus=() if machine.why_no_gpu else tuple(gpu.name for gpu in machine.gpus),
        )

    def to_line(self) -> bytes:
        """Return the line that the agent sends."""
        return MARK + json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Greeting:
        """Return the greeting in a line that begins with `MARK`; of another version, fields may lack or be unknown."""
        found: dict[str, Any] = json.loads(line[len(MARK) :])
        known = {field.name: found[field.name] for field in dataclasses.fields(cls) if field.name in found}
        networks = tuple(Network(**fields) for fields in found.get("networks", ()))
        return cls(**{**known, "networks": networks, "gpus": tuple(found.get("gpus", ()))})


def versions() -> dict[str, str]:
    """Return the versions that the kernel and all nodes must share: of Python (two numbers), torch and this package."""
    return {
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "torch": version_of("torch") or "not installed",
        "notebook-launcher": notebook_launcher.__version__,
    }


def version_difference(there: dict[str, str]) -> str:
    """Return `torch 2.4.0 there, 2.5.1 here` for versions that differ from this process's; empty if none do."""
    return ", ".join(
        f"{name} {there.get(name, 'unknown')} there, {version} here"
        for name, version in versions().items()
        if there.get(name) != version
    )


# --------------------------------------------------------------------------------------------------------------------
# Networks of a machine, and the one over which the ranks of several machines meet.


SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B


@dataclasses.dataclass(frozen=True, slots=True)
class Network:
    """An address of a machine, with the interface that has it."""

    interface: str
    address: str
    prefix: int = 32
    """Bits of the address that all hosts of the network share."""

    @property
    def subnet(self) -> ipaddress.IPv4Network:
        """The network's addresses."""
        return ipaddress.IPv4Network((self.address, self.prefix), strict=False)


LOOPBACK = Network("lo", "127.0.0.1", 8)


def look_for_networks() -> tuple[Network, ...]:
    """Return the IPv4 addresses of this machine, without loopback addresses, in the order of its interfaces."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # An interface without an address.
                address = ipaddress.IPv4Address(fcntl.ioctl(sock, SIOCGIFADDR, request)[20:24])
                mask = ipaddress.IPv4Address(fcntl.ioctl(sock, SIOCGIFNETMASK, request)[20:24])
                if not address.is_loopback:
                    found.append(Network(name, str(address), ipaddress.IPv4Network((0, str(mask))).prefixlen))
    return tuple(found)


def network_namespace() -> str:
    """Return a name that two processes share if and only if they share loopback: of the machine's boot, and within."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/net").readlink()
    except OSError:
        return socket.gethostname()
    return f"{boot} {namespace}"


def choose_networks(
    namespaces: Sequence[str], networks: Sequence[Sequence[Network]], wanted: str | None = None
) -> tuple[Network, ...] | None:
    """Return the address that each node takes; None if they have no network in common.

    Args:
        namespaces: By node: its `network_namespace()`.
        networks: By node: what `look_for_networks` found.
        wanted: An interface's name, or a network such as `"10.0.0.0/8"`; None: loopback if all nodes share it, else
            the first network of the first node that all have.
    """
    if wanted is None and len(set(namespaces)) == 1:
        return (LOOPBACK,) * len(networks)
    if wanted is not None:
        return _all_first([[network for network in found if _is_wanted(network, wanted)] for found in networks])
    for first in networks[0]:
        chosen = _all_first([[network for network in found if network.subnet == first.subnet] for found in networks])
        if chosen is not None and len({network.address for network in chosen}) == len(set(namespaces)):
            return chosen
    return None


def _is_wanted(network: Network, wanted: str) -> bool:
    if "/" in wanted or wanted[:1].isdigit():
        return ipaddress.IPv4Address(network.address) in ipaddress.IPv4Network(wanted, strict=False)
    return network.interface == wanted


def _all_first(found: Sequence[Sequence[Network]]) -> tuple[Network, ...] | None:
    return tuple(networks[0] for networks in found) if all(found) else None


# --------------------------------------------------------------------------------------------------------------------
# Times of a node's monotonic clock in the kernel's: failures of all ranks are ordered by the time of each.


TIMED = (messages.Returned, messages.Raised, messages.RankExited, messages.Changed)
"""Kinds of records with a time, except those in `LiveRecords`, whose times are shifted when they are added up."""


def in_time_of_kernel(record: Any, offset: float) -> Any:
    """Return a record with its times in the kernel's, which is `offset` seconds ahead of the node's."""
    if isinstance(record, TIMED):
        return record._replace(time=record.time + offset)
    return record
