"""The host of a detached run or session: a process in a session of its own, which serves kernels and terminals.

    kernel ──HostOrder, parcel──▶ host ── Run ── fork server, supervisor, ranks
                               ▲
                               └─ host.sock: kernels and terminals, each on a thread of its own

The host ends when its run is over and its clients have left, or when its session is closed. If it dies, the supervisor
kills the ranks, as after the death of a kernel, and the run or session counts as lost.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any

from notebook_launcher.detached.hosted_run import HostedRun, on_preemption
from notebook_launcher.detached.requests import HostOrder, HostReady, HostWaits, RequestRefused, SessionOrder
from notebook_launcher.detached.session_host import SessionHost
from notebook_launcher.engines.this_machine import cool_down, take_over_server
from notebook_launcher.kernel.calls.call_scope import CallScope
from notebook_launcher.kernel.ranks import Ranks
from notebook_launcher.messaging.channel import AnonymousFile, Channel
from notebook_launcher.processes import boot
from notebook_launcher.travel import cells

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(fd: int, server: Channel, server_pid: int) -> None:
    """Conduct what the kernel at the other end of descriptor `fd` orders, and exit.

    Args:
        fd: Descriptor of the kernel's channel.
        server: Channel to a fork server, which is a child of this process.
        server_pid: Its process number.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    kernel = Channel(socket.socket(fileno=fd))
    received = _ask_for_order(kernel)
    if received is None:  # The kernel was interrupted.
        os._exit(0)
    order, fds = received
    take_over_server(server, server_pid, order.surroundings.environ)
    host = None
    try:
        boot.enter_kernel_surroundings(order.surroundings)
        host = _host(order, fds)
        kernel.send(HostReady(run_id=host.folder.name, folder=str(host.folder)))
    except BrokenPipeError:  # The kernel was killed, and no client knows the run.
        assert host is not None
        host.abandon()
    except BaseException as error:  # the kernel raises it
        kernel.send(RequestRefused(error=error))
        os._exit(1)
    kernel.close()
    host.serve()
    cool_down()
    os._exit(0)  # Nothing is left to save, and torch's exit handlers take time.


def _ask_for_order(kernel: Channel) -> tuple[Any, list[int]] | None:
    """Return the kernel's order with its descriptors; None if the kernel does not wait any more.

    An order that lay in the channel already would begin a run that nobody waits for, if the user had interrupted the
    launch since.
    """
    try:
        kernel.send(HostWaits())
    except OSError:
        return None
    return kernel.receive()


def _host(order: HostOrder | SessionOrder, fds: Sequence[int]) -> SessionHost | _RunHost:
    return SessionHost(order) if isinstance(order, SessionOrder) else _RunHost(order, *fds)


class _RunHost:
    """The host of one run."""

    def __init__(self, order: HostOrder, parcel_fd: int) -> None:
        cells.keep_places(order.places)
        scope = CallScope(name=order.name, arguments=order.arguments)
        parcel = AnonymousFile.of(parcel_fd)
        self._hosted = HostedRun(Ranks(order.plan, many_calls=False), scope, parcel, order.source, order.environment)
        self.folder = self._hosted.folder

    def abandon(self) -> None:
        """Stop the run."""
        self._hosted.run.stop(at_once=True)

    def serve(self) -> None:
        """Serve clients until the run is over and they have left."""
        hosted = self._hosted
        signal.signal(signal.SIGTERM, lambda *_: hosted.run.stop(wait=False))
        # In a thread, because a save waits for the run's thread.
        on_preemption(hosted.run.config, lambda: threading.Thread(target=hosted.save_and_stop, daemon=True).start())
        hosted.serve()
        hosted.conclude()
        hosted.await_clients()
        hosted.close()
