"""Checks of launching: what is seen, how ranks start, what travels, how a run ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from notebook_launcher import ConfigError, Session, launch, notebook_launch
from notebook_launcher.gpu_check.check_kind import Check, Hardware, Skipped
from notebook_launcher.machine import devices, nvml

__all__ = ["CHECKS"]

LOOK = """
import json, torch
from notebook_launcher.machine import devices, nvml
print(json.dumps([len(devices.detect().gpus), torch.cuda.device_count()]))
"""
SECONDS_TO_REPORT = 3.0
SECONDS_OF_CHORES = 5.0
"""By then the idle fork server has imported torch's compiler and rearranged its memory, as for all later launches."""


def _devices_seen(hardware: Hardware) -> str:
    machine = devices.detect()
    values: list[str | None] = [None]
    if hardware.num_gpus:
        values += [str(hardware.num_gpus - 1), machine.gpus[0].selector, *nvml.find_slices()[:1], "0,0"]
    seen = []
    for value in values:
        env = {name: text for name, text in os.environ.items() if name != machine.variable}
        if value is not None:
            env[machine.variable] = value
        done = subprocess.run([sys.executable, "-c", LOOK], env=env, capture_output=True, text=True, check=True)
        ours, torchs = json.loads(done.stdout.splitlines()[-1])
        if not hardware.num_gpus:
            return f"launcher {ours}, torch {torchs}"
        label = "unset" if value is None else f"one {value[:3]} UUID" if "-" in value else value
        if ours != torchs:
            raise AssertionError(f"{machine.variable} {label}: the launcher sees {ours} GPUs, torch {torchs}")
        seen.append(f"{label}: {ours}")
    return "; ".join(seen)


def _multiply() -> str:
    import torch

    from notebook_launcher import Accelerator

    device = Accelerator().device
    square = torch.eye(256, device=device) * 2
    assert float((square @ square).trace()) == 4 * 256.0
    return str(device)


def _first_launch(hardware: Hardware) -> str:
    began = time.monotonic()
    (device,) = notebook_launch(_multiply, **hardware.ranks(1))
    assert device.startswith(hardware.device), f"the rank computed on {device}"
    return f"{device} after {time.monotonic() - began:.1f} s"


def _launch_after_use(hardware: Hardware) -> str:
    import torch

    square = torch.ones(512, 512, device=hardware.device)
    assert float((square @ square).sum()) > 0
    (device,) = notebook_launch(_multiply, **hardware.ranks(1))
    return str(device)


def _launch_later(hardware: Hardware) -> str:
    notebook_launch(_multiply, **hardware.ranks(1))
    time.sleep(SECONDS_OF_CHORES)
    (device,) = notebook_launch(_multiply, **hardware.ranks(1))
    return str(device)


def _spawn(hardware: Hardware) -> str:
    (device,) = notebook_launch(_multiply, **hardware.ranks(1), start_method="spawn")
    return str(device)


def _refused_fork(hardware: Hardware) -> str:
    import torch

    torch.ones(1, device="cuda")
    try:
        notebook_launch(_multiply, **hardware.ranks(1), start_method="fork")
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
    return f"result on {result['value'].device}"


def _index_out_of_range() -> None:
    import torch

    table = torch.zeros(4, device="cuda")
    table[torch.tensor([1000], device="cuda")].sum().item()


def _queue_an_error() -> None:
    import torch

    table = torch.zeros(4, device="cuda")
    table[torch.tensor([1000], device="cuda")].sum()


def _device_assert(hardware: Hardware) -> str:
    with Session(**hardware.ranks(1)) as session:
        session.run(_multiply)
        for function in (_index_out_of_range, _queue_an_error):
            began = time.monotonic()
            try:
                session.run(function)
            except Exception as error:  # noqa: BLE001 - its type is torch's and differs by version
                said = f"{type(error).__name__}: {error}"
            else:
                said = "no error"
            assert "device-side assert" in said, f"{function.__name__}: {said}"
            seconds = time.monotonic() - began
            assert seconds < SECONDS_TO_REPORT, f"the error came after {seconds:.1f} s"
            session.run(_multiply)
    return f"last error after {seconds:.1f} s, next call works"


def _compute_for_long() -> None:
    import torch

    from notebook_launcher import report

    report(begun=1)
    if torch.cuda.is_available():
        torch.cuda._sleep(60_000_000_000)  # type: ignore[no-untyped-call]  # noqa: SLF001 - 30 s; torch tests use it
        torch.cuda.synchronize()
    time.sleep(60)


def _interrupt(hardware: Hardware) -> str:
    run = launch(_compute_for_long, **hardware.ranks(1))
    while not run.metrics:
        assert not run.wait(0.01), run.exception()
    began = time.monotonic()
    rung = run.stop()
    seconds = time.monotonic() - began
    assert seconds < 2 * SECONDS_TO_REPORT, f"the stop took {seconds:.1f} s"
    return f"stopped by {rung} in {seconds:.1f} s"


def _reduce_ranks() -> float:
    import torch
    import torch.distributed as dist

    from notebook_launcher import Accelerator

    total = torch.full((1,), float(dist.get_rank() + 1), device=Accelerator().device)
    dist.all_reduce(total)
    return float(total)


def _two_ranks_on_one_device(hardware: Hardware) -> str:
    options = {**hardware.ranks(1), "num_processes": 2}
    assert list(notebook_launch(_reduce_ranks, **options)) == [3.0, 3.0]
    return "by gloo"


def _own_context(hardware: Hardware) -> str:
    last = hardware.num_gpus - 1
    gpus = devices.detect().gpus
    library = nvml.Library()

    def users() -> list[list[int]]:
        return [library.processes(gpu.key) for gpu in gpus]

    run = launch(_hold_context, **{**hardware.ranks(1), "devices": [last]})
    while not run.metrics:
        assert not run.wait(0.01), run.exception()
    pid = run.ranks[0].pid
    held = [at for at, pids in enumerate(users()) if pid in pids]
    run.stop()
    if not held:
        raise Skipped("NVML names no process of this container")
    assert held == [last], f"a rank of GPU {last} has contexts on GPUs {held}"
    return f"GPU {last} alone"


def _hold_context() -> None:
    import torch

    from notebook_launcher import report

    torch.ones(1, device="cuda")
    report(begun=1)
    time.sleep(60)


CHECKS = (
    Check(name="devices seen alike by launcher and torch", run=_devices_seen, decides=True),
    Check(name="launch from a fresh kernel", run=_first_launch, decides=True),
    Check(name="launch after the kernel used the device", run=_launch_after_use, decides=True),
    Check(name="device-side assert: error in time, session lives", run=_device_assert, on_cpu=False, decides=True),
    Check(name="launch after the fork server's chores", run=_launch_later),
    Check(name="launch by spawn", run=_spawn),
    Check(name="fork of a kernel with CUDA is refused", run=_refused_fork, on_cpu=False),
    Check(name="tensors in closures, results, exceptions", run=_values_travel),
    Check(name="stop during a long kernel", run=_interrupt),
    Check(name="two ranks on one device", run=_two_ranks_on_one_device),
    Check(name="contexts on the chosen GPU alone", run=_own_context, num_gpus=2, on_cpu=False),
)
