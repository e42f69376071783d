"""`compat` trains as Accelerate itself does: the same seeds side by side, number for number."""

from __future__ import annotations

import contextlib
import importlib
import os
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from notebook_launcher import Accelerator
from notebook_launcher.compat import LocalSGD
from tests.support.toy_training import make_data, make_model, micro_batch, sessions_fixture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

LIBRARIES = ("accelerate", "notebook_launcher.compat")


ranks = sessions_fixture(1, 2, 3)


def load(library: str) -> Any:
    """Return a namespace with a library's names, wherever it keeps them."""
    homes = {"accelerate": ["", ".utils", ".state", ".data_loader"], "notebook_launcher.compat": [""]}[library]
    names: dict[str, Any] = {}
    for home in reversed(homes):
        module = importlib.import_module(library + home)
        names.update({name: getattr(module, name) for name in dir(module) if not name.startswith("_")})
    return types.SimpleNamespace(**names, __name__=library)


def reset(names: Any) -> None:
    names.AcceleratorState._reset_state(True)
    names.GradientState._reset_state()


def by_names(library: str, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a rank with a library's names, whose shared states are empty."""
    names = load(library)
    reset(names)
    try:
        return function(names, *args)
    finally:
        reset(names)


def beside_accelerate(ranks: Any, num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what the ranks return by Accelerate's names, and by ours."""
    return [ranks.run(num_ranks, by_names, library, function, *args) for library in LIBRARIES]


class Stream(IterableDataset[Any]):
    def __init__(self, rows: Iterable[Any]) -> None:
        self.rows = list(rows)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def train(names: Any, scenario: dict[str, Any]) -> dict[str, Any]:
    """Train two epochs in a rank and write everything down."""
    inputs, targets = make_data(scenario.get("size", 22))
    names.set_seed(11)
    accelerator = names.Accelerator(
        cpu=True,
        gradient_accumulation_plugin=names.GradientAccumulationPlugin(num_steps=3, **scenario.get("plugin", {})),
        dataloader_config=names.DataLoaderConfiguration(**scenario.get("data", {})),
        mixed_precision=scenario.get("precision", "no"),
        step_scheduler_with_optimizer=scenario.get("step_with_optimizer", True),
    )
    model: Any = make_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=scenario.get("total_steps", 30)
    )
    loader: Any = DataLoader(
        Stream(zip(inputs, targets, strict=True)) if "stream" in scenario else TensorDataset(inputs, targets),
        batch_size=scenario.get("batch_size", 2), shuffle=scenario.get("shuffle", False),
        drop_last=scenario.get("drop_last", False),
    )  # fmt: skip
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    told: dict[str, Any] = {"weights": [], "rates": [], "samples": [], "metrics": [], "syncs": [], "ends": []}
    told["length"] = None if "stream" in scenario else len(loader)
    for epoch in range(2):
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        for batch, wanted in loader:
            with accelerator.accumulate(model):
                outputs = model(batch)
                loss = torch.nn.functional.mse_loss(outputs, wanted)
                accelerator.backward(loss)
                if scenario.get("clip") and accelerator.sync_gradients:
                    told.setdefault("norms", []).append(float(accelerator.clip_grad_norm_(model.parameters(), 0.05)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            told["samples"].append(batch[:, -1].tolist())
            told["syncs"].append(accelerator.sync_gradients)
            told["ends"].append(accelerator.gradient_state.end_of_dataloader)
            told["rates"].append(scheduler.get_last_lr())
            told["weights"].append(
                [p.detach().flatten().tolist() for p in accelerator.unwrap_model(model).parameters()]
            )
            if scenario.get("gather", True):
                gathered = accelerator.gather_for_metrics((outputs.detach(), wanted))
                told["metrics"].append([part.flatten().tolist() for part in gathered])
    return told


SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shuffled": {"shuffle": True},
    "drop_last": {"shuffle": True, "drop_last": True},
    "seedable": {"shuffle": True, "data": {"use_seedable_sampler": True, "data_seed": 5}},
    "split": {"batch_size": 6, "data": {"split_batches": True}},
    "dispatched": {"data": {"dispatch_batches": True}},
    "stream": {"stream": True},
    # Not its metrics: Accelerate does not know which samples of a stream were repeated, and counts them twice.
    "stream, every rank reads": {"stream": True, "data": {"dispatch_batches": False}, "gather": False},
    "windows span epochs": {"plugin": {"sync_with_dataloader": False}},
    "sync each batch": {"plugin": {"sync_each_batch": True}},
    "bf16": {"precision": "bf16"},
    "fp16 on a CPU": {"precision": "fp16"},
    "scheduler by itself": {"step_with_optimizer": False, "size": 12},
    "schedule that runs out": {"total_steps": 12},
    "clipped": {"clip": True},
    "divides evenly": {"size": 24},
    "smaller than a round": {"size": 3},
}


@pytest.mark.parametrize(
    ("num_ranks", "scenario"),
    [
        *((2, name) for name in SCENARIOS),
        *((1, name) for name in ("plain", "windows span epochs", "smaller than a round")),
        *((3, name) for name in ("plain", "drop_last", "dispatched", "stream")),
    ],
)
def test_training_gives_accelerates_numbers(ranks, num_ranks, scenario):
    theirs, ours = beside_accelerate(ranks, num_ranks, train, SCENARIOS[scenario])
    for rank, (wanted, got) in enumerate(zip(theirs, ours, strict=True)):
        for key, value in wanted.items():
            assert got[key] == pytest.approx(value, rel=1e-6, abs=1e-7) if key == "norms" else True
            if key in ("weights", "rates", "metrics"):
                assert_close(got[key], value, f"{key} of rank {rank}")
            else:
                assert got[key] == value, f"{key} of rank {rank}"


def assert_close(got: Any, wanted: Any, what: str) -> None:
    if isinstance(wanted, list) and wanted and isinstance(wanted[0], list):
        assert len(got) == len(wanted), what
        for at, (one, other) in enumerate(zip(got, wanted, strict=True)):
            assert_close(one, other, f"{what}, {at}")
        return
    torch.testing.assert_close(
        torch.tensor(got), torch.tensor(wanted), rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}: {text}"
    )


def save(names: Any, folder: str) -> list[str]:
    """Write a checkpoint and a model; return the names of the files."""
    accelerator = names.Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler, _ = accelerator.prepare(
        model, optimizer, scheduler, DataLoader(TensorDataset(*make_data(8)), 2)
    )
    accelerator.backward(model(make_data(4)[0]).mean())
    optimizer.step()
    accelerator.save_state(os.path.join(folder, "state"))
    accelerator.save_model(model, os.path.join(folder, "model"), max_shard_size=64)
    accelerator.wait_for_everyone()
    return sorted(os.path.relpath(os.path.join(at, file), folder) for at, _, files in os.walk(folder) for file in files)


def restore(names: Any, folder: str) -> Any:
    """Load a checkpoint into another model; return its weights and the optimizer's momentum."""
    accelerator = names.Accelerator(cpu=True)
    model = make_model(seed=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.load_state(os.path.join(folder, "state"))
    inner = accelerator.unwrap_model(model)
    momentum = [state["momentum_buffer"].tolist() for state in optimizer.state_dict()["state"].values()]
    return [parameter.tolist() for parameter in inner.parameters()], momentum


def test_both_libraries_write_the_same_files_and_read_each_others(ranks, tmp_path):
    folders = [str(tmp_path / library) for library in LIBRARIES]
    written = [ranks.run(2, by_names, *each)[0] for each in zip(LIBRARIES, [save, save], folders, strict=True)]
    assert set(written[0]) <= set(written[1])
    restored = [loaded for folder in folders for loaded in beside_accelerate(ranks, 2, restore, folder)]
    assert restored == [restored[0]] * 4


def resume(names: Any, folder: Path, num_skipped: int | None) -> list[list[int]]:
    """Save within an epoch, load, and return the samples of the next two epochs of a loop that skips batches or not."""
    names.set_seed(3)
    accelerator = names.Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(12)), 2, shuffle=True))
    for number, _ in enumerate(loader):
        if number == 1:
            accelerator.save_state(folder / names.__name__)
            break
    accelerator.load_state(folder / names.__name__)
    seen: list[list[int]] = []
    for epoch in range(2):
        skips = epoch == 0 and num_skipped is not None
        active = names.skip_first_batches(loader, num_skipped) if skips else loader
        seen.append([number for (batch,) in active for number in batch.tolist()])
    return seen


