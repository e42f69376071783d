"""Checks of ranks that wait for each other: of which one lags, or whose runs end out of turn."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from notebook_launcher import Session, launch
from notebook_launcher.gpu_check.checks import (
    SECONDS_TO_REPORT,
    Check,
    Hardware,
    mean_loss,
    reduce,
    where,
)
from notebook_launcher.machine.memory import SHARED_MEMORY
from tests.gpu.trainings import prepared
from tests.support.waiting import until

LAG = 0.05
"""Seconds by which rank 1 comes later to each update."""
NUM_UPDATES = 12
NOTICE_AFTER = 2.0
SECONDS_TO_NOTICE = 20.0
USERS_CODE = '''
def begin_a_sum(reads):
    """Reduce on rank 0 alone, which then reads the sum or returns, and waits for rank 1 in either case."""
    import time

    import torch
    import torch.distributed as dist

    from notebook_launcher import Accelerator, report

    device = Accelerator().device
    total = torch.ones(1, device=device)
    dist.all_reduce(total)  # NCCL connects the GPUs.
    report(begun=float(total))
    if dist.get_rank() == 0:
        dist.all_reduce(total)
        if reads:
            total.item()
        return
    time.sleep(100)
'''


def _train_behind() -> None:
    import torch

    from notebook_launcher import Accelerator

    accelerator = Accelerator()
    model, optimizer, batch = prepared(accelerator, functools.partial(torch.optim.SGD, lr=1e-3), 8)
    for _ in range(NUM_UPDATES):
        with accelerator.accumulate(model):
            loss = mean_loss(model, batch)
            time.sleep(LAG * accelerator.process_index)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def _wait_is_sync(hardware: Hardware) -> str:
    run = launch(_train_behind, **hardware.ranks(2))
    run.result()
    reported, expected = run.phases[0].seconds["sync"], LAG * NUM_UPDATES
    assert reported > 0.6 * expected, f"rank 0 reported {reported:.2f} s of waiting, rank 1 lagged by {expected:.2f} s"
    return f"{reported:.2f} s of waiting for a rank that lagged by {expected:.2f} s"


def _begin_a_sum_in(folder: str) -> Any:
    """Return `begin_a_sum` as a function of the user's: stacks show no frames of this package."""
    file = Path(folder) / "users_code.py"
    file.write_text(USERS_CODE, encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}  # So it travels by value.
    exec(compile(USERS_CODE, str(file), "exec"), names)
    return names["begin_a_sum"]


def _hang_is_named(hardware: Hardware) -> str:
    ways = (True, False) if hardware.num_gpus else (True,)  # On a CPU a rank waits in the reduction itself.
    with tempfile.TemporaryDirectory() as folder:
        function = _begin_a_sum_in(folder)
        return "; ".join(_notice_of_a_wait(hardware, functools.partial(function, reads)) for reads in ways)


def _notice_of_a_wait(hardware: Hardware, function: Any) -> str:
    run = launch(function, **{**hardware.ranks(2), "hang_notice": NOTICE_AFTER})
    until(lambda: len(run.metrics) >= 2, run)
    began = time.monotonic()
    try:
        while not (reported := run.snapshot().waiting):
            assert not run.wait(0.1), run.exception()
            seconds = time.monotonic() - began
            assert seconds < SECONDS_TO_NOTICE, f"no notice of a rank that waits, after {seconds:.0f} s"
    finally:
        run.stop(at_once=True)
    assert reported.startswith("rank 0 has waited"), reported
    return str(reported).partition(" (")[0]


def _train_on(folder: str) -> None:
    """Train for ever on data that lies on the device, so that a program may run ahead of its GPU."""
    import torch

    from notebook_launcher import Accelerator, report

    accelerator = Accelerator(project_dir=folder)
    model, optimizer, batch = prepared(accelerator, functools.partial(torch.optim.SGD, lr=1e-6))
    num_updates = 0
    try:
        while True:
            with accelerator.accumulate(model):
                accelerator.backward(mean_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            num_updates += 1
            if accelerator.process_index == 0:
                time.sleep(0.002)  # The program of one rank lags behind the other's.
            if num_updates % 50 == 0:
                report(num_updates=num_updates)
    except BaseException:
        (Path(folder) / f"rank{accelerator.process_index}").write_text(str(num_updates))
        raise


def _save_and_stop(hardware: Hardware) -> str:
    with tempfile.TemporaryDirectory() as folder:
        run = launch(_train_on, args=(folder,), **hardware.ranks(2))
        until(lambda: run.metrics, run)
        run.save()
        until(lambda: list(Path(folder).glob("checkpoints/update_*")), run)
        rung = run.stop(after_step=True)
        ends = [(Path(folder) / f"rank{rank}").read_text() for rank in (0, 1)]
    assert rung == "ask", f"the stop needed {rung}"
    assert ends[0] == ends[1], f"the ranks stopped after updates {' and '.join(ends)}"
    return f"both after update {ends[0]}"


# Runs that end out of turn while a peer waits in a collective.


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
        until(lambda: len(run.metrics) >= 2, run)
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
    Check(name="checkpoint and stop while a rank lags", run=_save_and_stop, num_gpus=2),
    Check(name="wait for a late rank counts as sync", run=_wait_is_sync, num_gpus=2),
    Check(name="rank that waits for a peer is named", run=_hang_is_named, num_gpus=2),
    Check(name="session after an interrupt in a collective", run=_session_after_interrupt, num_gpus=2),
    Check(name="session after a collective's time limit", run=_session_after_watchdog, num_gpus=2),
    Check(name="files of NCCL in /dev/shm after a kill", run=_files_of_nccl, num_gpus=2),
    Check(name="memory of a failed call is released", run=_memory_of_a_failure, on_cpu=False),
)
