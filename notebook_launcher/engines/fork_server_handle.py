"""The kernel's fork server: started at first need, asked for supervisors and hosts, and replaced if it dies."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from notebook_launcher.engines.supervisor_handle import LAST_WORDS, SupervisorHandle, popen, reaper
from notebook_launcher.errors import ResourceError
from notebook_launcher.messaging import messages
from notebook_launcher.messaging.channel import Channel, anonymous_file, channel_pair, read_tail

if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import Mapping, Sequence

    from notebook_launcher.engines.supervisor_handle import Starter

__all__ = ["ForkServer", "fork_server", "fork_server_of"]

READ_AT_IMPORT = ("TORCH_", "PYTORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TRITON_", "AOT_INDUCTOR_", "AOTINDUCTOR_",
                  "INDUCTOR_", "CUTLASS_", "ENABLE_", "PT2_", "CXX", "CUDA_HOME", "THP_")  # fmt: skip
"""Variables that torch, its compiler or Triton read when they are imported, or soon after: ranks that have others need
another fork server."""
READ_LATER = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Exceptions to READ_AT_IMPORT: torch sets these in the kernel when it compiles, and reads them at use."""


class ForkServer:
    """The kernel's handle on its fork server, which is started at first need and replaced if it dies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held while the server is started, stopped or asked: launches may come from several threads."""
        self._process: subprocess.Popen[bytes] | _Child | None = None
        """None before the first start and after `stop`."""
        self._channel: Channel | None = None
        self._errors = -1
        """Descriptor of the file with the server's standard error."""
        self._settings: dict[str, str] = {}
        """The variables with which the server has imported torch."""

    def start(self, environ: Mapping[str, str]) -> None:
        """Start the server, unless a suitable one is alive; returns before the server is ready."""
        with self._lock:
            self._start(environ)

    def _start(self, environ: Mapping[str, str]) -> None:
        settings = {name: value for name, value in environ.items() if _is_read_at_import(name)}
        if self._process is not None and self._process.poll() is None and self._settings == settings:
            return
        self._stop()
        self._channel, theirs = channel_pair()
        self._errors = anonymous_file("errors")
        self._settings = settings
        others = {name: value for name, value in os.environ.items() if not _is_read_at_import(name)}
        with theirs:
            self._process = popen("forkserver", theirs.fileno(), self._errors, {**others, **settings})

    def starter(self, setup: messages.Setup, *, uses_compiler: bool = False) -> Starter:
        """Return a starter of supervisors for these settings, whose ranks may import torch's compiler."""

        def starter(sock: socket.socket, kernel_fds: Sequence[int]) -> SupervisorHandle:
            del kernel_fds  # A fork of the fork server does not have the kernel's descriptors.
            return self._start_supervisor(sock, setup, uses_compiler=uses_compiler)

        return starter

    def _start_supervisor(self, sock: socket.socket, setup: messages.Setup, *, uses_compiler: bool) -> SupervisorHandle:
        reaped_r, reaped_w = os.pipe()
        try:
            with self._lock:
                request = messages.StartSupervisor(
                    setup=setup, is_interactive=_is_interactive(), uses_compiler=uses_compiler
                )
                self._send(request, [sock.fileno(), reaped_w], setup.environ)
                errors = os.dup(self._errors)
        except BaseException:
            os.close(reaped_r)
            raise
        finally:
            os.close(reaped_w)

        wait_reaped = reaper(lambda: os.read(reaped_r, 1), [reaped_r, errors])
        return SupervisorHandle(wait_reaped, lambda: read_tail(errors, LAST_WORDS), self.stop)

    def start_host(self, module: str, host_fd: int, environ: Mapping[str, str], *, uses_compiler: bool = False) -> int:
        """Fork a host, whose life is `main` of a module; return a descriptor of its standard error."""
        request = messages.StartHost(module=module, is_interactive=_is_interactive(), uses_compiler=uses_compiler)
        with self._lock:
            self._send(request, [host_fd], environ)
            return os.dup(self._errors)

    def take_over(self, channel: Channel, pid: int, environ: Mapping[str, str]) -> None:
        """Take over a server that is a child of this process, and was started with this environment."""
        with self._lock:
            self._channel, self._process = channel, _Child(pid)
            self._settings = {name: value for name, value in environ.items() if _is_read_at_import(name)}
            self._errors = anonymous_file("errors")

    def _send(self, record: object, fds: list[int], environ: Mapping[str, str]) -> None:
        # The server may have been killed since the last launch; a second try starts a new one.
        for last_try in (False, True):
            self._start(environ)
            assert self._channel is not None
            try:
                self._channel.send(record, fds)
            except OSError as error:
                if last_try:
                    reason = read_tail(self._errors, LAST_WORDS) or error.strerror or error
                    raise ResourceError(
                        error.errno,
                        f"the fork server did not start: {reason}. notebook-launcher's doctor() shows the limits of "
                        "this machine.",
                    ) from error
                self._stop()
            else:
                return

    def descriptors(self) -> list[int]:
        """Return this process's descriptors of the server, for a forked child to close."""
        return [] if self._channel is None else [self._channel.fileno()]

    def stop(self) -> None:
        """End the server; the next launch starts another."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        if self._errors >= 0:
            os.close(self._errors)
        self._process, self._channel, self._errors = None, None, -1


def _is_interactive() -> bool:
    return hasattr(sys, "ps1")  # IPython and its kernels set it, too.


class _Child:
    """A child of this process that it forked itself."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status; None while the child lives."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait for the end, and return the exit status."""
        return self._reap(0)

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless the child has ended."""
        if self.poll() is None:
            os.kill(self._pid, signum)

    def _reap(self, flags: int) -> int | None:
        if self._status is None:
            try:
                pid, status = os.waitpid(self._pid, flags)
            except ChildProcessError:
                pid, status = self._pid, 0
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status


def _is_read_at_import(name: str) -> bool:
    return name.startswith(READ_AT_IMPORT) and name not in READ_LATER


def fork_server() -> ForkServer:
    """Return this process's fork server; there is one for each kernel."""
    return fork_server_of(os.getpid())


@functools.lru_cache(maxsize=1)
def fork_server_of(_pid: int) -> ForkServer:
    """Return the fork server that the process with this number has started."""
    # By process number, so that a process that the user's code forked from the kernel gets a server of its own.
    return ForkServer()
