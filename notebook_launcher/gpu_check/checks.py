"""What GPUs must pass before they count as working: each of `CHECKS`, tried by `check_program`.

The functions of the ranks use public names alone, as a user's program does.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher import launch, notebook_launch
from notebook_launcher.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

WIDTH = 64
SECONDS_TO_REPORT = 3.0
RAGGED = [8, 8, 3]
TOLERANCES = {"no": 1e-4, "fp16": 1e-2, "bf16": 2e-2}
"""Relative to the largest gradient. A wrong divisor differs by a fifth; bf16 has 8 bits of precision."""


class Skipped(Exception):  # noqa: N818 - an outcome, which is not an error
    """Raised by a check that cannot be made here; the message is the reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """Hardware that a check runs on."""

    num_gpus: int
    """GPUs that the launcher sees and can use; 0: the check runs in its CPU form."""
    shares: bool = False
    """True if NCCL lets several ranks share a GPU, so that most checks for two GPUs can be made on one."""

    @property
    def device(self) -> str:
        """`cuda` or `cpu`."""
        return "cuda" if self.num_gpus else "cpu"

    def ranks(self, num_processes: int) -> dict[str, Any]:
        """Return the options of a quiet launch of so many ranks, on GPUs of their own if there are any and enough."""
        devices: list[int] | str = list(range(min(num_processes, self.num_gpus))) if self.num_gpus else "cpu"
        return {
            "num_processes": num_processes,
            "devices": devices,
            "output": "none",
            "monitor": False,
            "runs_folder": None,
            "timeout": 100.0,
            "seed": 0,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that is tried. It passes if its function returns; what that returns is shown."""

    name: str
    run: Callable[[Hardware], str | None]
    """Raises `Skipped`, or any other exception where the check fails."""
    num_gpus: int = 1
    """GPUs that it needs."""
    can_share: bool = True
    """True if its ranks can share one GPU."""
    on_cpu: bool = True
    """True if it has a form without GPUs, which shows that the check works and nothing about GPUs."""
    limit: float = 120.0
    """Seconds after which its process is ended."""

    def why_not(self, hardware: Hardware) -> str:
        """Return the reason why it cannot be made on this hardware; empty if it can."""
        if hardware.num_gpus == 0:
            return "" if self.on_cpu else "needs a GPU"
        has_enough = hardware.num_gpus >= self.num_gpus or (hardware.shares and self.can_share)
        return "" if has_enough else f"needs {self.num_gpus} GPUs"


def make_toy_model() -> Any:
    """Return a small network with the same weights at every call."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))


def make_batches(sizes: list[int]) -> list[tuple[Any, Any]]:
    """Return batches of these sizes, on the CPU."""
    import torch

    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(size, WIDTH, generator=generator) for size in sizes]
    return [(inputs, inputs.sum(1, keepdim=True)) for inputs in rows]


def mean_loss(model: Any, batch: Any) -> Any:
    """Return the mean squared error of a batch."""
    inputs, targets = batch
    return (model(inputs) - targets).square().float().mean()


def train(**options: Any) -> Any:
    """Train with an Accelerator; return the weights on the CPU."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from notebook_launcher import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2, **options)
    (rows,) = make_batches([256])
    model: Any = make_toy_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = DataLoader(TensorDataset(*rows), batch_size=16 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])


def multiply() -> str:
    """Compute on this rank's device, and return its name."""
    import torch

    from notebook_launcher import Accelerator

    device = Accelerator().device
    square = torch.eye(256, device=device) * 2
    assert float((square @ square).trace()) == 4 * 256.0
    return str(device)


def _first_launch(hardware: Hardware) -> str:
    began = time.monotonic()
    (device,) = notebook_launch(multiply, **hardware.ranks(1))
    assert device.startswith(hardware.device), f"the rank computed on {device}"
    return f"computed on {device} after {time.monotonic() - began:.1f} s"


def _launch_after_use(hardware: Hardware) -> str:
    import torch

    square = torch.ones(512, 512, device=hardware.device)
    assert float((square @ square).sum()) > 0
    (device,) = notebook_launch(multiply, **hardware.ranks(1))
    return f"computed on {device}"


