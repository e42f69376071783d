"""The handle on a detached session in a kernel or script that is attached to it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher import travel
from notebook_launcher.detached.attached_output import AttachedOutput, AttachedQuestions
from notebook_launcher.detached.attached_run import AttachedRun
from notebook_launcher.detached.host_socket import HostConnection, HostSilentError, continue_host
from notebook_launcher.detached.requests import CallOrder
from notebook_launcher.detached.session_folders import session_name_of
from notebook_launcher.errors import CallOrderError
from notebook_launcher.history import run_folders
from notebook_launcher.history.run_folders import SESSION_SOCKET, is_session
from notebook_launcher.kernel.calls import checks
from notebook_launcher.kernel.calls.call_scope import EVERYWHERE, CallScope
from notebook_launcher.kernel.calls.everywhere import setup_steps
from notebook_launcher.kernel.calls.origin import source_with_needs
from notebook_launcher.kernel.cells.session_cells import SessionCells
from notebook_launcher.kernel.display.sink import make_sink, teller
from notebook_launcher.kernel.failures.post_mortem import DebugMagic, check_answers
from notebook_launcher.kernel.latch import AWAKE_EVERY, Latch
from notebook_launcher.travel import cells

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.detached.requests import SessionState
    from notebook_launcher.history.schema import RunSnapshot
    from notebook_launcher.kernel.calls.call_scope import TakesDisplay
    from notebook_launcher.kernel.results import Results
    from notebook_launcher.kernel.run.conclusion import RunOutcome


class AttachedSession(SessionCells):
    """A session whose ranks outlive this kernel: `Session(..., detached=True)` and `attach_session(...)` return it.

    It has the methods of a `Session`. The ranks belong to a host, which carries out one call at a time of
    all attached kernels and scripts. The ranks keep their memory until one of them calls `close`.

    The first interrupt of a call releases the cell, and the call continues; a second within 3 seconds stops the call.
    At the end of a `with` block the session is closed, unless the block ended by an exception or an interrupt.
    """

    def __init__(self, folder: Path, *, setup: Callable[[], object] | str | None = None) -> None:
        super().__init__()
        self._folder = folder
        self._is_closed = False
        self._latest: AttachedCall | None = None
        """The handle on the latest call that was made or asked for here."""
        self._magic = DebugMagic(weakref.WeakMethod(self._debug_own))
        """`%debug`, from the first failure on."""
        weakref.finalize(self, DebugMagic.remove, self._magic)
        state = self._state()
        self._num_processes, self._summary = state.num_processes, state.summary
        self._config = dataclasses.replace(state.config, setup=setup)  # A host cannot have code of the notebook.

    @property
    def id(self) -> str:
        """Identifier of the session: the time, the name, six random digits."""
        return self._folder.name

    @property
    def name(self) -> str:
        """Name of the session."""
        return session_name_of(self._config)

    @property
    def num_processes(self) -> int:
        """Number of ranks."""
        return self._num_processes

    @property
    def config(self) -> LaunchConfig:
        """The options of all calls."""
        return self._config

    @property
    def is_busy(self) -> bool:
        """True while a call of any client runs."""
        return self._state().is_busy

    @property
    def latest(self) -> AttachedCall | None:
        """Handle on the latest call of any client, which may still run; None if there is none, or nothing is left."""
        folder = self._state().latest
        if not folder:
            return None
        if self._latest is None or str(self._latest.folder) != folder:
            try:
                self._latest = AttachedCall(Path(folder), self._config)
            except LookupError:
                return None
        return self._latest

    def __repr__(self) -> str:
        try:
            state = "busy" if self._state().is_busy else "open"
        except HostSilentError:
            state = "its host does not answer"
        except CallOrderError:
            state = "closed"
        return f"<AttachedSession {self.name!r} of {self._summary}: {state}>"

    def __enter__(self) -> AttachedSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif not self._is_closed:
            way_back = f'attach_session("{self._config.name or self.id}")'
            make_sink().text("stdout", f"the session stays open: {way_back} reconnects to it\n")

    @checks.arguments_by_name
    def run(
        self, fn: Callable[..., Any], *, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Results:
        """Run a function on every rank and return the results; raises the same exceptions as `notebook_launch`."""
        checks.check_not_in_rank("Session.run")
        return self._start(fn, args, kwargs, in_cell=True).wait_in_cell()

    @checks.arguments_by_name
    def launch(
        self, fn: Callable[..., Any], *, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> AttachedCall:
        """Run a function on every rank without waiting, and return the call's handle; one call at a time."""
        checks.check_not_in_rank("Session.launch")
        call = self._start(fn, args, kwargs, in_cell=False)
        call.follow_in_cell()
        return call

    def debug(self, rank: int | None = None) -> None:
        """Open a debugger in a rank's frames, as `Session.debug`; join it if another client has opened one.

        Raises:
            CallOrderError: There is nothing to look into, or no user can answer the prompt; the message gives the
                reason.
            KeyboardInterrupt: The interrupt button was pressed at the prompt.
        """
        checks.check_not_in_rank("Session.debug")
        check_answers("session.debug()")
        self._request("debug", rank)
        AttachedDebugger(self._folder, self._config, self._request).run()

    def _debug_own(self, error: BaseException) -> bool:
        """Open the debugger if the latest call made here raised this exception; return False if it did not."""
        if self._latest is None or not self._latest.wait(0) or self._latest.exception() is not error:
            return False
        self.debug()
        return True

    def forget(self) -> None:
        """Release what the ranks keep of the last call's failure: its frames, with their tensors. Idempotent."""
        self._request("forget")

    def close(self) -> None:
        """Stop the running call and end the ranks, for all clients; idempotent.

        A host that is stopped (SIGSTOP) is continued for it.
        """
        if not self._is_closed:
            continue_host(self._folder)
            try:
                self._request("close")
            except HostSilentError:
                raise
            except (CallOrderError, OSError, EOFError):  # Another client has closed it.
                pass
        self._is_closed = True
        self._magic.remove()

    def _start(self, fn: Any, args: Any, kwargs: Any, *, in_cell: bool, scope: CallScope = EVERYWHERE) -> AttachedCall:
        launcher = "session.run(fn" if in_cell else "session.launch(fn"
        call = checks.check_call(fn, args, kwargs, launcher=launcher, steps=setup_steps(self._config))
        order = CallOrder(scope=scope.describe(call), source=source_with_needs(fn), places=cells.places())
        parcel = travel.pack_call(call, tell=teller(self._config))
        with contextlib.closing(parcel), self._connected() as connection:
            folder = connection.hand_over(parcel.fileno(), "begin", order, os.getpid())
        self._latest = AttachedCall(Path(folder), self._config, scope.displays, self._magic.install)
        return self._latest

    @property
    def _is_at_rest(self) -> bool:
        return not self._is_closed and self._state().is_at_rest

    def _state(self) -> SessionState:
        state: SessionState = self._request("state")
        return state

    def _request(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with self._connected() as connection:
            return connection.request(name, *args, **kwargs)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[HostConnection]:
        try:
            connection = HostConnection(self._folder, SESSION_SOCKET)
        except HostSilentError:
            raise
        except OSError:
            raise CallOrderError(self._why_gone()) from None
        with contextlib.closing(connection):
            yield connection

    def _why_gone(self) -> str:
        if run_folders.is_run(self._folder) and is_session(self._folder):
            return (
                f"the host process of session {self.id} has ended: it was killed, or its machine, login session or "
                "container ended. Its ranks ended with it. Open a new session: Session(4, name=..., detached=True)."
            )
        return f"session {self.id} is closed. Open a new one: Session(4, name=..., detached=True)."


# --------------------------------------------------------------------------------------------------------------------
# The handle on a call of a detached session.


NOTHING: dict[str, Any] = {
    "logs": "",
    "log_order": [],
    "metrics_since": ([], 0),
    "pictures_since": ([], 0),
}
"""Data of a call that left no folder, because its ranks wrote and reported nothing."""


class AttachedCall(AttachedRun):
    """A call that the host of a detached session conducts.

    Args:
        folder: The call's folder.
        config: The session's options.
        displays: Takes rich output that a cell on ranks shows at its end.
        failed: Called once the call is known to have failed.
    """

    def __init__(
        self,
        folder: Path,
        config: LaunchConfig,
        displays: TakesDisplay | None = None,
        failed: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(folder)
        self._failed = failed
        self._config = config
        self._displays = displays
        self._final: RunSnapshot | None = None
        """The last snapshot of a call whose folder the host has removed."""

    @property
    def config(self) -> LaunchConfig:
        """The options as given."""
        return self._config

    def _make_output(self, since: float | None) -> AttachedOutput:
        return AttachedOutput(self._folder, self._config, since, self._displays)

    def _opened(self) -> RunOutcome:
        is_first = self._outcome is None
        outcome = super()._opened()
        if is_first:
            if outcome.error is not None:
                self._failed()
            if self._ending is not None and self._ending.num_unopened(outcome):
                return outcome  # The folder stays, for a later try.
            # The host may be gone: then the folder stays.
            with contextlib.suppress(OSError, EOFError, CallOrderError):
                self._final = self._request("take_results")
                if self._final is not None:
                    outcome.results.folder = None
        return outcome

    def _ask(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        if self._final is None:
            return super()._ask(method, *args, **kwargs)
        if method == "logs_since":
            return "", args[1]
        return self._final if method == "snapshot" else NOTHING[method]


# --------------------------------------------------------------------------------------------------------------------
# The debugger of a detached session in a cell: shows its output, and asks the user at its prompt.


class AttachedDebugger:
    """The debugger that is open in a session's host."""

    def __init__(self, folder: Path, config: LaunchConfig, request: Callable[..., Any]) -> None:
        self._request = request
        self._questions = AttachedQuestions(request)
        self._output = AttachedOutput(folder, config, None, socket_name=SESSION_SOCKET)
        self._over: Latch[None] = Latch()

    def run(self) -> None:
        """Answer the prompt until a user leaves the debugger.

        Raises:
            KeyboardInterrupt: The user left by an interrupt.
            CallOrderError: The rank or the host died.
        """
        thread = threading.Thread(target=self._follow, name="notebook-launcher debugger", daemon=True)
        thread.start()
        num_interrupts = 0
        while not self._over.is_set:
            try:
                with self._questions.served():
                    self._questions.serve(AWAKE_EVERY)  # Answers the prompt, if there is one.
                continue
            except KeyboardInterrupt:
                num_interrupts += 1
            self._request("interrupt", again=num_interrupts > 1)
        thread.join()
        fault = self._request("end")
        if fault is not None:
            raise fault

    def _follow(self) -> None:
        try:
            self._output.follow(self._questions)
        finally:
            self._over.set()
            self._questions.note(())
            self._questions.wake()
