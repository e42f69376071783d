"""A rank of `step_overhead.py`: runs the same few operations in each contender's loop, in turns."""

from __future__ import annotations

import contextlib
import importlib
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

STEPS = {"list": 40, "loader": 200}
"""Micro-batches of a turn. Turns are short, so that most are not interrupted; a loader's turn includes its start."""
BATCH_SIZE = 4
WIDTH = 8
WINDOWS = (1, 4)


class HandWritten:
    """The loop without an Accelerator."""

    def __init__(self, device: str) -> None:
        model = make_model().to(device)
        self._device = device
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._model: Any = DistributedDataParallel(model) if self._ranks > 1 else model
        self._optimizer = make_optimizer(model)

    def loader(self) -> Iterable[Any]:
        data = make_data(self._ranks)
        loader = DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data, self._ranks, 0, shuffle=False))
        return loader if self._device == "cpu" else Moved(loader, self._device)

    def run(self, batches: Iterable[Any], window: int) -> None:
        model, optimizer, alone = self._model, self._optimizer, self._ranks == 1
        for index, (inputs, targets) in enumerate(batches):
            ends = index % window == window - 1
            with contextlib.nullcontext() if ends or alone else model.no_sync():
                loss: Any = mse_loss(model(inputs), targets)
                (loss / window).backward()
            if ends:
                optimizer.step()
                optimizer.zero_grad()


class Moved:
    """Batches of a loader, moved to a GPU."""

    def __init__(self, loader: Iterable[Any], device: str) -> None:
        self._loader = loader
        self._device = device

    def __iter__(self) -> Iterator[Any]:
        for inputs, targets in self._loader:
            yield inputs.to(self._device), targets.to(self._device)


class WithAccelerator:
    """The loop with an Accelerator, Hugging Face's or ours."""

    def __init__(self, module: str, device: str, **options: Any) -> None:
        self._accelerator = importlib.import_module(module).Accelerator(cpu=device == "cpu", **options)
        model = make_model()
        self._model, self._optimizer = self._accelerator.prepare(model, make_optimizer(model))

    def loader(self) -> Iterable[Any]:
        loader: Iterable[Any] = self._accelerator.prepare(
            DataLoader(make_data(self._accelerator.num_processes), BATCH_SIZE)
        )
        return loader

    def run(self, batches: Iterable[Any], window: int) -> None:
        accelerator, model, optimizer = self._accelerator, self._model, self._optimizer
        accelerator.gradient_accumulation_steps = window
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                loss = mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(WIDTH, 1)


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def make_data(num_ranks: int) -> TensorDataset:
    count = STEPS["loader"] * BATCH_SIZE * num_ranks
    return TensorDataset(torch.randn(count, WIDTH), torch.randn(count, 1))


def measure(names: list[str], repeats: dict[str, int], device: str = "cpu") -> Iterator[dict[str, Any]]:
    """Yield a row for each contender, window and source of batches: the microseconds of a micro-batch in each turn.

    `wall` is the elapsed time, `busy` the processor time of the thread that trains, which excludes waiting, such as
    for an all-reduce.

    Args:
        names: The contenders, which take turns. A contender that fails has a row with the reason.
        repeats: Turns for each source of batches, a list or the contender's loader.
        device: `cpu` or `cuda`.
    """
    torch.set_num_threads(1)
    tried = {name: try_contender(name, device) for name in names}
    yield from ({"name": name, "failed": one} for name, one in tried.items() if isinstance(one, str))
    contenders = {name: one for name, one in tried.items() if not isinstance(one, str)}
    present = list(contenders)
    fixed = [(torch.randn(BATCH_SIZE, WIDTH).to(device), torch.randn(BATCH_SIZE, 1).to(device))] * STEPS["list"]
    loaders = {name: one.loader() for name, one in contenders.items()}
    for window in WINDOWS:
        for source, num_steps in STEPS.items():
            turns: dict[str, list[tuple[float, float]]] = {name: [] for name in present}
            # The first turns do not count.
            for turn in range(-2, repeats[source]):
                first = turn % max(1, len(present))
                for name in present[first:] + present[:first]:
                    batches = fixed if source == "list" else loaders[name]
                    turns[name].append(measure_turn(contenders[name], batches, window))
            for name in present:
                wall, busy = ([1e6 * part[at] / num_steps for part in turns[name][2:]] for at in (0, 1))
                yield {"name": name, "window": window, "source": source, "wall": wall, "busy": busy}


def measure_lists(window: int, repeats: int) -> dict[str, list[float]]:
    """Return the microseconds of processor time of a micro-batch from a list, by hand and with ours, in turns."""
    torch.set_num_threads(1)
    contenders: dict[str, HandWritten | WithAccelerator] = {
        "hand": HandWritten("cpu"),
        "ours": WithAccelerator("notebook_launcher", "cpu"),
    }
    fixed = [(torch.randn(BATCH_SIZE, WIDTH), torch.randn(BATCH_SIZE, 1))] * STEPS["list"]
    busy: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats + 1):  # The first turn does not count.
        for name, contender in contenders.items():
            busy[name].append(1e6 * measure_turn(contender, fixed, window)[1] / STEPS["list"])
    return {name: turns[1:] for name, turns in busy.items()}


def try_contender(name: str, device: str) -> HandWritten | WithAccelerator | str:
    """Return the contender, or the reason of its failure."""
    try:
        if name == "hand":
            return HandWritten(device)
        if name == "accelerate":
            return WithAccelerator("accelerate", device)
        return WithAccelerator("notebook_launcher", device, check_ranks=name != "unchecked")
    except Exception as error:  # any exception stands in the contender's row
        return f"{type(error).__name__}: {error}"


def measure_turn(contender: HandWritten | WithAccelerator, batches: Iterable[Any], window: int) -> tuple[float, float]:
    """Return the seconds of a turn, and the seconds of this thread's processor time in it."""
    if dist.is_initialized():
        dist.barrier()
    finish_gpu()
    busy = time.thread_time()
    begin = time.perf_counter()
    contender.run(batches, window)
    finish_gpu()
    end = time.perf_counter()
    return end - begin, time.thread_time() - busy


def finish_gpu() -> None:
    """Wait until the GPU, if it is used, has done its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def measure_all(names: list[str], repeats: dict[str, int], device: str = "cpu") -> list[dict[str, Any]]:
    """Return the rows of `measure`; the function that is launched."""
    return list(measure(names, repeats, device))


def main() -> None:
    """Measure as a plain process, or as a process of torchrun."""
    import os

    from support.ranks import report, start_rank

    spec = start_rank()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    for row in measure(spec["names"], spec["repeats"]):
        report(**row)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