def test_loader_restarts_its_epoch_after_load_state_as_accelerates_does(ranks, tmp_path):
    theirs, ours = beside_accelerate(ranks, 2, resume, tmp_path, None)
    assert ours == theirs
    for seen in zip(*ours, strict=True):
        assert sorted(number for numbers in seen for number in numbers) == list(range(12))
    rest, whole = ranks.run(1, by_names, LIBRARIES[1], resume, tmp_path / "alone", 2)[0]
    first = ranks.run(1, by_names, LIBRARIES[1], resume, tmp_path / "alone", 0)[0][0]
    assert rest == first[4:]
    assert sorted(whole) == list(range(12))


def drawn_after_batches_of_rank_0(names: Any, num_workers: int) -> tuple[list[list[int]], list[float]]:
    accelerator = names.Accelerator(cpu=True)
    torch.manual_seed(5)
    stream = DataLoader(Stream(range(8)), batch_size=2, num_workers=num_workers, persistent_workers=num_workers > 0)
    loader = accelerator.prepare(stream)
    batches, drawn = [], []
    for _ in range(3):
        batches += [batch.tolist() for batch in loader]
        drawn.append(torch.rand(1).item())
    return batches, drawn


@pytest.mark.parametrize("num_workers", [0, 1])
def test_every_rank_draws_the_same_while_rank_0_reads(ranks, num_workers):
    theirs, ours = beside_accelerate(ranks, 2, drawn_after_batches_of_rank_0, num_workers)
    assert ours == theirs
    assert ours[0][1] == ours[1][1]