def _compare(precision: str, *, weighted: bool) -> str:
    from notebook_launcher import Accelerator, GradScalerKwargs

    scaler = GradScalerKwargs(init_scale=256.0)
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=3, kwargs_handlers=[scaler])
    model = accelerator.prepare(make_toy_model())
    weight = (lambda batch: float(len(batch[0]) * 7)) if weighted else None
    tolerance = TOLERANCES[precision]
    report = accelerator.check_accumulation(model, make_batches(RAGGED), mean_loss, weight=weight, tolerance=tolerance)
    assert report, str(report)
    return f"{report.relative:.1e}"


def compare_accumulation(hardware: Hardware, precision: str, *, weighted: bool) -> str:
    """Compare accumulated gradients with those of the whole window, in one rank."""
    compare = functools.partial(_compare, precision, weighted=weighted)
    return f"relative difference {next(iter(notebook_launch(compare, **hardware.ranks(1))))}"


def where() -> tuple[str, int]:
    """Reduce over all ranks; return the name of this rank's device, and its rank."""
    import torch
    import torch.distributed as dist

    from notebook_launcher import Accelerator

    accelerator = Accelerator()
    total = torch.ones(4, device=accelerator.device)
    dist.all_reduce(total)
    assert total.tolist() == [float(dist.get_world_size())] * 4
    name = torch.cuda.get_device_properties(accelerator.device).name if accelerator.device.type == "cuda" else "cpu"
    return name, dist.get_rank()


def _group(hardware: Hardware) -> str:
    began = time.monotonic()
    places = notebook_launch(where, **hardware.ranks(2))
    return f"2 x {places[0][0]} after {time.monotonic() - began:.1f} s"


def _against_one(hardware: Hardware) -> str:
    import torch

    (alone,) = notebook_launch(train, **hardware.ranks(1))
    both = notebook_launch(train, **hardware.ranks(2))
    assert torch.equal(both[0], both[1]), "the ranks' weights differ"
    difference = float((both[0] - alone).abs().max())
    assert difference < 1e-4, f"2 ranks differ from 1 by {difference:.1e}"
    return f"difference {difference:.1e}"


def reduce(device: torch.device) -> None:
    """Enter an all-reduce, and on a GPU wait for its end."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize()


def _fail(how: str) -> None:
    import torch
    import torch.distributed as dist

    from notebook_launcher import Accelerator, report

    device = Accelerator().device
    reduce(device)
    report(begun=1)
    if dist.get_rank() == 0:
        if how == "raise":
            raise ValueError("on purpose")
        if how == "exit":
            os._exit(3)
        if how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        # NCCL's watchdog looks at this collective, and must not end the process before Python has the error.
        dist.all_reduce(torch.ones(1, device=device), async_op=True)
        torch.zeros(4, device=device)[torch.tensor([1000], device=device)].sum().item()
    reduce(device)


def _failures(hardware: Hardware) -> str:
    import torch  # noqa: F401 - its errors are unpacked here, and its import, which most kernels have done, takes seconds

    told = []
    failures = [("raise", ValueError, "on purpose"), ("exit", LaunchError, ""), ("segfault", LaunchError, "SIGSEGV")]
    if hardware.num_gpus:
        failures.append(("assert", RuntimeError, "device-side assert"))
    for how, kind, words in failures:
        run = launch(_fail, args=(how,), **hardware.ranks(2))
        while len(run.metrics) < 2 and not run.wait(0.005):
            pass
        began = time.monotonic()
        run.wait()
        seconds = time.monotonic() - began
        error = run.exception()
        assert isinstance(error, kind), f"{how} ended with {error!r}"
        assert words in str(error), f"{how} ended with {error!r}"
        assert seconds < SECONDS_TO_REPORT, f"{how}: the error came after {seconds:.1f} s"
        told.append(f"{how} {seconds:.1f} s")
    return ", ".join(told)


CHECKS = (
    Check(name="launch from a fresh kernel", run=_first_launch),
    Check(name="launch after the kernel used the device", run=_launch_after_use),
    Check(
        name="exact accumulation in fp32, ragged",
        run=functools.partial(compare_accumulation, precision="no", weighted=False),
    ),
    Check(
        name="exact accumulation in fp32, ragged and weighted",
        run=functools.partial(compare_accumulation, precision="no", weighted=True),
    ),
    Check(name="process group of two ranks", run=_group, num_gpus=2),
    Check(name="two ranks train as one does", run=_against_one, num_gpus=2),
    Check(name="errors while a peer waits", run=_failures, num_gpus=2),
)
