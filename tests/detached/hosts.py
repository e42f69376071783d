"""Hosts of detached runs, and what the runs do, for tests."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from notebook_launcher import report
from tests.support.waiting import until

if TYPE_CHECKING:
    from notebook_launcher.detached.attached_run import AttachedRun


class OwnError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


def fail() -> None:
    raise OwnError(7)


def wait_for(gate: str) -> torch.Tensor:
    print("waits", flush=True)
    report(step=1, loss=0.5)
    while not Path(gate).exists():
        time.sleep(0.02)
    return torch.arange(3)


def host_of(run: AttachedRun) -> psutil.Process:
    """Return the process that conducts a run, as the run's summary names it; a call has one after a second."""
    file = run.folder / "summary.json"
    until(file.exists)
    summary = json.loads(file.read_text())
    return psutil.Process(summary["kernel"]["pid"])


def lives(process: psutil.Process) -> bool:
    """Return True unless a process has ended; its parent may not have reaped it yet."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
