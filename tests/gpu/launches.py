"""Checks of launching: what is seen, how ranks start, what travels, how a run ends."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher import ConfigError, Session, launch, notebook_launch
from notebook_launcher.gpu_check.checks import SECONDS_TO_REPORT, Check, Hardware, Skipped, multiply
from notebook_launcher.machine import devices
from notebook_launcher.wording import plural
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence

LOOK = """
import json, torch
from tests.gpu.launches import bare, uuid_in_torch
from notebook_launcher.machine import devices
ours = [bare(gpu.uuid) for gpu in devices.detect().gpus]
print(json.dumps([ours, [uuid_in_torch(at) for at in range(torch.cuda.device_count())]]))
"""
SECONDS_OF_CHORES = 5.0
"""By then the idle fork server has imported torch's compiler and rearranged its memory, as for all later launches."""


def bare(uuid: str) -> str:
    """Return a UUID as torch writes it; empty for a slice of a GPU, which torch may know by another name."""
    return "" if uuid.startswith("MIG-") else uuid.removeprefix("GPU-")


def uuid_in_torch(device: int) -> str:
    """Return the UUID of a GPU of this process; empty: unknown."""
    import torch

    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def gpu_difference(ours: Sequence[str], torchs: Sequence[str], *, by_number: bool = False) -> str:
    """Return in which way the GPUs that the launcher sees differ from torch's; empty if they are the same.

    Args:
        ours: UUIDs, bare; empty: unknown.
        torchs: The same. The order does not count: CUDA may number the GPUs otherwise than NVML does.
        by_number: True if the GPUs were chosen by such a number, which then may mean another GPU to each.
    """
    if len(ours) != len(torchs):
        return f"the launcher sees {len(ours)} GPUs, torch {len(torchs)}"
    if not by_number and all([*ours, *torchs]) and sorted(ours) != sorted(torchs):
        return "launcher and torch see different GPUs"
    return ""


def _devices_seen(hardware: Hardware) -> str:
    machine = devices.detect()
    values: list[str | None] = [None]
    if hardware.num_gpus:
        first = machine.gpus[0]
        values += [str(hardware.num_gpus - 1), first.uuid or first.selector, *devices.find_slices()[:1], "0,0"]
    seen = []
    for value in values:
        env = {name: text for name, text in os.environ.items() if name != machine.variable}
        if value is not None:
            env[machine.variable] = value
        done = subprocess.run([sys.executable, "-c", LOOK], env=env, capture_output=True, text=True, check=True)
        ours, torchs = json.loads(done.stdout.splitlines()[-1])
        if not hardware.num_gpus:
            return f"launcher {len(ours)}, torch {len(torchs)}"
        label = "unset" if value is None else f"one {value[:3]} UUID" if "-" in value else value
        by_number = value is not None and "-" not in value
        if found := gpu_difference(ours, torchs, by_number=by_number):
            raise AssertionError(f"{machine.variable} {label}: {found}")
        seen.append(f"{label}: {len(ours)}")
    return "; ".join(seen)


def _launch_later(hardware: Hardware) -> str:
    notebook_launch(multiply, **hardware.ranks(1))
    time.sleep(SECONDS_OF_CHORES)
    (device,) = notebook_launch(multiply, **hardware.ranks(1))
    return f"computed on {device}"


def _spawn(hardware: Hardware) -> str:
    (device,) = notebook_launch(multiply, **hardware.ranks(1), start_method="spawn")
    return f"computed on {device}"


def _refused_fork(hardware: Hardware) -> str:
    import torch

    torch.ones(1, device="cuda")
    try:
        notebook_launch(multiply, **hardware.ranks(1), start_method="fork")
    except ConfigError as error:
        return str(error)[:60]
    raise AssertionError("a kernel with CUDA was forked")


class TensorError(Exception):
    """An exception that carries a tensor."""


def _values_travel(hardware: Hardware) -> str:
    import torch

    captured = torch.arange(4.0, device=hardware.device)
    generator = torch.Generator(hardware.device).manual_seed(3)

    def give() -> Any:
        assert captured.sum() == 6
        # A generator of the GPU must not make a context on another GPU while the call is unpacked.
        return {"value": captured * 2, "drawn": torch.rand(1, device=generator.device, generator=generator).item()}

    def fail() -> None:
        raise TensorError(captured)

    (result,) = notebook_launch(give, **hardware.ranks(1))
    assert result["value"].tolist() == [0, 2, 4, 6]
    drawn = torch.rand(1, device=hardware.device, generator=generator).item()
    assert result["drawn"] == drawn, f"a captured generator drew {result['drawn']}, and {drawn} here"
    try:
        notebook_launch(fail, **hardware.ranks(1))
    except TensorError as error:
        arrived = error.args[0].tolist()
    assert arrived == [0, 1, 2, 3], f"the exception's tensor arrived as {arrived}"
    return f"the result arrived on {result['value'].device}"


def _queue_for_long() -> None:
    """Return while a kernel of about 30 s computes, so that the rank waits for its GPU after the function."""
    import torch

    from notebook_launcher import report

    torch.ones(1, device="cuda")
    report(begun=1)
    torch.cuda._sleep(60_000_000_000)


