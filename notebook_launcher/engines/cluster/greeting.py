"""The first line of an agent, as text: neither side unpickles anything before the versions agree."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
from typing import Any

import notebook_launcher
from notebook_launcher.engines.cluster.networks import Network, look_for_networks, network_namespace
from notebook_launcher.installed import version_of
from notebook_launcher.machine import devices

__all__ = ["MARK", "Greeting", "version_difference", "versions"]

MARK = b"notebook-launcher agent "
"""Begins the line. A login on another machine may print lines of its own before."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """One node, as its agent found it."""

    host: str
    pid: int
    versions: dict[str, str]
    namespace: str
    """As `network_namespace` returns it."""
    networks: tuple[Network, ...]
    num_cores: int
    gpus: tuple[str, ...]
    """Names of the GPUs that ranks can use."""

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
        """Return the greeting in a line that begins with `MARK`; fields that are unknown here are left out."""
        found: dict[str, Any] = json.loads(line[len(MARK) :])
        networks = tuple(Network(**fields) for fields in found.get("networks", ()))
        return cls(
            host=found.get("host", "?"),
            pid=found.get("pid", 0),
            versions=found.get("versions", {}),
            namespace=found.get("namespace", ""),
            networks=networks,
            num_cores=found.get("num_cores", 1),
            gpus=tuple(found.get("gpus", ())),
        )


def versions() -> dict[str, str]:
    """Return the versions that the kernel and all nodes must share: of Python (two numbers), torch and this package."""
    return {
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "torch": version_of("torch") or "not installed",
        "notebook-launcher": notebook_launcher.__version__,
    }


def version_difference(here: dict[str, str], there: dict[str, str]) -> str:
    """Return `torch 2.4.0 there, 2.5.1 here` for versions that differ; empty if none do."""
    return ", ".join(
        f"{name} {there.get(name, 'unknown')} there, {version} here"
        for name, version in here.items()
        if there.get(name) != version
    )
