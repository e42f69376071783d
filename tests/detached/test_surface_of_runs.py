"""The surface that all handles on runs share is written once; each handle has all of it."""

from __future__ import annotations

import pytest

from notebook_launcher.detached import hosted_run
from notebook_launcher.detached.attached_run import AttachedRun
from notebook_launcher.history.schema import RunReader
from notebook_launcher.kernel.run.handle import AnyRun, Run, attributes_of_runs, methods_of_runs


def test_surface_has_the_methods_of_readers_and_of_handles():
    assert {"snapshot", "logs_since", "stop", "result"} <= methods_of_runs()
    assert {"id", "state", "metrics"} <= attributes_of_runs()


@pytest.mark.parametrize("handle", [Run, AttachedRun])
def test_handle_defines_the_whole_surface(handle: type) -> None:
    # A handle inherits from the protocol, so a method that it lacked would return None.
    inherited = {
        name
        for name in methods_of_runs() | attributes_of_runs()
        if getattr(handle, name) in (getattr(RunReader, name, None), getattr(AnyRun, name))
    }
    assert not inherited


def test_clients_may_call_all_but_what_they_do_without_the_host():
    assert methods_of_runs() > hosted_run.OWN_METHODS
    assert attributes_of_runs() > hosted_run.OWN_ATTRIBUTES
    assert hosted_run.METHODS.isdisjoint(hosted_run.OWN_METHODS)
