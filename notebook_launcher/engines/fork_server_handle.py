"""The kernel's fork server: started at first need, asked for supervisors and hosts, and replaced if it dies."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from typing import TYPE_CHECKING, Any

from notebook_launcher.engines.kernel_imports import KernelImports, modules_needed
from notebook_launcher.engines.process_tree import ProcessTree
from notebook_launcher.errors import ResourceError
from notebook_launcher.ipython_shell import running_shell
from notebook_launcher.messaging import messages
from notebook_launcher.messaging.channel import Channel, anonymous_file, channel_pair, read_tail
from notebook_launcher.processes import boot
from notebook_launcher.processes.leftovers import wait_for_end
from notebook_launcher.processes.rank import rank_process

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    Starter: TypeAlias = Callable[[socket.socket, Sequence[int]], "SupervisorHandle"]
    """Starts a supervisor at the other end of a socket. A forked child has to close these descriptors of the kernel."""
    from notebook_launcher.travel import FunctionCall


READ_AT_IMPORT = ("TORCH_", "PYTORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TRITON_", "AOT_INDUCTOR_", "AOTINDUCTOR_",
                  "INDUCTOR_", "CUTLASS_", "ENABLE_", "PT2_", "CXX", "CUDA_HOME", "THP_")  # fmt: skip
"""Variables that torch, its compiler or Triton read when they are imported, or soon after: ranks that have others need
another fork server."""
READ_LATER = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Exceptions to READ_AT_IMPORT: torch sets these in the kernel when it compiles, and reads them at use."""
OTHER_PREFIXES = {"huggingface_hub": "HF_", "matplotlib": "MPL", "accelerate": "HF_"}
"""By package: how the names of its variables begin, if not with its own name. A launch sets Accelerate's own, which it
reads at use."""
AFTER_A_CELL = "post_run_cell"
AUTORELOAD = "IPython.extensions.autoreload"


