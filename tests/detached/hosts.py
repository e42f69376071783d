"""Hosts of detached runs, for tests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import psutil

from tests.support.waiting import until

if TYPE_CHECKING:
    from notebook_launcher.detached.attached_run import AttachedRun


def host_of(run: AttachedRun) -> psutil.Process:
    """Return the process that conducts a run, as the run's summary names it; a call has one after a second."""
    file = run.folder / "summary.json"
    until(file.exists)
    summary = json.loads(file.read_text())
    return psutil.Process(summary["kernel"]["pid"])


def lives(process: psutil.Process) -> bool:
    """Return True unless a process has ended; its parent may not have reaped it yet."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