def _compute_for_long() -> None:
    import torch

    from notebook_launcher import report

    if torch.cuda.is_available():
        _queue_for_long()
        torch.cuda.synchronize()
    report(begun=1)
    time.sleep(60)


def _interrupt(hardware: Hardware) -> str:
    told = []
    for function in (_compute_for_long, _queue_for_long) if hardware.num_gpus else (_compute_for_long,):
        run = launch(function, **hardware.ranks(1))
        while not run.metrics:
            assert not run.wait(0.01), run.exception()
        time.sleep(0.5)  # By now the kernel computes.
        began = time.monotonic()
        rung = run.stop()
        seconds = time.monotonic() - began
        assert seconds < 2 * SECONDS_TO_REPORT, f"the stop of {function.__name__} took {seconds:.1f} s"
        told.append(f"by {rung} in {seconds:.1f} s")
    return f"stopped {', after the function '.join(told)}"


def _random_numbers(hardware: Hardware) -> str:
    import torch

    device = hardware.device

    def draw() -> list[float]:
        return torch.rand(3, device=device).tolist() + torch.rand(3).tolist()

    options = {**hardware.ranks(1), "num_processes": 2, "backend": "gloo", "seed": None}
    torch.manual_seed(5)
    torch.rand(7, device=device)  # The generator of the GPU is in use, and has advanced.
    drawn = list(notebook_launch(draw, **options))
    own = draw()
    assert drawn == [own] * 2, f"the ranks drew {drawn}, and the kernel would have drawn {own}"
    return "those of the kernel"


def _own_contexts(hardware: Hardware) -> str:
    _check_contexts(_hold_context, hardware)
    assert os.getpid() not in {pid for pids in _users() for pid in pids}, "the launch made a context in the kernel"
    if hardware.num_gpus > 1:
        import torch

        # It is made again in each rank, where all GPUs are visible, and must not make a context on the first.
        generator = torch.Generator("cuda").manual_seed(3)

        def hold() -> None:
            generator.get_state()
            _hold_context()

        _check_contexts(hold, hardware)
    return f"{plural(hardware.num_gpus, 'rank')}, each on its GPU alone"


def _check_contexts(function: Any, hardware: Hardware) -> None:
    run = launch(function, **hardware.ranks(hardware.num_gpus))
    until(lambda: len(run.metrics) >= hardware.num_gpus, run)
    pids, users = [rank.pid for rank in run.ranks], _users()
    run.stop()
    for rank, pid in enumerate(pids):
        held = [at for at, ids in enumerate(users) if pid in ids]
        if not held:
            raise Skipped("NVML names no process of this container")
        assert held == [rank], f"the rank of GPU {rank} has contexts on GPUs {held}"


def _users() -> list[list[int]]:
    """Return the processes that have a context on each visible GPU."""
    try:
        library = devices.Library()
    except OSError:
        raise Skipped("there is no NVML, which names the processes of a GPU") from None
    with contextlib.closing(library):
        return [library.processes(gpu.key) for gpu in devices.detect().gpus]


def _hold_context() -> None:
    """Use the rank's GPU, over the process group too, and wait."""
    import torch
    import torch.distributed as dist

    from notebook_launcher import report

    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    report(begun=1)
    time.sleep(60)


def _index_out_of_range() -> None:
    import torch

    table = torch.zeros(4, device="cuda")
    table[torch.tensor([1000], device="cuda")].sum().item()


def _queue_an_error() -> None:
    import torch

    table = torch.zeros(4, device="cuda")
    table[torch.tensor([1000], device="cuda")].sum()


def _queue_an_error_aside() -> None:
    import torch

    with torch.cuda.stream(torch.cuda.Stream()):
        _queue_an_error()


def _device_assert(hardware: Hardware) -> str:
    import torch  # noqa: F401 - its errors are unpacked here, and its import, which most kernels have done, takes seconds

    with Session(**hardware.ranks(1)) as session:
        session.run(multiply)
        for function in (_index_out_of_range, _queue_an_error, _queue_an_error_aside):
            began = time.monotonic()
            try:
                session.run(function)
            except Exception as error:  # its type is torch's and differs by version
                said = f"{type(error).__name__}: {error}"
            else:
                said = "no error"
            assert "device-side assert" in said, f"{function.__name__}: {said}"
            seconds = time.monotonic() - began
            assert seconds < SECONDS_TO_REPORT, f"the error came after {seconds:.1f} s"
            session.run(multiply)
    return f"last error after {seconds:.1f} s, next call works"


CHECKS = (
    Check(name="devices seen alike by launcher and torch", run=_devices_seen),
    Check(name="device-side assert: error in time, session lives", run=_device_assert, on_cpu=False),
    Check(name="launch after the fork server's chores", run=_launch_later),
    Check(name="launch by spawn", run=_spawn),
    Check(name="fork of a kernel with CUDA is refused", run=_refused_fork, on_cpu=False),
    Check(name="tensors in closures, results, exceptions", run=_values_travel),
    Check(name="random numbers of the kernel", run=_random_numbers),
    Check(name="stop during a long kernel", run=_interrupt),
    Check(name="contexts on the chosen GPU alone", run=_own_contexts, on_cpu=False),
)
