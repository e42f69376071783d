"""The host of a detached run or session: a process in a session of its own, which serves kernels and terminals.

    kernel ──HostOrder, parcel──▶ host ── Run ── fork server, supervisor, ranks
                               ▲
                               └─ host.sock: kernels and terminals, each on a thread of its own

The host ends when its run is over and its clients have left, or when its session is closed. If it dies, the supervisor
kills the ranks, as after the death of a kernel, and the run or session counts as lost.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher.detached import host_socket, session_folders
from notebook_launcher.detached.host_socket import Clients
from notebook_launcher.detached.hosted_run import HostedDebugger, HostedRun, on_preemption
from notebook_launcher.detached.requests import (
    Answered,
    AnswerQuestion,
    AwaitDebugger,
    Begin,
    CloseSession,
    Follow,
    ForgetFailures,
    HostOrder,
    HostReady,
    HostWaits,
    InterruptDebugger,
    OpenDebugger,
    ReadSession,
    RequestRefused,
    SessionOrder,
    SessionState,
)
from notebook_launcher.engines.fork_server_handle import fork_server
from notebook_launcher.errors import CallOrderError
from notebook_launcher.history import run_folders
from notebook_launcher.history.run_folders import SESSION_SOCKET
from notebook_launcher.history.schema import RankSnapshot, RunSnapshot
from notebook_launcher.kernel.calls.call_scope import CallScope
from notebook_launcher.kernel.latch import AWAKE_EVERY
from notebook_launcher.kernel.metering import GpuMeter
from notebook_launcher.kernel.plan import config_as_json
from notebook_launcher.kernel.ranks import Ranks
from notebook_launcher.kernel.session import SessionRuns
from notebook_launcher.messaging.channel import AnonymousFile, Channel
from notebook_launcher.processes import boot
from notebook_launcher.travel import cells
from notebook_launcher.wording import format_seconds

if TYPE_CHECKING:
    from notebook_launcher.detached.host_socket import Caller

MAX_IDLE = 7 * 86_400.0
"""Seconds without a call after which a session without `idle_timeout` is closed: no user may know of it any more."""
LAST_ANSWER = 1.0
"""Longest wait in seconds until clients have received that the session is closed."""
SUMMARY_EVERY = 5.0
"""Seconds between two summaries of what the session holds."""


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
    fork_server().take_over(server, server_pid, order.surroundings.environ)
    host: SessionHost | RunHost | None = None
    try:
        boot.enter_kernel_surroundings(order.surroundings)
        host = SessionHost(order) if isinstance(order, SessionOrder) else RunHost(order, *fds)
        kernel.send(HostReady(run_id=host.folder.name, folder=str(host.folder)))
    except BrokenPipeError:  # The kernel was killed, and no client knows the run.
        assert host is not None
        host.abandon()
    except BaseException as error:  # the kernel raises it
        kernel.send(RequestRefused(error=error))
        os._exit(1)
    kernel.close()
    host.serve()
    fork_server().stop()
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


class RunHost:
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
        hosted.clients.serve()
        hosted.conclude()
        hosted.await_clients()
        hosted.close()


# --------------------------------------------------------------------------------------------------------------------
# The host of a detached session: keeps the ranks, and conducts calls of kernels that come and go, one at a time.


class SessionHost:
    """Ranks that outlive the kernel which started them.

    Raises:
        ConfigError: Another session has the name.
        ResourceError: The machine cannot hold the ranks.
    """

    def __init__(self, order: SessionOrder) -> None:
        self._runs = SessionRuns(order.plan)
        self._call: HostedRun | None = None
        """The latest call."""
        self._caller = 0
        """Process number of the client that began it."""
        self._debugger: HostedDebugger | None = None
        """The latest debugger."""
        self._ended = threading.Event()
        """Set once every rank is gone."""
        self._wishes: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Wishes of signals and clients, for the main thread."""
        self._last_used = time.monotonic()
        self._leaving: dict[threading.Thread, HostedRun] = {}
        """Threads that see calls to their ends."""
        self._gpus = GpuMeter(order.plan.gpus)
        self._started = time.time()
        try:
            self.folder, sock = session_folders.make(order.plan.config, self._snapshot)
        except OSError as error:
            raise session_folders.no_folder(order.plan.config, error) from None
        self._clients = Clients(sock, self._answer)
        self._socket_watch = host_socket.SocketWatch(self.folder, SESSION_SOCKET)
        try:
            self._runs.ranks.start()
        except BaseException:
            self._clients.close()
            run_folders.remove(self.folder)
            raise

    def abandon(self) -> None:
        """End immediately, because no client knows of the session."""
        self._wishes.put("close")

    def serve(self) -> None:
        """Serve clients until the session is closed."""
        signal.signal(signal.SIGTERM, lambda *_: self._wishes.put("close"))
        on_preemption(self._runs.plan.config, lambda: self._wishes.put("save"))
        self._clients.serve()
        wish = ""
        while not wish and not self._is_forgotten() and not self._socket_watch.is_gone:
            session_folders.write_summary(self.folder, self._snapshot())
            with contextlib.suppress(queue.Empty):
                wish = self._wishes.get(timeout=SUMMARY_EVERY)
        self._end(saves=wish == "save")

    def _is_forgotten(self) -> bool:
        limit = self._runs.plan.config.idle_timeout or MAX_IDLE
        with self._runs.lock:
            if self._runs.is_busy or self._is_debugging():
                self._last_used = time.monotonic()
            return time.monotonic() - self._last_used > limit

    def _end(self, *, saves: bool) -> None:
        with self._runs.lock:
            self._runs.is_closed = True
            call = self._call
        if self._is_debugging() and self._debugger is not None:
            self._debugger.interrupt(again=True)
            self._debugger.end()
        if saves and call is not None and self._runs.is_busy:
            call.save_and_stop()
            while self._wishes.empty() and not call.run.wait(AWAKE_EVERY):  # Another signal does not wait.
                pass
        self._runs.end()
        self._gpus.close()
        run_folders.remove(self.folder)
        self._ended.set()
        for thread, hosted in tuple(self._leaving.items()):
            hosted.released.set()
            thread.join()
        self._clients.await_leave(LAST_ANSWER)

    def _answer(self, request: object, caller: Caller) -> object:
        value: object = None
        match request:
            case Begin():
                return self._begin(request, caller)
            case Follow() | AnswerQuestion() | InterruptDebugger() | AwaitDebugger():
                return self._answer_in_debugger(request)
            case ReadSession():
                value = self._state()
            case OpenDebugger(rank=rank):
                self._debug(rank)
            case ForgetFailures():
                self._forget()
            case CloseSession():
                self._wishes.put("close")
                self._ended.wait()
            case _:
                return RequestRefused(error=TypeError(f"the host of a session does not answer {request!r}"))
        return Answered(value=value)

    def _begin(self, request: Begin, caller: Caller) -> HostReady:
        parcel = AnonymousFile.of(caller.take_descriptor())
        cells.keep_places(request.places)
        try:
            with self._runs.lock:
                self._check_free()
                call = HostedRun(self._runs.ranks, request.scope, parcel, request.source)
                self._runs.note(call.run)
                self._call, self._caller = call, caller.pid
        except BaseException:
            parcel.close()
            raise
        call.clients.serve()
        thread = threading.Thread(target=self._see_off, args=(call,), daemon=True)
        self._leaving[thread] = call
        thread.start()
        return HostReady(run_id=call.run.id, folder=str(call.folder))

    def _check_free(self) -> None:
        if self._runs.is_closed:
            raise CallOrderError("the session is closed. Open a new one: Session(4, name=..., detached=True)")
        if self._runs.is_busy and (call := self._call) is not None:
            raise CallOrderError(
                f"the session is busy with {call.run.name} ({call.run.id}), which process {self._caller} began "
                f"{format_seconds(time.time() - call.began)} ago. Wait for it (session.latest.wait()), or stop it "
                "(session.latest.stop()): the ranks keep their memory."
            )
        if self._is_debugging() and (debugger := self._debugger) is not None:
            raise CallOrderError(
                f"the session is in the debugger of rank {debugger.rank}, which a client has opened. session.debug() "
                "joins it, and q leaves it."
            )

    def _see_off(self, call: HostedRun) -> None:
        """Wait for the end of a call; remove its folder if no client needs it any more."""
        call.conclude()
        self._last_used = time.monotonic()
        call.await_clients(is_expected=True)
        if call.is_minor and not call.is_taken:
            session_folders.write_summary(call.folder, call.run.snapshot())
        call.close()
        if call.is_minor and call.is_taken:
            run_folders.remove(call.folder)
        self._leaving.pop(threading.current_thread(), None)

    def _debug(self, rank: int | None) -> None:
        """Open a debugger; where one is open, the client joins it."""
        with self._runs.lock:
            if not self._is_debugging():
                self._check_free()
                self._debugger = HostedDebugger(self._runs.ranks, *self._runs.frames_to_debug(rank))

    def _answer_in_debugger(self, request: Follow | AnswerQuestion | InterruptDebugger | AwaitDebugger) -> object:
        debugger = self._debugger
        if debugger is None:
            raise CallOrderError("no debugger is open in this session: session.debug() opens one.")
        match request:
            case Follow():
                return debugger.journal.news(request)
            case AnswerQuestion(key=key, text=text):
                return Answered(value=debugger.questions.answer(key, text))
            case InterruptDebugger(again=again):
                debugger.interrupt(again=again)
                return Answered(value=None)
            case AwaitDebugger():
                return Answered(value=debugger.end())

    def _is_debugging(self) -> bool:
        return self._debugger is not None and not self._debugger.is_over

    def _forget(self) -> None:
        with self._runs.lock:
            self._check_free()
            self._runs.forget_failures()

    def _state(self) -> SessionState:
        with self._runs.lock:
            self._last_used = time.monotonic()
            plan, call, is_debugging = self._runs.plan, self._call, self._is_debugging()
            return SessionState(
                config=plan.config,
                num_processes=plan.num_processes,
                summary=plan.summary,
                started=self._started,
                latest="" if call is None else str(call.folder),
                is_busy=self._runs.is_busy or is_debugging,
                is_at_rest=self._runs.is_at_rest and not is_debugging,
            )

    def _snapshot(self) -> RunSnapshot:
        """Return the session as `runs()` shows it: a run that lasts until the session is closed."""
        plan, tree = self._runs.plan, self._runs.ranks.tree
        pids = {} if tree is None else dict(tree.pids)
        ranks = tuple(
            RankSnapshot(
                rank=rank,
                pid=pids.get(rank),
                state="running" if rank in pids else "starting",
                memory=None if tree is None or rank not in pids else tree.memory(rank),
                gpu_memory=self._gpus.read(rank).memory,
            )
            for rank in range(plan.num_processes)
        )
        return RunSnapshot(
            id="",
            name=session_folders.session_name_of(plan.config),
            kind="session",
            state="running",
            started=self._started,
            seconds=time.time() - self._started,
            num_processes=plan.num_processes,
            summary=plan.summary,
            seed=plan.seed,
            config=config_as_json(plan.config),
            ranks=ranks,
        )
