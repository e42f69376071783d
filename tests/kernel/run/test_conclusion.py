"""The results and the error that a run concludes with, from outcomes that are made up."""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher import LaunchConfig, RankFailedError
from notebook_launcher.engines.engine import SupervisorLost
from notebook_launcher.errors import ResourceError
from notebook_launcher.kernel.calls.call_scope import CallScope
from notebook_launcher.kernel.display.sink import StreamSink
from notebook_launcher.kernel.failures.failure_display import end_line
from notebook_launcher.kernel.hosting import Hosting
from notebook_launcher.kernel.latch import Latch
from notebook_launcher.kernel.plan import make_plan
from notebook_launcher.kernel.run.call_state import CallState, RankOutcome
from notebook_launcher.kernel.run.commands import StopCommand
from notebook_launcher.kernel.run.conclusion import conclude
from notebook_launcher.kernel.run.data import RunData
from notebook_launcher.messaging import messages
from notebook_launcher.messaging.channel import anonymous_file
from tests.support.outcomes import raised_record, returned_record

if TYPE_CHECKING:
    from notebook_launcher.kernel.run.conclusion import RunOutcome


def returned(rank: int, *, unsent: str = "") -> RankOutcome:
    record = returned_record(time.monotonic())._replace(unsent=unsent)
    return RankOutcome.of_record(rank, record, () if unsent else (anonymous_file("value"),))


def raised(rank: int, *, travels: bool = True) -> RankOutcome:
    return RankOutcome.of_record(rank, raised_record(), (anonymous_file("error"),) if travels else ())


def read_error(fd: int, _report: messages.ExceptionReport) -> KeyError:
    os.close(fd)
    return KeyError("boom")


class Ending:
    """The data of a run whose ranks have these outcomes."""

    def __init__(self, *outcomes: RankOutcome, gave_up: bool = False) -> None:
        config = LaunchConfig(num_processes=max(1, len(outcomes)), devices="cpu", timeout=7.0)
        self.state = CallState(config.num_processes or 0, None)
        self.outcomes = outcomes
        for outcome in outcomes:
            self.state.replace(outcome)
        unused: Any = None
        self.hosting = Hosting(
            sink=StreamSink(),
            take_value=os.close,
            take_exception=read_error,
            questions=unused,
            can_ask=False,
            is_raised=False,
            make_origin=unused,
            logs_at="run.logs(rank)",
        )
        self.data = RunData.of_call(make_plan(config), CallScope(), self.hosting, Latch(), in_session=False)
        made: Any = SimpleNamespace(state=self.state, timed_out=False, gave_up=gave_up, went_idle=False, rung=None)
        self.data.attempt = made

    def conclude(self) -> RunOutcome:
        settled: list[bool] = []
        outcome = conclude(self.data, settled.append, self.hosting)
        assert settled == [outcome.error is not None]  # The folder of a silent run that failed is written.
        assert all(known.parcel_fd is None for known in self.outcomes)
        return outcome


def test_value_that_could_not_travel_or_had_no_descriptor_is_no_failure() -> None:
    lost = RankOutcome.of_record(2, returned_record(time.monotonic()), ())
    outcome = Ending(returned(0), returned(1, unsent="a lock cannot travel"), lost).conclude()
    assert (outcome.state, outcome.error) == ("done", None)
    for rank, words in ((1, "a lock cannot travel"), (2, "the notebook's process had no file descriptor left for it")):
        with pytest.raises(Exception, match=words):
            outcome.results[rank]


def test_error_quotes_an_exception_that_cannot_travel() -> None:
    error = Ending(raised(0, travels=False)).conclude().error
    assert isinstance(error, RankFailedError)
    assert "ValueError: boom (rank 0; the exception itself cannot travel)" in str(error)


def test_stop_that_comes_while_values_are_unpacked_is_too_late() -> None:
    ending = Ending(returned(0))

    def stop_and_take(fd: int) -> None:
        ending.data.commands.put(StopCommand())
        os.close(fd)

    ending.hosting = dataclasses.replace(ending.hosting, take_value=stop_and_take)
    outcome = ending.conclude()
    assert ending.data.commands.asked_to_stop
    assert not outcome.asked_to_stop
    assert end_line(outcome, is_raised=False).startswith("done in ")


def test_run_that_was_given_up_ends_with_what_is_known() -> None:
    boom = Ending(returned(0), raised(1), gave_up=True)
    boom.state.note_loss(SupervisorLost("it did not answer"))
    assert isinstance(boom.conclude().error, KeyError)
    stopped = Ending(gave_up=True)
    stopped.data.commands.put(StopCommand(at_once=True, after_step=False))
    stopped.state.note_loss(SupervisorLost("it did not answer"))
    outcome = stopped.conclude()
    assert outcome.state == "stopped"
    assert "one of the launcher was stopped (SIGSTOP)" in str(outcome.error)


LIMITS = {
    errno.EMFILE: " .* 6 descriptors for each rank .*`ulimit -n` .*: use fewer ranks, or raise it in the shell",
    errno.EAGAIN: " The limit on processes may be reached .*`ulimit -u`, .* Use fewer ranks, or stop other processes",
    errno.E2BIG: " The environment is too large for a new process: see os.environ and env=",
    errno.ENOEXEC: "$",
}


@pytest.mark.parametrize("number", LIMITS)
def test_rank_that_the_machine_cannot_hold_comes_with_the_limit_to_look_at(number: int) -> None:
    ending, reason = Ending(), os.strerror(number)
    ending.state.note_not_started(messages.RankNotStarted(rank=0, errno=number, message=reason))
    ending.state.note_loss(SupervisorLost("killed"))  # because of it
    with pytest.raises(ResourceError, match=rf"rank 0 of 1 could not be started: {reason}\.{LIMITS[number]}") as caught:
        raise ending.conclude().error or AssertionError
    assert caught.value.errno == number
