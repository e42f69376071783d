"""The host of a detached run: a process in a session of its own, which conducts the run and serves its clients.

    kernel ──Order, parcel──▶ host ── Run ── fork server, supervisor, ranks
                               ▲
                               └─ host.sock: kernels and terminals, each on a thread of its own

The host ends when its run is over and its clients have left. If it dies, the supervisor kills the ranks, as after the
death of a kernel, and the run counts as lost.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.channel import AnonymousFile, Channel
from notebook_launcher.detached import door
from notebook_launcher.detached.ending import KeptParcels, write_ending
from notebook_launcher.detached.host_questions import HostQuestions
from notebook_launcher.detached.journal import Journal
from notebook_launcher.detached.requests import Answered, Ask, Follow, HostReady, Order, Refused
from notebook_launcher.engines.this_machine import adopt, cool_down
from notebook_launcher.errors import CallOrderError
from notebook_launcher.kernel.call_scope import CallScope
from notebook_launcher.kernel.hosting import Hosting
from notebook_launcher.kernel.ranks import Ranks
from notebook_launcher.kernel.run import Run
from notebook_launcher.processes import boot

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main"]

GOODBYE = 5.0
"""Seconds after the end of the run for which clients may fetch the rest of its output. Its ending is in the folder."""
SLOW = 10.0
"""Seconds that a client gets to take an answer, before it is dropped."""
TIMEVAL = struct.Struct("ll")

METHODS = frozenset(
    {"edit", "logs", "logs_since", "metrics_since", "pause", "pictures_since", "profile", "resume", "sample", "save"}
    | {"set", "snapshot", "stacks", "stop", "_set_from_page"}
)
ATTRIBUTES = frozenset({"changes", "config", "metrics", "notes", "phases", "pictures", "ranks", "tags"})
"""Attributes of the run that a client may read, by name."""


def main(fd: int, server: Channel, server_pid: int) -> None:
    """Conduct the run that the kernel at the other end of descriptor `fd` orders, and exit.

    Args:
        fd: Descriptor of the kernel's channel.
        server: Channel to a fork server, which is a child of this process.
        server_pid: Its process number.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    kernel = Channel(socket.socket(fileno=fd))
    received = kernel.receive()
    if received is None:  # The kernel was interrupted.
        os._exit(0)
    order, (parcel_fd,) = received
    adopt(server, server_pid, order.surroundings.environ)
    host = None
    try:
        host = _Host(order, parcel_fd)
        kernel.send(HostReady(run_id=host.run.id, folder=str(host.folder)))
    except BrokenPipeError:  # The kernel was interrupted, and nobody knows the run.
        assert host is not None
        host.run.stop(at_once=True)
    except BaseException as error:  # noqa: BLE001 - the kernel raises it
        kernel.send(Refused(error=error))
        os._exit(1)
    kernel.close()
    host.serve()
    os._exit(0)  # Nothing is left to save, and torch's exit handlers take time.


class _Host:
    """The run, its journal, and the threads that serve clients."""

    def __init__(self, order: Order, parcel_fd: int) -> None:
        boot.enter_kernel_surroundings(order.surroundings)
        self._journal = Journal()
        self._questions = HostQuestions(self._journal.asked)
        self._journal.pending = self._questions.pending
        self._kept = KeptParcels()
        self._num_clients = 0
        self._lock = threading.Lock()
        self.folder = Path()
        parcel = AnonymousFile.of(parcel_fd)
        hosting = Hosting(
            begin_in=self._open_door,
            sink=self._journal,
            keep_value=self._kept.keep_value,
            keep_exception=self._kept.keep_exception,
            source=order.source,
            questions=self._questions,
        )
        scope = CallScope(name=order.name, arguments=order.arguments)
        self.run = Run.start_hosted(Ranks(order.plan, many_calls=False), scope, parcel, hosting)

    def _open_door(self, _run_id: str, folder: Path) -> None:
        self.folder = self._kept.folder = folder
        self._door = door.listen(folder)

    def serve(self) -> None:
        """Serve clients until the run is over and they have left."""
        signal.signal(signal.SIGTERM, lambda *_: self.run.stop(wait=False))
        config = self.run.config
        name = config.preemption_signal or ("SIGTERM" if config.resume is not None else None)
        if name is not None:
            # In a thread, because a save waits for the run's thread.
            thread = lambda *_: threading.Thread(target=self._save_and_stop, daemon=True).start()  # noqa: E731
            signal.signal(signal.Signals[name], thread)
        threading.Thread(target=self._accept, daemon=True).start()
        while not self.run.wait(60):
            pass
        self._keep_ending()
        self._journal.finish()
        end = time.monotonic() + GOODBYE
        while self._num_clients and time.monotonic() < end:
            time.sleep(0.01)
        (self.folder / door.SOCKET).unlink(missing_ok=True)
        cool_down()

    def _save_and_stop(self) -> None:
        """Save after the next update, and stop there; without an Accelerator, only stop."""
        is_saved = False
        with contextlib.suppress(CallOrderError):
            self.run.save()
            is_saved = True
        self.run.stop(wait=False, after_step=is_saved)

    def _keep_ending(self) -> None:
        outcome = self.run.outcome
        assert outcome is not None
        try:
            write_ending(self.folder, outcome, self.run.last_line)
        except OSError as error:
            self._journal.text("stderr", f"the results could not be kept in {self.folder}: {error.strerror}\n")

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._door.accept()
                with self._lock:
                    self._num_clients += 1
                threading.Thread(target=self._attend, args=(client,), daemon=True).start()
            except (OSError, RuntimeError):  # noqa: PERF203 - no room for a descriptor or a thread: clients try again.
                time.sleep(0.1)

    def _attend(self, client: socket.socket) -> None:
        try:
            with client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, TIMEVAL.pack(int(SLOW), 0))
                link = door.greet(client)
                while True:
                    link.send(self._answer(link.receive()))
        except Exception:  # noqa: BLE001, S110 - a client that left, is slow, or speaks another protocol is dropped
            pass
        finally:
            with self._lock:
                self._num_clients -= 1

    def _answer(self, request: object) -> object:
        try:
            match request:
                case Follow():
                    return self._journal.news(request)
                case Ask(name="answer", args=(key, text)):
                    return Answered(value=self._questions.answer(key, text))
                case Ask(name=name, args=args, kwargs=kwargs) if name in METHODS:
                    method: Callable[..., Any] = getattr(self.run, name)
                    return Answered(value=method(*args, **kwargs))
                case Ask(name=name) if name in ATTRIBUTES:
                    return Answered(value=getattr(self.run, name))
        except Exception as error:  # noqa: BLE001 - the client raises it
            return Refused(error=error)
        return Refused(error=TypeError(f"a host does not answer {request!r}"))
