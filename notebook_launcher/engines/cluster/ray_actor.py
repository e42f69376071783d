"""The actor that runs one node's agent as a child process and passes bytes on between it and Ray.

Ray sends this class by value, so it imports the standard library alone: a node where this package is missing must be
able to report that.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class AgentActor:
    """One agent. `write` may be called from several threads, by calls that overtake each other: they are numbered.

    The actor ends with its raylet, Ray's own process on the node: Ray takes up to 15 s to count the node as dead, and
    leaves the process of the actor running.
    """

    F_SETPIPE_SZ = 1031
    CHUNK = 1 << 20
    AGENT = ("-m", "notebook_launcher.engines.cluster.agent")
    LAST_WORDS = 2000
    END_PATIENCE = 10.0
    """Longest wait in seconds for the agent to end its ranks, once the raylet has ended."""
    TELL_PATIENCE = 1.0
    """Seconds for the last word to reach the driver, before the actor ends."""
    RAYLET_ENDED = (
        "its raylet, Ray's own process on that node, has ended. The file raylet.err among Ray's logs there says more; "
        "`ray start --address=...` on the node starts another raylet"
    )

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
        self._raylet: int | None = None
        """Descriptor of the raylet's process, readable once it has ended; None if this process cannot see it."""
        with contextlib.suppress(OSError, ValueError):
            self._raylet = os.pidfd_open(int(os.environ.get("RAY_RAYLET_PID") or os.getppid()))
            threading.Thread(target=self._end_with, args=(self._raylet,), daemon=True).start()

    def _end_with(self, raylet: int) -> None:
        select.select([raylet], [], [])
        if self._lock.acquire(timeout=self.TELL_PATIENCE):
            self._stdin.close()  # The agent ends its ranks.
        try:
            self._agent.wait(self.END_PATIENCE)
        except subprocess.TimeoutExpired:
            self._agent.kill()
        time.sleep(self.TELL_PATIENCE)
        os._exit(1)

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
        """Yield the agent's output, and at the end its exit status with its last words, or why the actor ends."""
        watched = [self._stdout] if self._raylet is None else [self._stdout, self._raylet]
        while True:
            if self._raylet in select.select(watched, [], [])[0]:
                yield self.RAYLET_ENDED
                return
            if not (data := os.read(self._stdout, self.CHUNK)):
                break
            yield data
        status = self._agent.wait()
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - self.LAST_WORDS))
        yield status, self._errors.read().decode(errors="replace").strip()
