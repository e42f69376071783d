"""`doctor()`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import time
from typing import Any

from notebook_launcher.diagnosis import facts
from notebook_launcher.diagnosis.finding import Diagnosis, Finding
from notebook_launcher.errors import LaunchError
from notebook_launcher.kernel.calls.checks import check_not_in_rank
from notebook_launcher.kernel.session import Session
from notebook_launcher.wording import format_bytes, format_seconds, redact


def doctor(*, launch: bool = True) -> Diagnosis:
    """Look at this machine and this process as a launch meets them, and return each fact with what to type.

    A verdict stands only on something that was measured or tried: versions, the GPUs with their users, limits,
    look-ups of names, a fork of this process, and at the end a real launch of two ranks with reductions, data-loader
    workers and a stop. `notebook-launcher env` is the same in a terminal.

    Args:
        launch: False to leave out the launch, which takes some seconds.

    Returns:
        The findings: a table in a notebook, text elsewhere; true if there is no problem.

    Raises:
        CallOrderError: The call was made inside a rank.
    """
    check_not_in_rank("doctor")
    found = [*facts.look_at_software(), *facts.look_at_gpus(), *facts.look_at_limits(), *facts.look_at_names()]
    found += facts.look_at_process()
    found += try_launch() if launch else []
    return Diagnosis(tuple(dataclasses.replace(finding, fact=redact(finding.fact)) for finding in found))


# --------------------------------------------------------------------------------------------------------------------
# A real launch of two ranks: start, reductions, data-loader workers, stop.


AREA = "a launch of 2 ranks"
SIZES = (1_000_000, 16_000_000, 64_000_000)
"""Bytes of the tensors that are reduced."""
ROUNDS = 3
NUM_WORKERS = 2
STARTED_WITHIN = 30.0


def try_launch() -> list[Finding]:
    """Launch two ranks and return what was measured; a failure is a problem, and ends the trial."""
    findings: list[Finding] = []
    began = time.monotonic()
    try:
        with Session(2, output="none", monitor=False, runs_folder=None, timeout=120) as session:
            session.run(int)  # The launch itself is what is tried.
            summary = repr(session).removeprefix("<Session of ").partition(", random state")[0]
            findings.append(_good("start", f"{format_seconds(time.monotonic() - began)}: {summary}"))
            for size in SIZES:
                seconds = max(session.run(_reduce, args=(size,)))
                rate = f"{format_seconds(seconds)}, {format_bytes(size / seconds)}/s"
                findings.append(_good(f"all_reduce of {format_bytes(size)}", rate))
            loaded = f"delivered their first batch after {format_seconds(max(session.run(_load)))}"
            findings.append(_good("loader workers", f"{NUM_WORKERS} for each rank {loaded}"))
            findings.append(_good("stop", _stop(session)))
    except Exception as error:  # whatever fails here is what the user wants to know
        findings.append(failure_finding(error))
    return findings


def _good(name: str, fact: str) -> Finding:
    return Finding(AREA, name, fact, "good")


def failure_finding(error: Exception) -> Finding:
    """Return the finding about the error of the trial."""
    text = f"{type(error).__name__}: {error}"
    advice = (
        "follow the error's advice; if there is none, send the output of `notebook-launcher env --json` with a report"
        if isinstance(error, LaunchError)
        else "the error is raised inside a rank: see the versions and variables above"
    )
    return Finding(AREA, "failed", text, "problem", advice)


def _stop(session: Session) -> str:
    # The stop reports where the ranks were, which is not wanted here. A run's output goes where it was launched.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run = session.launch(_reduce_for_ever)
        deadline = time.monotonic() + STARTED_WITHIN
        while not run.metrics and not run.wait(0.01) and time.monotonic() < deadline:
            pass
        began = time.monotonic()
        rung = run.stop()
    return f"ended ranks in an endless loop of collectives within {format_seconds(time.monotonic() - began)} ({rung})"


def _device() -> Any:
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _reduce(size: int) -> float:
    """Return the fewest seconds that a reduction takes."""
    import torch
    import torch.distributed as dist

    device = _device()
    tensor = torch.ones(size // 4, device=device)
    seconds = []
    for _ in range(1 + ROUNDS):  # The first one warms up.
        dist.barrier()
        began = time.monotonic()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
    return min(seconds[1:])


def _load() -> float:
    """Return the seconds until the workers of a data loader deliver their first batch."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    began = time.monotonic()
    loader = DataLoader(TensorDataset(torch.ones(64, 1024)), batch_size=16, num_workers=NUM_WORKERS)
    assert len(list(loader)) == 4
    return time.monotonic() - began


def _reduce_for_ever() -> None:
    import torch
    import torch.distributed as dist

    from notebook_launcher.reporting import report

    tensor = torch.ones(1, device=_device())
    report(step=0, started=1.0)
    while True:
        dist.all_reduce(tensor)
