"""Checks of runs that end out of turn while a peer waits in a collective."""

from __future__ import annotations

import datetime as dt
import os
import signal
import time
from typing import TYPE_CHECKING

from notebook_launcher import Session, notebook_launch
from notebook_launcher.errors import LaunchError
from notebook_launcher.gpu_check.check_kind import Check, Hardware
from notebook_launcher.gpu_check.several_ranks import where

if TYPE_CHECKING:
    import torch

__all__ = ["CHECKS"]

SECONDS_TO_FAIL = 10.0
SHORT_LIMIT = 3.0
"""Seconds that a collective may take before torch ends it."""


def _reduce(device: torch.device) -> None:
    """Enter an all-reduce, and on a GPU wait for its end."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize()


def _fail(how: str) -> None:
    import torch
    import torch.distributed as dist

    from notebook_launcher import Accelerator

    device = Accelerator().device
    dist.all_reduce(torch.ones(1, device=device))
    if dist.get_rank() == 0:
        if how == "raise":
            raise ValueError("on purpose")
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGSEGV)
    _reduce(device)


def _failures(hardware: Hardware) -> str:
    slowest = 0.0
    for how, error in (("raise", ValueError), ("exit", LaunchError), ("segfault", LaunchError)):
        began = time.monotonic()
        try:
            notebook_launch(_fail, args=(how,), **hardware.ranks(2))
        except error:
            pass
        else:
            raise AssertionError(f"{how}: the run did not fail")
        slowest = max(slowest, time.monotonic() - began)
    # With the start of the ranks, which takes the most of it.
    assert slowest < 3 * SECONDS_TO_FAIL, f"an error took {slowest:.1f} s"
    return f"slowest {slowest:.1f} s, start included"


def _wait_for_ever() -> None:
    import torch.distributed as dist

    from notebook_launcher import Accelerator, report

    device = Accelerator().device
    report(begun=1)
    if dist.get_rank() == 0:
        _reduce(device)
    time.sleep(100)


def _session_after_interrupt(hardware: Hardware) -> str:
    with Session(**hardware.ranks(2)) as session:
        session.run(where)
        run = session.launch(_wait_for_ever)
        while len(run.metrics) < 2:
            assert not run.wait(0.01), run.exception()
        began = time.monotonic()
        rung = run.stop()
        seconds = time.monotonic() - began
        session.run(where)
    return f"stopped by {rung} in {seconds:.1f} s, next call works"


def _return_early() -> None:
    import torch.distributed as dist

    from notebook_launcher import Accelerator

    device = Accelerator().device
    if dist.get_rank() == 0:
        _reduce(device)


def _early_return(hardware: Hardware) -> str:
    began = time.monotonic()
    try:
        notebook_launch(_return_early, **{**hardware.ranks(2), "timeout": SECONDS_TO_FAIL})
    except Exception as error:  # noqa: BLE001 - gloo's error, or the time limit
        return f"{type(error).__name__} after {time.monotonic() - began:.1f} s"
    raise AssertionError("a rank that waited for a returned rank came out of its collective")


def _outlast_the_watchdog() -> None:
    import torch
    import torch.distributed as dist

    from notebook_launcher import Accelerator, InitProcessGroupKwargs

    limit = dt.timedelta(seconds=SHORT_LIMIT)
    device = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=limit)]).device
    dist.all_reduce(torch.ones(1, device=device))
    if dist.get_rank() == 0:
        _reduce(device)
    time.sleep(100)


def _session_after_watchdog(hardware: Hardware) -> str:
    with Session(**hardware.ranks(2)) as session:
        session.run(where)
        try:
            session.run(_outlast_the_watchdog)
        except Exception as error:  # noqa: BLE001 - gloo's error, or the rank's end by the watchdog
            said = type(error).__name__
        else:
            raise AssertionError("a collective that a rank never enters did not fail")
        session.run(where)
    return f"{said}, next call works"


CHECKS = (
    Check(name="errors while a peer waits", run=_failures, num_gpus=2, decides=True),
    Check(name="session after an interrupt in a collective", run=_session_after_interrupt, num_gpus=2),
    Check(name="session after a collective's time limit", run=_session_after_watchdog, num_gpus=2),
    Check(name="early return of one rank", run=_early_return, num_gpus=2),
)
