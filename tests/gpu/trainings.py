"""Checks of training on one device: exactness, precision, memory, checkpoints."""

from __future__ import annotations

import functools
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher import launch, notebook_launch
from notebook_launcher.gpu_check.checks import (
    Check,
    Hardware,
    compare_accumulation,
    make_batches,
    make_toy_model,
    mean_loss,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

WIDE = {"cpu": 512, "cuda": 4096}
TIMED_UPDATES = {"cpu": 20, "cuda": 30}
"""On a GPU so much that it computes for some tenths of a second: 10 % of less would be noise."""
SHORTEST_PHASE = 0.1
SLACK = 0.01
"""Seconds for which another process may have taken the CPU between two looks at the clock."""
MAX_SYNCHRONISATIONS = 2
"""Waits of the host for the GPU that one full window may need; each costs the time in which the GPU runs dry."""


def prepared(accelerator: Any, make_optimizer: Any, num_rows: int = 16) -> tuple[Any, Any, Any]:
    """Return a toy model and its optimizer, both prepared, and a batch on the device."""
    model: Any = make_toy_model()
    model, optimizer = accelerator.prepare(model, make_optimizer(model.parameters()))
    return model, optimizer, tuple(part.to(accelerator.device) for part in make_batches([num_rows])[0])


def update(accelerator: Any, model: Any, optimizer: Any, batch: Any) -> Any:
    """Make one update, and return the loss before it, without a wait for the GPU."""
    loss = mean_loss(model, batch)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _overflow(hardware: Hardware) -> str:
    (outcome,) = notebook_launch(_overflow_once, **hardware.ranks(1))
    return str(outcome)


def _overflow_once() -> str:
    import torch

    from notebook_launcher import Accelerator, GradScalerKwargs

    for fused in (False, True):
        accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=256.0)])
        model: Any = make_toy_model()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        batch = tuple(part.to(accelerator.device) for part in make_batches([8])[0])
        skipped = []
        for scale in (1.0, float("inf"), 1.0):
            accelerator.backward(mean_loss(model, batch) * scale)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            skipped.append(optimizer.step_was_skipped)
        assert skipped == [False, True, False], f"fused={fused}: skipped {skipped}"
        assert scheduler.get_last_lr() == [1e-2 / 4], f"fused={fused}: the schedule is at {scheduler.get_last_lr()}"
    return "plain and fused AdamW skip and count alike"


def _load_rows() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from notebook_launcher import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True))
    rows = torch.randn(512, 257)
    loader: Any = accelerator.prepare(DataLoader(TensorDataset(rows), batch_size=8, pin_memory=True))
    got = [batch for (batch,) in loader]
    assert {batch.device.type for batch in got} == {accelerator.device.type}
    assert torch.equal(torch.cat([batch.cpu() for batch in got]), rows), "copies arrived damaged"


def _loader(hardware: Hardware) -> str:
    notebook_launch(_load_rows, **hardware.ranks(1))
    return "bitwise equal"


def _count_synchronisations(*, weighted: bool) -> int:
    import torch

    from notebook_launcher import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=4)
    make_optimizer = functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True)
    model, optimizer, batch = prepared(accelerator, make_optimizer)
    weight = torch.full((), 16, device=accelerator.device) if weighted else None
    for number in range(8):
        if number == 4:  # The first window allocates and makes states.
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("warn")
            caught = warnings.catch_warnings(record=True)
            seen = caught.__enter__()
            warnings.simplefilter("always")
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model, batch), weight=weight)
            optimizer.step()
            optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    caught.__exit__(None, None, None)
    return sum("synchroniz" in str(warning.message) for warning in seen or ())


def _synchronisations(hardware: Hardware) -> str:
    counts = []
    for weighted in (False, True):
        count_them = functools.partial(_count_synchronisations, weighted=weighted)
        (count,) = notebook_launch(count_them, **hardware.ranks(1))
        reported = f"a {'weighted ' * weighted}window waited {count} times for the GPU"
        assert count <= MAX_SYNCHRONISATIONS, f"{reported}, {MAX_SYNCHRONISATIONS} are due"
        counts.append(count)
    return f"{counts[0]} in a window of 4, {counts[1]} with weights from the GPU"


