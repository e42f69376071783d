"""Names of this machine, looked up as libraries do while a process group starts."""

from __future__ import annotations

import socket
import subprocess
import sys

from notebook_launcher.diagnosis.finding import Finding
from notebook_launcher.wording.units import format_seconds

__all__ = ["look_at_names", "name_finding"]

AREA = "names"
SLOW = 0.5
"""Seconds of a look-up that are worth a warning: each rank waits for it."""
PATIENCE = 20
LOOK_UP = "import socket, sys, time; t = time.monotonic()\n{call}\nprint(time.monotonic() - t)"
CALLS = {
    "name of 127.0.0.1": "try: socket.gethostbyaddr('127.0.0.1')\nexcept OSError: pass",
    "address of this host": "try: socket.getaddrinfo(socket.gethostname(), None)\nexcept OSError: pass",
}


def look_at_names() -> list[Finding]:
    """Return the seconds that the look-up of each name takes."""
    return [name_finding(name, _seconds(call)) for name, call in CALLS.items()]


def name_finding(name: str, seconds: float) -> Finding:
    """Return the verdict on the time that a look-up took."""
    fact = f"looked up in {format_seconds(seconds)}"
    if seconds < SLOW:
        return Finding(area=AREA, name=name, fact=fact)
    line = "127.0.0.1 localhost" if "127.0.0.1" in name else f"127.0.1.1 {socket.gethostname()}"
    advice = f"add the line `{line}` to /etc/hosts: a name server that does not answer delays the start of ranks"
    return Finding(area=AREA, name=name, fact=fact, verdict="warning", advice=advice)


def _seconds(call: str) -> float:
    # In a process of its own: a look-up cannot be interrupted, and may take a minute.
    command = [sys.executable, "-I", "-c", LOOK_UP.format(call=call)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return PATIENCE
    return float(done.stdout)
