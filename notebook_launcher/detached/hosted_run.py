"""A run in its host: the run itself, its journal, and the socket by which clients reach it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher.detached import host_socket
from notebook_launcher.detached.clients import Clients
from notebook_launcher.detached.ending import KeptParcels, write_ending
from notebook_launcher.detached.host_questions import HostQuestions
from notebook_launcher.detached.journal import Journal
from notebook_launcher.detached.kept_output import write_output
from notebook_launcher.detached.requests import Answered, AnswerQuestion, Ask, Follow, RequestRefused, TakeResults
from notebook_launcher.detached.session_folders import listen_or_remove, no_folder
from notebook_launcher.errors import CallOrderError
from notebook_launcher.history.host_files import SOCKET
from notebook_launcher.kernel.calls.origin import Origin, describe_environment
from notebook_launcher.kernel.calls.outgoing_call import OutgoingCall
from notebook_launcher.kernel.hosting import Hosting
from notebook_launcher.kernel.latch import Latch
from notebook_launcher.kernel.run.any_run import attributes_of_runs, methods_of_runs
from notebook_launcher.kernel.run.conduct import RunConduct
from notebook_launcher.kernel.run.handle import Run
from notebook_launcher.kernel.run.thread import RunThread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from notebook_launcher.detached.clients import Caller
    from notebook_launcher.kernel.calls.call_scope import CallScope
    from notebook_launcher.kernel.ranks import Ranks
    from notebook_launcher.messaging.channel import AnonymousFile

__all__ = ["HostedRun"]

GOODBYE = 5.0
"""Seconds after the end of the run for which clients may fetch the rest of its output. Its ending is in the folder."""

OWN_METHODS = frozenset({"add_done_callback", "exception", "report", "result", "wait", "wait_in_cell"})
"""Methods of a client that are no call in the host: by which it waits for a run, and `report`, which reads it."""
OWN_ATTRIBUTES = frozenset({"id", "name", "seed", "state"})
"""Attributes that a client has from the run's folder, or from a snapshot."""
METHODS = methods_of_runs() - OWN_METHODS
"""Methods of the run that a client may call, by name."""
ATTRIBUTES = attributes_of_runs() - OWN_ATTRIBUTES
"""Attributes of the run that a client may read, by name."""


class HostedRun:
    """A run that this host conducts, with the threads that serve its clients.

    Args:
        ranks: The ranks that serve the run.
        scope: The call, as the kernel described it.
        parcel: The packed call, which is closed at the end of the run.
        source: Source of the function, as the kernel read it.
        environment: Versions, commit and variables of the kernel; None: the host's own.
    """

    def __init__(
        self,
        ranks: Ranks,
        scope: CallScope,
        parcel: AnonymousFile,
        source: str,
        environment: Mapping[str, Any] | None = None,
    ) -> None:
        self._questions = HostQuestions()
        self._journal = Journal(self._questions.pending)
        self.is_taken = False
        """True once a client has opened the results."""
        self._released = threading.Event()
        """Set once no client is expected to come for the results."""
        self.began = time.time()
        if scope.displays is not None:
            scope = dataclasses.replace(scope, displays=functools.partial(self._journal.divert, scope.displays))
        ranks.start()
        hosting = self._hosting(source, environment)
        conduct = RunConduct(ranks, OutgoingCall(None, parcel), scope, hosting, Latch())
        conduct.announce()
        thread = RunThread(conduct)
        thread.data.output.use_picture_from(0.0)  # The last line goes to the clients, beside the outcome.
        self._questions.connect(self._journal.asked, thread.command, thread.waits_for)
        try:
            self.folder = thread.make_folder()
            """The run's folder, with the socket."""
            listener = listen_or_remove(self.folder, SOCKET)
        except OSError as error:
            raise no_folder(ranks.plan.config, error) from None
        self._kept = KeptParcels(self.folder)
        self._clients = Clients(listener, self._answer)
        self._socket_watch = host_socket.SocketWatch(self.folder)
        thread.begin()
        self.run = Run(thread)

    def _hosting(self, source: str, environment: Mapping[str, Any] | None) -> Hosting:
        """Return the hosting of a run whose function only its ranks unpack."""
        return Hosting(
            sink=self._journal,
            # `_kept` comes later, with the folder; parcels come at the end of the run.
            take_value=lambda fd: self._kept.keep_value(fd),  # noqa: PLW0108
            take_exception=lambda fd, report: self._kept.keep_exception(fd, report),  # noqa: PLW0108
            questions=self._questions,
            can_ask=True,
            is_raised=False,
            make_origin=lambda: Origin(source, describe_environment() if environment is None else environment),
            logs_at="attach({id!r}).logs(rank)",
        )

    def serve(self) -> None:
        """Begin to serve clients."""
        self._clients.serve()

    def conclude(self) -> None:
        """Wait for the end of the run; keep its ending and output. Stop the run if its folder is deleted meanwhile."""
        while not self.run.wait(self._socket_watch.LOOK_EVERY):
            if self._socket_watch.is_gone:
                # No client could stop the run any more, and its results would have no place.
                self._journal.text("stderr", f"{self.folder} was deleted, so the run is stopped\n")
                self.run.stop()
        self._keep_ending()
        self._journal.finish()
        write_output(self.folder, self._journal.news(Follow(position=0, patience=0.0)))

    def await_clients(self, *, is_expected: bool = False) -> None:
        """Wait until the clients have left.

        Args:
            is_expected: True to leave the client that began the call time to come and to open the results.
        """
        end = time.monotonic() + GOODBYE
        if is_expected:
            self._released.wait(GOODBYE)
        self._clients.await_leave(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """Remove the socket."""
        (self.folder / SOCKET).unlink(missing_ok=True)
        self._socket_watch.close()
        self._clients.close()

    def release(self) -> None:
        """Expect no client for the results any more."""
        self._released.set()

    @property
    def is_minor(self) -> bool:
        """True if the run is over, was too short to be recorded, and its ranks had no output."""
        outcome = self.run.outcome
        return outcome is not None and outcome.results.folder is None

    def save_and_stop(self) -> None:
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

    def _answer(self, request: object, _caller: Caller) -> object:
        match request:
            case Follow():
                return self._journal.news(request)
            case AnswerQuestion(key=key, text=text):
                return Answered(value=self._questions.answer(key, text))
            case TakeResults():
                final = self.run.snapshot() if self.is_minor else None
                self.is_taken = True
                self.release()
                return Answered(value=final)
            case Ask(name=name, args=args, kwargs=kwargs) if name in METHODS:
                method: Callable[..., Any] = getattr(self.run, name)
                return Answered(value=method(*args, **kwargs))
            case Ask(name=name) if name in ATTRIBUTES:
                return Answered(value=getattr(self.run, name))
        return RequestRefused(error=TypeError(f"a host does not answer {request!r}"))