def test_reduce_ignores_the_scale_and_sums_without_a_reduction(ranks):
    def reduced(names: Any) -> list[list[float]]:
        accelerator = names.Accelerator(cpu=True)
        mine = torch.ones(1) * (accelerator.process_index + 1)
        ways: list[dict[str, Any]] = [{"scale": 2.0}, *({"reduction": way} for way in ("none", "mean", "max", "sum"))]
        functions = (accelerator.reduce, names.reduce)
        return [[function(mine.clone(), **options).item() for options in ways] for function in functions]

    theirs, ours = beside_accelerate(ranks, 2, reduced)
    assert ours == theirs == [[[3.0, 3.0, 1.5, 2.0, 3.0], [1.5, 3.0, 1.5, 2.0, 3.0]]] * 2


def accumulate_with_a_loader_of_the_function(names: Any) -> list[float]:
    accelerator = names.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    data: Any = torch.arange(12.0)[:, None]
    loader = names.prepare_data_loader(DataLoader(data, batch_size=2))
    found = []
    for _ in range(2):
        for numbers in loader:
            with micro_batch(accelerator, optimizer, model) as backward:
                backward(model(numbers).mean())
                if accelerator.sync_gradients:
                    found.append(next(model.parameters()).grad.item())
    return found


def test_windows_end_with_a_loader_that_the_function_prepared(ranks):
    theirs, ours = beside_accelerate(ranks, 2, accumulate_with_a_loader_of_the_function)
    assert ours == theirs


# --------------------------------------------------------------------------------------------------------------------
# Local SGD: ranks go their own way between averages, by both sets of rules.


OURS = ("notebook_launcher", "notebook_launcher.compat")


def train_locally(library: str, num_steps: int, enabled: bool = True, fail: bool = False) -> list[torch.Tensor]:
    """Train five steps, averaging every `num_steps`; return the weights after each, and after the block."""
    home = "accelerate.local_sgd" if library == "accelerate" else "notebook_launcher.compat.local_sgd"
    accelerator = importlib.import_module(library).Accelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    told = []

    def weights() -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    local_sgd = importlib.import_module(home).LocalSGD(accelerator, model, num_steps, enabled)
    with contextlib.suppress(KeyError), local_sgd:
        for number in range(5):
            inputs, targets = make_data(4, seed=10 * number + accelerator.process_index)
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
            told.append(weights())
        if fail:
            raise KeyError
    told.append(weights())
    if library in LIBRARIES:
        reset(load(library))
    return told


@pytest.mark.parametrize(("num_ranks", "library"), [(1, OURS[0]), (2, OURS[0]), (2, OURS[1])])
def test_numbers_are_accelerates(ranks, num_ranks, library):
    wanted, got = (ranks.run(num_ranks, train_locally, each, 2) for each in ("accelerate", library))
    torch.testing.assert_close(got, wanted)


def test_ranks_agree_after_every_average_alone_and_without_it_always(ranks):
    first, second = ranks.run(2, train_locally, "notebook_launcher", 2)
    assert list(map(torch.equal, first, second)) == [False, True, False, True, False, True]
    torch.testing.assert_close(first[5], (first[4] + second[4]) / 2)
    assert all(map(torch.equal, *ranks.run(2, train_locally, "notebook_launcher", 2, False)))
    once, plain = (ranks.run(1, train_locally, "notebook_launcher", 2, enabled)[0] for enabled in (True, False))
    assert all(map(torch.equal, once, plain)), "one process trains as ever"


def test_no_rank_waits_to_average_after_an_error(ranks):
    for weights in ranks.run(2, train_locally, "notebook_launcher", 6, True, True):
        assert torch.equal(weights[4], weights[5])


def test_local_sgd_refuses_zero_steps_and_sharded_models(ranks):
    def refuse() -> None:
        from torch.distributed.fsdp import fully_shard  # brings the compiler

        accelerator, model = Accelerator(cpu=True), make_model()
        with pytest.raises(ValueError, match="local_sgd_steps=0 is too small"):
            LocalSGD(accelerator, accelerator.prepare(make_model()), 0)
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
        with pytest.raises(ValueError, match="fully_shard was applied to this Sequential"):
            LocalSGD(accelerator, accelerator.prepare(model), 2)

    ranks.run(2, refuse)
