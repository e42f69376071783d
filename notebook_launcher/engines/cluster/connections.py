"""The carrier of a node's link: two descriptors, and what is known of the other end. Here: a command's pipes."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from typing import TYPE_CHECKING, Protocol

from notebook_launcher.messaging.channel import AnonymousFile, read_tail

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CommandConnection", "Connection", "end_process", "tail_of"]

LAST_WORDS = 2000
"""Bytes at the end of a file of errors that are shown."""


class Connection(Protocol):
    """A way to one agent, from its start to its end."""

    read_fd: int
    """Descriptor of the agent's output; its reader closes it. `write_fd` is the same in the other direction."""
    write_fd: int

    @property
    def origin(self) -> str:
        """A sentence about how the agent was started."""
        ...

    def why(self) -> str:
        """Return the reason why the agent's end of the link has ended; empty if it is not known."""
        ...

    def last_words(self) -> str:
        """Return the last lines that the agent wrote to its standard error."""
        ...

    def end(self, patience: float) -> None:
        """Wait for the end of an agent that was asked to end; after `patience` seconds kill it. Release everything."""
        ...


class CommandConnection:
    """A command that runs an agent, with the link as its standard input and output.

    Args:
        command: The command line.

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
        return tail_of(self._errors)

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


def end_process(process: subprocess.Popen[bytes], patience: float) -> None:
    """Wait for the end of a process that was asked to end; after `patience` seconds kill it."""
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def tail_of(file: AnonymousFile) -> str:
    """Return the end of a file of errors; empty if it is closed."""
    return read_tail(file.fileno(), LAST_WORDS)
