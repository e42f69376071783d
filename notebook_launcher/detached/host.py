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
from typing import TYPE_CHECKING

from notebook_launcher.detached import session_folders
from notebook_launcher.detached.hosted_run import HostedDebugger, HostedRun, on_preemption
from notebook_launcher.detached.requests import HostAnswer, SessionState
from notebook_launcher.engines.fork_server_handle import fork_server
from notebook_launcher.errors import CallOrderError
from notebook_launcher.history import run_folders
from notebook_launcher.history.schema import RankSnapshot, RunSnapshot
from notebook_launcher.kernel.latch import AWAKE_EVERY
from notebook_launcher.kernel.metering import GpuMeter
from notebook_launcher.kernel.plan import config_as_json
from notebook_launcher.kernel.ranks import Ranks
from notebook_launcher.kernel.session import SessionRuns
from notebook_launcher.messaging.channel import AnonymousFile, Channel
from notebook_launcher.processes import boot
from notebook_launcher.wording import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.detached.requests import CallOrder, HostOrder
    from notebook_launcher.kernel.plan import Plan

MAX_IDLE = 7 * 86_400.0
"""Seconds without a call after which a session without `idle_timeout` is closed: no user may know of it any more."""
LAST_ANSWER = 1.0
"""Longest wait in seconds until clients have received that the session is closed."""
SUMMARY_EVERY = 5.0


def main(fd: int, server: Channel, server_pid: int) -> None:
    """Conduct what the kernel at the other end of descriptor `fd` orders, and exit. The fork server is a child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    kernel = Channel(socket.socket(fileno=fd))
    # An order that lay in the channel already would begin a run that nobody waits for, if the user had interrupted the
    # launch since. So the kernel gives it when the host is up.
    with contextlib.suppress(OSError):
        kernel.send(HostAnswer())
    received = kernel.receive()
    if received is None:  # The kernel was interrupted.
        os._exit(0)
    order: HostOrder = received[0]
    fork_server().take_over(server, server_pid, order.surroundings.environ)
    host: SessionHost | RunHost | None = None
    try:
        boot.enter_kernel_surroundings(order.surroundings)
        if order.call is None:
            host = SessionHost(order.plan)
        else:
            host = RunHost(order.plan, order.call, AnonymousFile(fd=received[1][0]))
        kernel.send(HostAnswer(str(host.folder)))
    except BrokenPipeError:  # The kernel was killed, and no client knows the run.
        assert host is not None
        host.abandon()
    except BaseException as error:  # the kernel raises it
        kernel.send(HostAnswer(error=error))
        os._exit(1)
    kernel.close()
    host.serve()
    fork_server().stop()
    os._exit(0)  # Nothing is left to save, and torch's exit handlers take time.


class RunHost:
    """The host of one run."""

    def __init__(self, plan: Plan, order: CallOrder, parcel: AnonymousFile) -> None:
        self._hosted = HostedRun(Ranks(plan, many_calls=False), order, parcel)
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
        hosted.clients.close()


# --------------------------------------------------------------------------------------------------------------------
# The host of a detached session: keeps the ranks, and conducts calls of kernels that come and go, one at a time.


class SessionHost:
    """Ranks that outlive the kernel which started them.

    Raises:
        ConfigError: Another session has the name.
        ResourceError: The machine cannot hold the ranks.
    """

    def __init__(self, plan: Plan) -> None:
        self._runs = SessionRuns(plan)
        self._call: HostedRun | None = None
        self._caller = 0
        self._debugger: HostedDebugger | None = None
        self._ended = threading.Event()
        self._wishes: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Wishes of signals and clients, for the main thread."""
        self._last_used = time.monotonic()
        self._leaving: dict[threading.Thread, HostedRun] = {}
        """Threads that see calls to their ends."""
        self._gpus = GpuMeter(plan.gpus)
        self._started = time.time()
        self._answers: dict[str, Callable[..., object]] = {
            "begin": self._begin,
            "state": self._state,
            "debug": self._debug,
            "forget": self._forget,
            "close": self._close,
        }
        try:
            self.folder, self._clients = session_folders.make(plan.config, self._snapshot, self._find)
        except OSError as error:
            raise session_folders.no_folder(plan.config, error) from None
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
        while not wish and not self._is_forgotten() and not self._clients.are_cut_off:
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

    def _find(self, name: str) -> Callable[..., object]:
        if name in self._answers:
            return self._answers[name]
        if name not in ("news", "answer", "interrupt", "end"):
            raise TypeError(f"the host of a session does not answer {name!r}")
        if (debugger := self._debugger) is None:
            raise CallOrderError("no debugger is open in this session: session.debug() opens one.")
        function: Callable[..., object] = getattr(debugger if name in ("interrupt", "end") else debugger.journal, name)
        return function

    def _close(self) -> None:
        self._wishes.put("close")
        self._ended.wait()

    def _begin(self, parcel_fd: int, order: CallOrder, caller: int) -> str:
        parcel = AnonymousFile(fd=parcel_fd)
        try:
            with self._runs.lock:
                self._check_free()
                call = HostedRun(self._runs.ranks, order, parcel)
                self._runs.note(call.run)
                self._call, self._caller = call, caller
        except BaseException:
            parcel.close()  # An idle host collects no garbage, and the arguments may have gigabytes.
            raise
        call.clients.serve()
        thread = threading.Thread(target=self._see_off, args=(call,), daemon=True)
        self._leaving[thread] = call
        thread.start()
        return str(call.folder)

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
        call.clients.close()
        if call.is_minor and call.is_taken:
            run_folders.remove(call.folder)
        self._leaving.pop(threading.current_thread(), None)

    def _debug(self, rank: int | None) -> None:
        """Open a debugger; where one is open, the client joins it."""
        with self._runs.lock:
            if not self._is_debugging():
                self._check_free()
                self._debugger = HostedDebugger(self._runs.ranks, *self._runs.frames_to_debug(rank))

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
