"""A run in its host: the run itself, its journal, and the socket by which clients reach it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher.detached import host_socket
from notebook_launcher.detached.ending import KeptParcels, write_ending
from notebook_launcher.detached.host_socket import Clients
from notebook_launcher.detached.journal import Journal, write_output
from notebook_launcher.detached.session_folders import no_folder
from notebook_launcher.errors import CallOrderError
from notebook_launcher.kernel.calls.call_scope import OutgoingCall
from notebook_launcher.kernel.calls.origin import Origin, describe_environment
from notebook_launcher.kernel.failures.post_mortem import PostMortem
from notebook_launcher.kernel.hosting import Hosting
from notebook_launcher.kernel.latch import Latch
from notebook_launcher.kernel.run.conduct import RunConduct
from notebook_launcher.kernel.run.handle import Run
from notebook_launcher.travel import cells

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.detached.requests import CallOrder
    from notebook_launcher.history.schema import RunSnapshot
    from notebook_launcher.kernel.ranks import Ranks
    from notebook_launcher.kernel.run.data import RunData
    from notebook_launcher.messaging.channel import AnonymousFile


GOODBYE = 5.0
"""Seconds after the end of the run for which clients may fetch the rest of its output. Its ending is in the folder."""

OF_THIS_PROCESS = frozenset({"last_line", "outcome", "start"})
"""Members of `Run` that belong to the process of its ranks: a client has none of them."""
OWN = frozenset(
    {"add_done_callback", "exception", "id", "name", "report", "result", "seed", "state", "wait", "wait_in_cell"}
)
"""What a client does by itself: it waits for the run, and has the rest from a snapshot or the run's folder."""
ANSWERED = frozenset(name for name in dir(Run) if not name.startswith("_")) - OWN - OF_THIS_PROCESS
"""Methods and attributes of the run for which a client may ask, by name."""


class HostedRun:
    """A run that this host conducts, with the threads that serve its clients; its end closes the call's parcel."""

    def __init__(self, ranks: Ranks, order: CallOrder, parcel: AnonymousFile) -> None:
        self._journal = Journal()
        self.is_taken = False
        self.released = threading.Event()
        """Set once no client is expected to come for the results."""
        self.began = time.time()
        scope = order.scope
        if scope.displays is not None:
            scope = dataclasses.replace(scope, displays=functools.partial(self._journal.divert, scope.displays))
        cells.keep_places(order.places)
        ranks.start()
        hosting = Hosting(
            sink=self._journal,
            # `_kept` comes later, with the folder; parcels come at the end of the run.
            take_value=lambda fd: self._kept.keep_value(fd),  # noqa: PLW0108
            take_exception=lambda fd, report: self._kept.keep_exception(fd, report),  # noqa: PLW0108
            questions=self._journal,
            can_ask=True,
            is_raised=False,
            make_origin=lambda: Origin(order.source, order.environment or describe_environment()),
            logs_at="attach({id!r}).logs(rank)",
        )
        # Its ranks alone unpack the function.
        conduct = RunConduct(ranks, OutgoingCall(None, parcel), scope, hosting, Latch())
        conduct.announce()
        conduct.data.output.picture_from = 0.0  # The last line goes to the clients, beside the outcome.
        self._journal.connect(conduct.command, conduct.waits_for)
        try:
            self.folder = conduct.make_folder()
            """The run's folder, with the socket."""
            self.clients = Clients(self.folder, self._find)
        except OSError as error:
            raise no_folder(ranks.plan.config, error) from None
        self._kept = KeptParcels(self.folder)
        conduct.begin()
        self.run = Run(conduct)

    def conclude(self) -> None:
        """Wait for the end of the run; keep its ending and output. Stop the run if its folder is deleted meanwhile."""
        while not self.run.wait(host_socket.LOOK_EVERY):
            if self.clients.are_cut_off:
                # No client could stop the run any more, and its results would have no place.
                self._journal.text("stderr", f"{self.folder} was deleted, so the run is stopped\n")
                self.run.stop()
        outcome = self.run.outcome
        assert outcome is not None
        try:
            write_ending(self.folder, outcome, self.run.last_line)
        except OSError as error:
            self._journal.text("stderr", f"the results could not be kept in {self.folder}: {error.strerror}\n")
        self._journal.finish()
        write_output(self.folder, self._journal.news(0, 0.0))

    def await_clients(self, *, is_expected: bool = False) -> None:
        """Wait until the clients have left; one that `is_expected` has time to come and to open the results."""
        end = time.monotonic() + GOODBYE
        if is_expected:
            self.released.wait(GOODBYE)
        self.clients.await_leave(max(0.0, end - time.monotonic()))

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

    def _find(self, name: str) -> Callable[..., object]:
        if name == "take_results":
            return self._take_results
        if name not in ANSWERED and name not in ("news", "answer"):
            raise TypeError(f"a host does not answer {name!r}")
        member: Any = getattr(self.run if name in ANSWERED else self._journal, name)
        return member if callable(member) else lambda: member

    def _take_results(self) -> RunSnapshot | None:
        """Note that the client has opened the results; return the last snapshot if the folder goes now."""
        final = self.run.snapshot() if self.is_minor else None
        self.is_taken = True
        self.released.set()
        return final


# --------------------------------------------------------------------------------------------------------------------
# A debugger in a rank of a detached session, whose prompt clients of the host answer.


class HostedDebugger:
    """One debugger in one rank, in a thread of the host until a client leaves it."""

    def __init__(self, ranks: Ranks, data: RunData, rank: int) -> None:
        self.rank = rank
        # The client that opens the debugger answers, and may be later than the first prompt.
        self.journal = Journal(is_awaited=True)
        self._debugger = PostMortem(ranks, data, rank, self.journal)
        self.journal.connect(self._debugger.reply, self._debugger.waits_for)
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="notebook-launcher debugger", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """True once a client has left the debugger, or the rank has died."""
        return not self._thread.is_alive()

    def interrupt(self, *, again: bool) -> None:
        """Leave the debugger at its prompt, or end the command that runs in it; `again`: end the rank."""
        self._debugger.interrupt(again)

    def end(self) -> BaseException | None:
        """Wait for the end of the debugger; return its exception."""
        self._thread.join()
        return self._fault

    def _run(self) -> None:
        try:
            self._debugger.serve(self.journal)
        except BaseException as fault:  # the client raises it
            self._fault = fault
        finally:
            self.journal.finish()


# --------------------------------------------------------------------------------------------------------------------
# Preemption: the signal by which a cluster announces to a host that it needs the machine.


def on_preemption(config: LaunchConfig, act: Callable[[], object]) -> None:
    """Call a function at the signal that the options name; at SIGTERM if a run resumes and they name none."""
    name = config.preemption_signal or ("SIGTERM" if config.resume is not None else None)
    if name is not None:
        signal.signal(signal.Signals[name], lambda *_: act())
