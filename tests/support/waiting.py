"""Waiting for a condition, and for no longer than a run lasts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.kernel.run.handle import Run

DEADLOCK = 300
"""Seconds after which nothing will happen any more: a busy machine takes a minute to import what ranks need."""


def until(condition: Callable[[], Any], run: Run | None = None) -> Any:
    """Wait for a condition and return its value; if the run ends before, raise its exception or fail."""
    end = time.monotonic() + DEADLOCK
    while not (value := condition()):
        if run is not None and run.wait(0):
            run.result()
            pytest.fail("the run was over before")
        assert time.monotonic() < end, run
        time.sleep(0.005)
    return value
