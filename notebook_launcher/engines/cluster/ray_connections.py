"""The kernel's end of Ray: the driver, a process that is connected to it, and the way through it to each agent."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import itertools
import json
import os
import select
import socket
import subprocess
import sys
import threading
import warnings
from typing import Any

from notebook_launcher.engines.cluster.connections import LAST_WORDS
from notebook_launcher.errors import ConfigError
from notebook_launcher.messaging.channel import AnonymousFile, read_tail

INIT_PATIENCE = 120.0
"""Seconds for the import of ray, and for Ray to give up an address."""
CONNECT_PATIENCE = 5.0
ANSWER_PATIENCE = 30.0
MESSAGE_SIZE = 1 << 20
KILL_PATIENCE = 5.0
F_SETPIPE_SZ, PIPE_SIZE = 1031, 1 << 20
"""As the pipes of the agents: what is read at once is sent at once."""
UNGUARDED = (
    "This Ray cluster asks for no token, which is Ray's default: anyone who reaches its ports can run code on its "
    "nodes, and read and change what goes to your ranks. Use a network all of whose hosts you trust, or "
    "RAY_AUTH_MODE=token."
)
MODULE = "notebook_launcher.engines.cluster.ray_driver"


class RayDriver:
    """A process that is connected to one Ray cluster.

    Args:
        address: The cluster's address, as `Ray` takes it.

    Raises:
        ConfigError: ray is not installed, or the cluster cannot be reached.
    """

    def __init__(self, address: str) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "Ray() needs ray, which is not installed here: pip install 'notebook-launcher[ray]'.", field="engine"
            )
        resolved = _resolved(address)
        if reason := _why_unreachable(resolved):
            raise ConfigError(_unreachable(address, reason), field="engine")
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        """Held while a request waits for its answer."""
        self._counting = threading.Lock()
        """Held while connections are counted: each ends in a thread of its own."""
        self.num_open = 0
        self._closes_when_idle = False
        """True once its engine was closed, until another engine of the same cluster uses it."""
        self._is_closed = False
        self._errors = AnonymousFile("errors")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno()), str(os.getpid()), resolved],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._errors.fileno(),
                stderr=self._errors.fileno(),
                cwd="/",
                start_new_session=True,
            )
        try:
            ready = self._answer(INIT_PATIENCE)
        except BaseException:  # The user's interrupt.
            self.kill()
            raise
        if "error" in ready:
            self.kill()
            raise ConfigError(_unreachable(address, ready["error"]), field="engine")
        if not ready["is_guarded"]:
            warnings.warn(UNGUARDED, stacklevel=2)

    @property
    def has_ended(self) -> bool:
        """True if the process has ended, or was asked to."""
        return self._is_closed or self._process.poll() is not None

    def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes of the cluster, as the fields of `NodeShare`."""
        with self._lock:
            self._send({"ask": (number := next(self._numbers))})
            while (answer := self._answer(ANSWER_PATIENCE))["ask"] != number:
                pass  # To a request whose launch was interrupted.
            return list(answer["nodes"])

    def connect(self, request: dict[str, Any]) -> RayConnection:
        """Have Ray start an agent; `request` holds what `ray_driver.Relay` takes."""
        return RayConnection(self, next(self._numbers), request)

    def open(self, number: int, request: dict[str, Any], fds: list[int]) -> None:
        """Send the other ends of a connection's pipes to the process."""
        with self._counting:
            self.num_open += 1
        try:
            self._send({**request, "connect": number}, fds)
        except ConfigError:
            self.note_end()
            raise

    def end(self, number: int) -> None:
        """End an agent at once."""
        with contextlib.suppress(ConfigError):
            self._send({"kill": number})

    def note_end(self) -> None:
        """Take note that a connection has ended."""
        with self._counting:
            self.num_open -= 1
            if self._closes_when_idle and self.num_open <= 0 and not self._is_closed:
                self.close()
            else:
                self._reap()

    def _send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], fds or [])
        except OSError as error:
            raise ConfigError(self._gone(str(error)), field="engine") from error

    def _answer(self, patience: float) -> dict[str, Any]:
        readable, _, _ = select.select([self._control], [], [], patience)
        message = self._control.recv(MESSAGE_SIZE) if readable else b""
        if not message:
            raise ConfigError(self._gone("" if readable else f"no answer within {patience:g} s"), field="engine")
        return dict(json.loads(message))

    def _gone(self, why: str) -> str:
        status = self._process.poll()
        reason = why if status is None else f"it ended with {status}"
        last_words = read_tail(self._errors.fileno(), LAST_WORDS)
        return f"the process that is connected to Ray does not answer: {reason}. {last_words}"

    def close(self) -> None:
        """End the process, which serves no agent."""
        self._is_closed = True
        self._control.close()
        self._reap()

    def keep(self) -> bool:
        """Stay open for another engine of the same cluster; return False if the process has ended."""
        with self._counting:
            self._closes_when_idle = False
            return not self.has_ended

    def close_when_idle(self) -> None:
        """End the process once it serves no agent."""
        with self._counting:
            self._closes_when_idle = True
            if self.num_open <= 0 and not self._is_closed:
                self.close()

    def kill(self) -> None:
        """End the process now; agents that are connected end with it."""
        self._process.kill()
        self.close()

    def _reap(self) -> None:
        if self._is_closed and self.num_open <= 0:
            try:
                self._process.wait(KILL_PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._errors.close()


def _resolved(address: str) -> str:
    """Return the address of the cluster that the user's own code is connected to, if `address` leaves it open."""
    ray: Any = sys.modules.get("ray")
    if address == "auto" and ray is not None and ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    return address


def _why_unreachable(address: str) -> str:
    """Return the reason why nothing answers at an address; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return ""
    try:
        socket.create_connection((host, int(port)), CONNECT_PATIENCE).close()
    except OSError as error:
        return str(error)
    return ""


def _unreachable(address: str, reason: str) -> str:
    return (
        f"Ray(address={address!r}) cannot be reached: {reason}. Start a cluster with `ray start --head`, or pass the "
        "address of one that runs: Ray('10.0.0.1:6379')."
    )


class RayConnection:
    """The way through the driver to one agent."""

    def __init__(self, driver: RayDriver, number: int, request: dict[str, Any]) -> None:
        self._driver, self._number, self._request = driver, number, request
        self._words: str | None = None
        their_read_fd, self.write_fd = os.pipe()
        self.read_fd, their_write_fd = os.pipe()
        self._end_fd, their_end_fd = os.pipe()
        theirs = [their_read_fd, their_write_fd, their_end_fd]
        for fd in (self.read_fd, self.write_fd):
            with contextlib.suppress(OSError):  # The user's share of pipe memory is used up.
                fcntl.fcntl(fd, F_SETPIPE_SZ, PIPE_SIZE)
        try:
            driver.open(number, request, theirs)
        except ConfigError:
            for fd in (self.read_fd, self.write_fd, self._end_fd):
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)

    @property
    def origin(self) -> str:
        """Resources that Ray was asked for, in words."""
        asked = f"{self._request['cpus']:g} CPU, {self._request['gpus']:g} GPU"
        return (
            f"Ray was asked for {asked} at {self._request['address']}, which other work may hold: `ray status` shows "
            "it. Ray(patience=...) waits longer."
        )

    def _end_words(self, patience: float) -> str | None:
        """Return the driver's words about the end; None if there was no end for so long."""
        if self._words is None and select.select([self._end_fd], [], [], patience)[0]:
            with open(self._end_fd, "rb") as file:
                self._words = file.read().decode(errors="replace") or "its driver has ended"
        return self._words

    def why(self) -> str:
        """Return the first line of Ray, or of the agent's actor, about the end."""
        return (self._end_words(1.0) or "").partition("\n")[0]

    def last_words(self) -> str:
        """Return the other lines."""
        return (self._words or "").partition("\n")[2].strip()

    def end(self, patience: float) -> None:
        """Wait for the agent's end; after `patience` seconds have Ray kill it."""
        if self._end_words(patience) is None:
            self._driver.end(self._number)
            if self._end_words(KILL_PATIENCE) is None:
                os.close(self._end_fd)
        self._driver.note_end()


class RayDrivers:
    """The drivers of this kernel, one for each cluster."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._drivers: dict[str, RayDriver] = {}

    def get(self, address: str) -> RayDriver:
        """Return the driver of a cluster, which is up; raises `ConfigError`."""
        with self._lock:
            driver = self._drivers.get(address)
            if driver is None or not driver.keep():
                if driver is not None:
                    driver.kill()
                driver = self._drivers[address] = RayDriver(address)
            return driver

    def close(self, address: str) -> None:
        """End the driver of a cluster once it serves no agents: of a launch, or of another engine."""
        with self._lock:
            if (driver := self._drivers.get(address)) is not None:
                driver.close_when_idle()


def ray_drivers() -> RayDrivers:
    """Return the drivers of this process's engines."""
    return _ray_drivers_of(os.getpid())


@functools.lru_cache(maxsize=1)
def _ray_drivers_of(_pid: int) -> RayDrivers:
    # By process number, as the nodes are: a fork of the kernel has no driver.
    return RayDrivers()
