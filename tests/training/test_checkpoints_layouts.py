"""Checkpoints of sharded models in both layouts, loaded by other numbers of ranks and by replicated ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from notebook_launcher.training.accelerator import Accelerator
from notebook_launcher.training.checkpoints import CheckpointError
from notebook_launcher.training.random import set_seed
from tests.support.toy_training import sessions_fixture, shards_on_cpus

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = shards_on_cpus
ranks = sessions_fixture(2, 3, 4)
WHOLE, PARTS = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


class Training:
    """A model with tensors smaller than the number of ranks; the same inputs on each rank."""

    def __init__(self, seed: int, *, sharded: bool = True, **options: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        set_seed(seed)
        self.accelerator = Accelerator(cpu=True, **options)
        self.bare = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
        if sharded:
            mesh = init_device_mesh("cpu", (self.accelerator.num_processes,))
            fully_shard(self.bare[0], mesh=mesh)
            fully_shard(self.bare, mesh=mesh)
        optimizer = torch.optim.AdamW(self.bare.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(self.bare, optimizer, schedule)

    def train(self, micro_batches: int) -> None:
        generator = torch.Generator().manual_seed(7)
        for _ in range(micro_batches):
            with self.accelerator.accumulate(self.model):
                loss = self.model(torch.rand(6, 4, generator=generator)).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """Weights, buffers, moments, count of steps and learning rate, with whole tensors."""
        found = {name: _listed(tensor) for name, tensor in self.bare.state_dict().items()}
        state = self.optimizer.state_dict()
        for at, slot in state["state"].items():
            found |= {f"{at}.{name}": _listed(value) for name, value in slot.items()}
        return found | {"lr": state["param_groups"][0]["lr"]}


def _listed(value: Any) -> Any:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).tolist()


def save(folder: Path, layout: str, sharded: bool) -> dict[str, Any]:  # noqa: FBT001
    training = Training(1, sharded=sharded)
    training.train(3)
    training.accelerator.save_state(folder, state_dict_type=layout)
    return training.state()


def load(folder: Path, sharded: bool) -> dict[str, Any]:  # noqa: FBT001
    import warnings

    training = Training(2, sharded=sharded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that new ranks have no random states
        training.accelerator.load_state(folder)
    return training.state()


def on(ranks: Any, number: int, function: Any, *arguments: Any) -> list[Any]:
    return [function(*arguments)] if number == 1 else list(ranks.run(number, function, *arguments))


@pytest.mark.parametrize("layout", [WHOLE, PARTS])
@pytest.mark.parametrize("before", [2, 3, 4])
def test_a_checkpoint_of_a_sharded_model_loads_with_any_number_of_ranks(ranks, tmp_path, before, layout):
    expected = on(ranks, before, save, tmp_path / "a", layout, True)[0]
    for after in (1, 2, 3, 4):
        # One process alone has a model that is not sharded.
        assert on(ranks, after, load, tmp_path / "a", after > 1) == [expected] * after
    names = {path.relative_to(tmp_path / "a").as_posix() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    manifest = json.loads((tmp_path / "a" / "checkpoint_manifest.json").read_text())
    assert set(manifest["files"]) | {"checkpoint_manifest.json"} == names
    assert ("model.safetensors" in names) == (layout == WHOLE)
    assert ("pytorch_model_fsdp_0/.metadata" in names) == (layout == PARTS)


@pytest.mark.parametrize("layout", [WHOLE, PARTS])
def test_checkpoints_pass_between_sharded_and_replicated_training(ranks, tmp_path, layout):
    replicated = on(ranks, 2, save, tmp_path / "a", layout, False)[0]
    assert on(ranks, 3, load, tmp_path / "a", True) == [replicated] * 3
    sharded = on(ranks, 3, save, tmp_path / "b", layout, True)[0]
    assert on(ranks, 2, load, tmp_path / "b", False) == [sharded] * 2


@pytest.mark.parametrize("layout", [WHOLE, PARTS])
def test_training_goes_on_straight_after_it_saved_and_loaded_itself(ranks, tmp_path, layout):
    def save_and_load() -> tuple[Any, Any]:
        from notebook_launcher import FullyShardedDataParallelPlugin

        set_seed(1)
        plugin = FullyShardedDataParallelPlugin(state_dict_type=layout)
        training = Training(1, sharded=False, fsdp_plugin=plugin)
        training.train(2)
        training.accelerator.save_state(tmp_path / "a")
        saved = training.state()
        training.train(3)
        expected = training.state()
        training.accelerator.load_state(tmp_path / "a")
        assert training.state() == saved
        training.train(3)
        return expected, training.state()

    for expected, found in on(ranks, 3, save_and_load):
        assert found == expected
    assert (tmp_path / "a" / "pytorch_model_fsdp_0" / ".metadata").exists() == (layout == PARTS)


def test_an_optimizer_that_has_not_stepped_is_saved_without_a_step(ranks, tmp_path):
    def save_and_load() -> tuple[list[Any], list[Any]]:
        training = Training(1)
        training.accelerator.save_state(tmp_path / "a", state_dict_type=PARTS)
        before = list(training.optimizer.state)
        other = Training(2)
        other.train(2)
        other.accelerator.load_state(tmp_path / "a")
        return before, list(other.optimizer.state)

    assert on(ranks, 2, save_and_load) == [([], [])] * 2


def test_a_sharded_models_whole_state_dict_is_on_rank_0_alone(ranks, tmp_path):
    def gather() -> tuple[dict[str, Any], dict[str, Any], str]:
        training = Training(1)
        state = training.accelerator.get_state_dict(training.model)
        expected = {name: _listed(tensor) for name, tensor in training.bare.state_dict().items()}
        with pytest.raises(CheckpointError) as error:
            training.accelerator.save(training.bare.state_dict(), tmp_path / "weights.bin")
        assert type(training.accelerator.unwrap_model(training.model)[0]).__name__ == "FSDPLinear"
        return expected, {name: tensor.tolist() for name, tensor in state.items()}, str(error.value)

    (expected, mine, refusal), (_, others, _) = on(ranks, 2, gather)
    assert mine == expected
    assert others == {}
    assert "Pass accelerator.get_state_dict(model), called on every rank" in refusal
    assert not (tmp_path / "weights.bin").exists()
