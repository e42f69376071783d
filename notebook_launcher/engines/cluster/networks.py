"""Networks of a machine, and the one over which the ranks of several machines meet."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LOOPBACK", "Network", "choose_networks", "look_for_networks", "network_namespace"]

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