def _time_phases() -> dict[str, float]:
    """Train, and return the seconds of all forwards and backwards: by events of the GPU, by the clock without one."""
    import torch

    from notebook_launcher import Accelerator

    accelerator = Accelerator()
    on_gpu = accelerator.device.type == "cuda"
    wide = WIDE[accelerator.device.type]

    def now() -> Any:
        if not on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    model: Any = accelerator.prepare(torch.nn.Sequential(*(torch.nn.Linear(wide, wide) for _ in range(4))))
    batch = torch.randn(wide, wide, device=accelerator.device)
    moments = []
    for _ in range(TIMED_UPDATES[accelerator.device.type]):
        with accelerator.accumulate(model):
            began = now()
            loss = model(batch).square().mean()
            between = now()
            accelerator.backward(loss)
            moments.append((began, between, now()))
    if not on_gpu:
        pairs = [(between - began, end - between) for began, between, end in moments]
    else:
        torch.cuda.synchronize()
        pairs = [(a.elapsed_time(b) / 1000, b.elapsed_time(c) / 1000) for a, b, c in moments]
    return {"forward": sum(pair[0] for pair in pairs), "backward": sum(pair[1] for pair in pairs)}


def _phases(hardware: Hardware) -> str:
    run = launch(_time_phases, **hardware.ranks(1))
    (expected,) = run.result()
    return compare_phases(run.phases[0].seconds, expected, on_gpu=hardware.num_gpus > 0)


def compare_phases(reported: Mapping[str, float], expected: Mapping[str, float], *, on_gpu: bool) -> str:
    """Return both times of each phase as text; raise AssertionError if they differ by more than 10 %."""
    told = []
    for phase, seconds in expected.items():
        told.append(f"{phase} {reported[phase]:.3f} s of {seconds:.3f} s")
        assert seconds > SHORTEST_PHASE or not on_gpu, f"{told[-1]}: too short to compare"
        assert abs(reported[phase] - seconds) < 0.1 * seconds + (0 if on_gpu else SLACK), told[-1]
    return ", ".join(told)


def _search_batch_size() -> tuple[int, int, int]:
    import torch

    from notebook_launcher import find_executable_batch_size

    free, _ = torch.cuda.mem_get_info()
    row = free // 1024

    @find_executable_batch_size(starting_batch_size=4096)
    def fill(batch_size: int) -> int:
        torch.empty(batch_size * row, dtype=torch.uint8, device="cuda")
        return batch_size

    found = fill()
    torch.cuda.empty_cache()
    return found, free, torch.cuda.mem_get_info()[0]


def _out_of_memory(hardware: Hardware) -> str:
    ((found, before, after),) = notebook_launch(_search_batch_size, **hardware.ranks(1))
    assert 1 < found < 2048, f"a batch of {found} fitted, where 1024 fill the memory"
    assert after > 0.95 * before, f"{(before - after) >> 20} MB did not come back"
    return f"found {found}; memory came back"


def _save_and_load(folder: str) -> None:
    import torch

    from notebook_launcher import Accelerator

    accelerator = Accelerator()
    model, optimizer, batch = prepared(accelerator, functools.partial(torch.optim.AdamW, lr=1e-2))
    update(accelerator, model, optimizer, batch)
    accelerator.save_state(folder)
    drawn = torch.rand(4, device=accelerator.device)
    update(accelerator, model, optimizer, batch)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    for where in (None, "on_device"):
        accelerator.load_state(folder, map_location=where)
        assert torch.equal(torch.rand(4, device=accelerator.device), drawn), "other random numbers after load_state"
        counters = {state["step"].device.type for state in optimizer.state.values()}
        assert counters == {"cpu"}, f"step counters on {counters}"
        update(accelerator, model, optimizer, batch)
        pairs = zip(weights, model.parameters(), strict=True)
        assert all(torch.equal(saved, other) for saved, other in pairs), f"map_location={where!r}: other weights"


def _checkpoint(hardware: Hardware) -> str:
    with tempfile.TemporaryDirectory() as folder:
        notebook_launch(_save_and_load, args=(str(Path(folder) / "state"),), **hardware.ranks(1))
    return "weights and random numbers as before"


CHECKS = (
    Check(
        name="exact accumulation in bf16, ragged",
        run=functools.partial(compare_accumulation, precision="bf16", weighted=False),
    ),
    Check(
        name="exact accumulation in fp16, ragged and weighted",
        run=functools.partial(compare_accumulation, precision="fp16", weighted=True),
    ),
    Check(name="overflow with plain and fused optimizers", run=_overflow),
    Check(name="copies that do not block arrive whole", run=_loader),
    Check(name="waits for the GPU in one window", run=_synchronisations, on_cpu=False),
    Check(name="out of memory: batch size found, memory back", run=_out_of_memory, on_cpu=False),
    Check(name="phases against events", run=_phases),
    Check(name="checkpoint with random numbers, on the device", run=_checkpoint),
)
