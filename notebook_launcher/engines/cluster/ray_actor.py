"""The actor that runs one node's agent as a child process and passes bytes on between it and Ray.

Ray sends this class by value, so it imports the standard library alone: a node where this package is missing must be
able to report that.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["AgentActor"]


class AgentActor:
    """One agent. `write` may be called from several threads, by calls that overtake each other: they are numbered."""

    F_SETPIPE_SZ = 1031
    CHUNK = 1 << 20
    AGENT = ("-m", "notebook_launcher.engines.cluster.agent")
    LAST_WORDS = 2000

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - for the life of the agent
        self._agent = subprocess.Popen(
            [sys.executable, *self.AGENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd="/",
            start_new_session=True,
        )
        assert self._agent.stdin is not None
        assert self._agent.stdout is not None
        self._stdin, self._stdout = self._agent.stdin, self._agent.stdout.fileno()
        for fd in (self._stdin.fileno(), self._stdout):
            with contextlib.suppress(OSError):  # The user's share of pipe memory is used up.
                fcntl.fcntl(fd, self.F_SETPIPE_SZ, self.CHUNK)
        self._lock = threading.Lock()
        self._next = 0
        self._early: dict[int, bytes] = {}
        """Bytes that have overtaken others, by number."""

    def write(self, number: int, data: bytes) -> None:
        """Pass bytes on to the agent when all with smaller numbers have been; no bytes are the end."""
        with self._lock, contextlib.suppress(OSError, ValueError):  # The stream ends with the agent.
            self._early[number] = data
            while self._next in self._early:
                data = self._early.pop(self._next)
                self._next += 1
                if data:
                    self._stdin.write(data)
                    self._stdin.flush()
                else:
                    self._stdin.close()

    def read(self) -> Iterator[Any]:
        """Yield the agent's output, and at the end its exit status with its last words."""
        while data := os.read(self._stdout, self.CHUNK):
            yield data
        status = self._agent.wait()
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - self.LAST_WORDS))
        yield status, self._errors.read().decode(errors="replace").strip()
