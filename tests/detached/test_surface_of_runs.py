"""A handle on a detached run has the public methods and attributes of `Run`, and its host answers for them."""

from __future__ import annotations

from notebook_launcher.detached import hosted_run
from notebook_launcher.detached.attached_run import AttachedRun
from notebook_launcher.kernel.run.handle import Run


def surface_of(handle: type) -> set[str]:
    return {name for name in dir(handle) if not name.startswith("_")}


def test_attached_run_has_all_that_a_run_has():
    assert surface_of(Run) - surface_of(AttachedRun) == hosted_run.OF_THIS_PROCESS


def test_clients_may_ask_for_all_but_what_they_do_without_the_host():
    assert surface_of(Run) > hosted_run.OWN
    assert {"snapshot", "logs_since", "stop", "metrics"} <= hosted_run.ANSWERED