class ForkServer:
    """The kernel's handle on its fork server, which is started at first need and replaced if it dies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held while the server is started, stopped or asked: launches may come from several threads."""
        self._process: subprocess.Popen[bytes] | _Child | None = None
        """None before the first start and after `stop`."""
        self._channel: Channel | None = None
        self._errors = -1
        self._settings: dict[str, str] = {}
        """The variables with which the server has imported torch, and imports what the kernel has imported."""
        self._imports = KernelImports()
        self._is_told = True
        """False for a server that was taken over, which knows from the kernel's what the kernel has imported."""
        self._image = messages.ImageMade(num_modules=0, left_out={})
        self._pid = os.getpid()
        self._shell: Any = None
        """IPython's shell, which calls this object after each cell; None if it does not."""
        self.is_cold = True
        """True until the server is known to have forked a supervisor: it may still be importing torch."""

    def start(self, environ: Mapping[str, str]) -> None:
        """Start the server, unless a suitable one is alive; returns before the server is ready."""
        with self._lock:
            self._start(environ)

    def _start(self, environ: Mapping[str, str]) -> None:
        settings = {name: value for name, value in environ.items() if self._is_read_at_import(name, value)}
        if self._is_alive() and self._settings == settings:
            self.resume()
            return
        self._stop()
        self._channel, theirs = channel_pair()
        self._errors = anonymous_file("errors")
        self._settings, self.is_cold = settings, True
        others = {name: value for name, value in os.environ.items() if not _is_read_by_torch(name)}
        with theirs:
            self._process = popen("forkserver", theirs.fileno(), self._errors, {**others, **settings})
        self._imports.begin_again()
        self._is_told = True
        if self._shell is None and (shell := running_shell()) is not None:
            shell.events.register(AFTER_A_CELL, self._after_cell)  # So that it imports beside the next cell.
            self._shell = shell
        self._tell_imports()

    def _is_alive(self) -> bool:
        if self._process is None or self._channel is None:
            return False
        if self._process.poll() is None:
            return True
        self._hear()
        return not self._channel.is_at_end()

    def _is_read_at_import(self, name: str, value: str) -> bool:
        """Return True for a variable that torch reads at its import, or a package that `env=` is meant for."""
        if _is_read_by_torch(name):
            return True
        if os.environ.get(name) == value:  # As it was in the kernel at its imports, or may have been.
            return False
        prefixes = (OTHER_PREFIXES.get(package, f"{package.upper()}_") for package in self._imports.packages())
        return name.startswith(tuple(prefixes))

    def _tell_imports(self) -> None:
        """Tell the server what the kernel has imported since; raises OSError if the server is gone."""
        if self._channel is not None and self._is_told:
            news = self._imports.news({**os.environ, **self._settings})
            if news is not None:
                self._channel.send(news)

    def tell(self, imports: messages.Imports) -> None:
        """Pass on what a kernel on another machine has imported."""
        with self._lock:
            self._send(imports, [], os.environ)

    def _after_cell(self, result: Any = None) -> None:
        if os.getpid() != self._pid or not self._lock.acquire(blocking=False):  # In a fork, or beside a launch.
            return
        try:
            self._hear()
            cell = getattr(getattr(result, "info", None), "raw_cell", None) or ""
            # Only then, because to look at 3,000 modules takes 2 ms.
            if ("reload" in cell or AUTORELOAD in sys.modules) and self._imports.note_reloaded():
                self._stop()
                self._start(os.environ)
            with contextlib.suppress(OSError):  # The next launch starts another server.
                self._tell_imports()
        finally:
            self._lock.release()

    def _hear(self) -> None:
        while self._channel is not None:
            try:
                received = self._channel.receive(wait=False)
            except BlockingIOError:
                return
            if received is None:
                return
            if isinstance(received[0], messages.ImageMade):
                self._image = received[0]

    def image(self) -> messages.ImageMade:
        """Return what the server has imported of what the kernel has."""
        with self._lock:
            self._hear()
            return self._image

    def starter(self, setup: messages.Setup, *, needs: tuple[str, ...] | None = ()) -> Starter:
        """Return a starter of supervisors for these settings, whose ranks need these packages."""
        # What the call of a detached run needs came with its host.
        return functools.partial(self._start_supervisor, setup, needs if self._is_told else ())

    def _start_supervisor(
        self, setup: messages.Setup, needs: tuple[str, ...] | None, sock: socket.socket, kernel_fds: Sequence[int]
    ) -> SupervisorHandle:
        del kernel_fds  # A fork of the fork server does not have the kernel's descriptors.
        reaped_r, reaped_w = os.pipe()
        try:
            with self._lock:
                request = messages.StartSupervisor(is_interactive=_is_interactive(), needs=needs)
                self._send(request, [sock.fileno(), reaped_w], setup.environ)
                errors = os.dup(self._errors)
        except BaseException:
            os.close(reaped_r)
            raise
        finally:
            os.close(reaped_w)

        return SupervisorHandle(_ServersChild(reaped_r, self), errors, reaped_r)

    def resume(self) -> None:
        """Let the server run, in case it is stopped (SIGSTOP)."""
        if (process := self._process) is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)

    def start_host(
        self, module: str, host_fd: int, environ: Mapping[str, str], call: FunctionCall | None = None
    ) -> int:
        """Fork the host of a detached run; return a descriptor of its standard error.

        Args:
            module: Module whose `main` the host calls, with the descriptor and a fork server of its own.
            host_fd: Descriptor of the host's channel.
            environ: The host's environment.
            call: The call of the host's run; None for a session.

        Raises:
            ResourceError: The fork server did not start.
        """
        needs = None if call is None else modules_needed(call)
        request = messages.StartHost(module=module, is_interactive=_is_interactive(), needs=needs)
        with self._lock:
            self._send(request, [host_fd], environ)
            return os.dup(self._errors)

    def take_over(self, channel: Channel, pid: int, environ: Mapping[str, str]) -> None:
        """Take over a server that is a child of this process, and was started with this environment."""
        with self._lock:
            self._channel, self._process = channel, _Child(pid)
            self._settings = {name: value for name, value in environ.items() if _is_read_by_torch(name)}
            self._is_told = False
            self._errors = anonymous_file("errors")

    def _send(self, record: object, fds: list[int], environ: Mapping[str, str]) -> None:
        # The server may have been killed since the last launch; a second try starts a new one.
        for last_try in (False, True):
            self._start(environ)
            assert self._channel is not None
            try:
                self._tell_imports()
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
            if self._shell is not None and self._pid == os.getpid():
                with contextlib.suppress(ValueError):
                    self._shell.events.unregister(AFTER_A_CELL, self._after_cell)
                self._shell = None

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


