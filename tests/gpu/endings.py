"""Checks of runs that end out of turn while a peer waits in a collective."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import time

from notebook_launcher import Session, launch
from notebook_launcher.gpu_check.checks import SECONDS_TO_REPORT, Check, Hardware, reduce, where
from notebook_launcher.machine.memory import SHARED_MEMORY

SHORT_LIMIT = 3.0
"""Seconds that a collective may take before torch ends it."""
SHORT_HEARTBEAT = 10
"""Seconds, in place of 8 minutes, after which NCCL's monitor of a rank ends the process of a watchdog that is stuck."""
NUM_BYTES = 256 << 20


def _wait_for_ever() -> None:
    import torch.distributed as dist

    from notebook_launcher import Accelerator, report

    device = Accelerator().device
    report(begun=1)
    if dist.get_rank() == 0:
        reduce(device)
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
        assert seconds < 2 * SECONDS_TO_REPORT, f"the stop took {seconds:.1f} s"
        session.run(where)
    return f"stopped by {rung} in {seconds:.1f} s, next call works"


def _outlast_the_watchdog() -> None:
    import torch
    import torch.distributed as dist

    from notebook_launcher import Accelerator, InitProcessGroupKwargs

    limit = dt.timedelta(seconds=SHORT_LIMIT)
    device = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=limit)]).device
    dist.all_reduce(torch.ones(1, device=device))
    if dist.get_rank() == 0:
        reduce(device)
    time.sleep(100)


def _session_after_watchdog(hardware: Hardware) -> str:
    env = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(SHORT_HEARTBEAT)}
    with Session(**hardware.ranks(2), env=env) as session:
        session.run(where)
        try:
            session.run(_outlast_the_watchdog)
        except Exception as error:  # gloo's error, or the rank's end by the watchdog
            said = type(error).__name__
        else:
            raise AssertionError("a collective that a rank never enters did not fail")
        pids = list(session.run(_pid))
        if hardware.num_gpus:
            time.sleep(2 * SHORT_HEARTBEAT)  # A watchdog that sleeps before it dumps would end its rank by then.
        session.run(where)
        assert list(session.run(_pid)) == pids, "a rank that had survived ended later"
    return f"{said} raised, next calls work"


def _pid() -> int:
    return os.getpid()


def _connect() -> None:
    from notebook_launcher import report

    report(begun=1)
    where()
    time.sleep(100)


def _files_of_nccl(hardware: Hardware) -> str:
    before = set(SHARED_MEMORY.glob("nccl-*"))
    for delay in (0.0, 0.3, 1.0, 2.0):
        run = launch(_connect, **hardware.ranks(2))
        while len(run.metrics) < 2:
            assert not run.wait(0.01), run.exception()
        time.sleep(delay)  # NCCL makes its files while it connects the ranks.
        run.stop(at_once=True)
    left = set(SHARED_MEMORY.glob("nccl-*")) - before
    assert not left, (
        f"{len(left)} files with {sum(file.stat().st_size for file in left) >> 20} MB were left in /dev/shm"
    )
    return "none left by ranks that were killed"


def _fail_with_memory() -> None:
    import torch

    held = torch.ones(NUM_BYTES, dtype=torch.uint8, device="cuda")
    try:
        int("on purpose")
    except ValueError as error:
        kept = error  # A cycle of the frame and the error, which holds the tensor until it is collected.
    raise ValueError(f"{kept!r} with {len(held)} bytes")


def _allocated() -> int:
    import torch

    return int(torch.cuda.memory_allocated())


def _memory_of_a_failure(hardware: Hardware) -> str:
    with Session(**hardware.ranks(1)) as session:
        with contextlib.suppress(ValueError):
            session.run(_fail_with_memory)
        (allocated,) = session.run(_allocated)
    assert allocated < NUM_BYTES, f"the next call begins with {allocated >> 20} MB of a failed one"
    return f"the next call begins with {allocated >> 20} MB"


CHECKS = (
    Check(name="session after an interrupt in a collective", run=_session_after_interrupt, num_gpus=2),
    Check(name="session after a collective's time limit", run=_session_after_watchdog, num_gpus=2),
    Check(name="files of NCCL in /dev/shm after a kill", run=_files_of_nccl, num_gpus=2),
    Check(name="memory of a failed call is released", run=_memory_of_a_failure, on_cpu=False),
)
