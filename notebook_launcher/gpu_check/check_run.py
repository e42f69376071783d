"""All checks, one after another, each in a process with a time limit."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from notebook_launcher.machine import devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from notebook_launcher.gpu_check.check_kind import Check, Hardware

__all__ = ["Outcome", "count_gpus", "run_all", "run_one"]

LAST_LINES = 12
"""Lines of a failed check's output that are kept."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one check."""

    name: str
    decides: bool
    state: str
    """`PASS`, `FAIL` or `SKIP`."""
    seconds: float
    reason: str
    """Observation, failure, or reason for the skip."""
    output: str = ""
    """The last lines that a failed check printed."""


def count_gpus() -> int:
    """Return how many GPUs launches can use."""
    machine = devices.detect()
    return 0 if machine.why_no_gpu else len(machine.gpus)


def run_all(checks: Sequence[Check], hardware: Hardware, started: Callable[[Check], None]) -> Iterator[Outcome]:
    """Yield the outcome of each check; `started` is called before each."""
    for check in checks:
        started(check)
        yield run_one(check, hardware)


def run_one(check: Check, hardware: Hardware, command: Sequence[str] = ()) -> Outcome:
    """Return the outcome of a check, made in a process of its own.

    Args:
        check: The check to run.
        hardware: The hardware that it runs on.
        command: The program, to which the name, the two fields of the hardware and a file for the outcome are added;
            empty: the package's own.
    """
    if why_not := check.why_not(hardware):
        return Outcome(name=check.name, decides=check.decides, state="SKIP", seconds=0.0, reason=why_not)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        file, printed = Path(folder) / "outcome", Path(folder) / "printed"
        program = command or (sys.executable, "-m", "notebook_launcher.gpu_check.check_process")
        words = (check.name, str(hardware.num_gpus), str(hardware.shares), str(file))
        status = _wait([*program, *words], printed, check.limit)
        seconds = time.monotonic() - began
        state, reason = _read(file, status, check.limit)
        text = printed.read_text(encoding="utf-8", errors="replace")
    output = "\n".join(text.splitlines()[-LAST_LINES:]) if state == "FAIL" else ""
    return Outcome(name=check.name, decides=check.decides, state=state, seconds=seconds, reason=reason, output=output)


def _wait(command: Sequence[str], printed: Path, limit: float) -> int | None:
    """Return the exit status; None if the time was up and the process was ended, with all that it started."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONOPTIMIZE"}  # The checks assert.
    with printed.open("wb") as out:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # The ranks are in sessions of their own, and end when this process, their kernel, does.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _read(file: Path, status: int | None, limit: float) -> tuple[str, str]:
    if status is None:
        return "FAIL", f"not done after {limit:g} s"
    try:
        state, reason = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "FAIL", f"its process ended with status {status}"
    return state, reason