class _ServersChild:
    """A supervisor that the server forks.

    The server tells by a pipe that it has forked it, and by the pipe's end that it has reaped it.
    """

    def __init__(self, fd: int, server: ForkServer) -> None:
        os.set_blocking(fd, False)
        self._fd, self._server = fd, server
        self._pids: tuple[int, ...] = ()
        """Once it is known: the number of the supervisor, and of its parent, which is the server or its deputy."""
        self._has_ended = False
        """True once the supervisor is reaped, or its parent is gone."""

    def _look(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while said := os.read(self._fd, messages.FORKED.size):
                self._pids, self._server.is_cold = messages.FORKED.unpack(said), False
            self._has_ended = True

    def send_signal(self, signum: int) -> None:
        """Send a signal, even if the supervisor was not forked yet."""
        self._look()
        if self._pids:
            send_signal(self._pids[0], signum)
        elif signum == signal.SIGKILL:
            self._server.stop()  # It has not forked the supervisor: it may still be importing torch.
        else:
            self._server.resume()

    def wait(self, timeout: float) -> None:
        """Wait until the supervisor is reaped, at most `timeout` seconds."""
        self._look()
        if self._pids and not self._has_ended:
            send_signal(self._pids[1], signal.SIGCONT)  # It may be stopped.
        end, until = select.poll(), time.monotonic() + timeout
        end.register(self._fd, select.POLLIN)
        while not self._has_ended and (left := until - time.monotonic()) > 0:
            end.poll(1e3 * left)
            self._look()


class _Child:
    """A child of this process that it forked itself."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return a number once the child has ended; None while it lives."""
        if self._status is None:
            try:
                self._status = os.waitpid(self._pid, os.WNOHANG)[0] or None
            except ChildProcessError:
                self._status = self._pid
        return self._status

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end, at most `timeout` seconds."""
        if self.poll() is None:
            wait_for_end(self._pid, REAPING if timeout is None else timeout)

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless the child has ended."""
        if self.poll() is None:
            os.kill(self._pid, signum)


def _is_read_by_torch(name: str) -> bool:
    return name.startswith(READ_AT_IMPORT) and name not in READ_LATER


def fork_server() -> ForkServer:
    """Return this process's fork server; there is one for each kernel."""
    return fork_server_of(os.getpid())


@functools.lru_cache(maxsize=1)
def fork_server_of(_pid: int) -> ForkServer:
    """Return the fork server that the process with this number has started."""
    # By process number, so that a process that the user's code forked from the kernel gets a server of its own.
    return ForkServer()


# --------------------------------------------------------------------------------------------------------------------
# The kernel's handle on a supervisor, and the protocol of the functions that start one.


LAST_WORDS = 4000
"""Bytes at the end of a supervisor's standard error that are shown if it fails."""
REAPING = 2.0
"""Longest wait in seconds until a supervisor that has ended is reaped, which takes a millisecond."""


class SupervisorHandle:
    """The kernel's handle on a supervisor that was started.

    Args:
        process: The supervisor.
        fds: Descriptors that the handle closes: first that of the file with the supervisor's standard error.
    """

    def __init__(self, process: subprocess.Popen[bytes] | _Child | _ServersChild, *fds: int) -> None:
        self._process, self._errors, self._fds = process, fds[0], list(fds)
        self.send_signal = process.send_signal
        """Sends the process, which has not ended, a signal, even if it has not come up yet: SIGCONT, in case it is
        stopped, or SIGKILL."""

    def last_words(self) -> str:
        """Return the end of its standard error."""
        return read_tail(self._errors, LAST_WORDS)

    def wait_reaped(self) -> None:
        """Wait until the process is reaped, at most REAPING seconds, and close the descriptors; idempotent."""
        # An interrupt may end this call anywhere; the caller then calls it again.
        if self._fds:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(REAPING)
        while self._fds:
            os.close(self._fds.pop(0))  # The last one is that which the process is waited for with.


def send_signal(pid: int, signum: int) -> None:
    """Send a process a signal, if it is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def popen(role: Any, fd: int, errors: int, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start an interpreter in this role, with one end of a socket and a file for its output."""
    # In a session of its own, because the kernel's interrupt goes to the kernel's whole process group.
    return subprocess.Popen(
        boot.command(role, fd),
        pass_fds=[fd],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
        start_new_session=True,
    )


# --------------------------------------------------------------------------------------------------------------------
# The three ways to start a supervisor; everything after the start is the same.
#
# * `forkserver`: forked from a clean helper that has imported torch. Works whatever the kernel did.
# * `fork`: forked from the kernel. Captured data is shared and nothing is pickled.
# * `spawn`: a fresh interpreter.


def start_here(setup: messages.Setup, call: FunctionCall | None = None) -> ProcessTree:
    """Start ranks on this machine; raises `ResourceError` if it cannot hold them.

    Args:
        setup: The settings of all ranks.
        call: The first call: forked ranks inherit it, and the fork server learns from its code what to import first.
            None: it is not known yet, and all that the kernel has imported comes first.
    """
    if setup.start_method == "fork":
        assert call is not None
        return ProcessTree(setup, fork_starter(call))
    if setup.start_method == "spawn":
        return ProcessTree(setup, start_by_spawn)
    return ProcessTree(setup, fork_server().starter(setup, needs=None if call is None else modules_needed(call)))


_FORKING = threading.Lock()
"""Held during a fork: the child gets a copy of the locks that other threads hold, and of the warnings' filters."""


def start_by_spawn(sock: socket.socket, kernel_fds: Sequence[int]) -> SupervisorHandle:
    """Start a supervisor in a fresh interpreter."""
    del kernel_fds  # A fresh interpreter does not inherit the kernel's descriptors.
    errors = anonymous_file("errors")
    return SupervisorHandle(popen("supervisor", sock.fileno(), errors, dict(os.environ)), errors)


def fork_starter(call: FunctionCall) -> Starter:
    """Return a starter that forks the supervisor from this process, so that the ranks inherit `call`."""

    def starter(sock: socket.socket, kernel_fds: Sequence[int]) -> SupervisorHandle:
        errors = anonymous_file("errors")
        if "torch" in sys.modules:
            # In the kernel, once: each child would import these at every launch, which takes 40 ms.
            importlib.import_module("notebook_launcher.processes.supervisor")
            if "numpy" in sys.modules:
                importlib.import_module("numpy.random")  # Ranks seed it; NumPy 2 imports it only at first use.
        with _FORKING, warnings.catch_warnings():
            # Python 3.12 warns that a fork of a process with threads may deadlock. The user asked for the fork, and
            # `kernel/calls/checks.py` has tested for the known causes.
            warnings.simplefilter("ignore", DeprecationWarning)
            rank_process.settle_before_a_fork()
            pid = os.fork()
        if pid == 0:
            _become_supervisor(sock, call, errors, kernel_fds)
        return SupervisorHandle(_Child(pid), errors)

    return starter


def _become_supervisor(sock: socket.socket, call: FunctionCall, errors: int, kernel_fds: Sequence[int]) -> None:
    try:
        for fd in (*kernel_fds, *fork_server_of(os.getppid()).descriptors()):
            with contextlib.suppress(OSError):
                os.close(fd)
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
        # Imported here, because these modules import torch, which only the child may do.
        from notebook_launcher.processes.rank import rendezvous
        from notebook_launcher.processes.supervisor import run_supervisor

        rendezvous.replace_group_functions()
        rendezvous.redirect_globals(call.fn)
        run_supervisor(socket.socket(fileno=sock.detach()), call)
    except BaseException:  # the process ends here; the kernel reads its last words
        os.write(errors, traceback.format_exc().encode())
    finally:
        os._exit(0)
