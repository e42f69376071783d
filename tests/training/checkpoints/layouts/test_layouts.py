"""Checkpoints of sharded models in both layouts, loaded by other numbers of ranks and by replicated ones."""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from notebook_launcher import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ParallelismConfig,
    ProjectConfiguration,
)
from notebook_launcher.training.checkpoints import CheckpointError, load_model
from notebook_launcher.training.checkpoints.shard_reader import ShardReader
from notebook_launcher.training.random import set_seed
from tests.support.checkpoints import files, small_files
from tests.support.toy_training import recorded, sessions_fixture, shards_on_cpus

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.toy_training import Sessions

pytestmark = shards_on_cpus


def make_meshes() -> None:
    """Make the groups of these meshes, whose sockets stay open as long as the ranks."""
    for kind in ("hybrid", "tensor parallel"):
        Accelerator(cpu=True, **ARGUMENTS[kind]())


ranks = sessions_fixture(2, 4, set_up=make_meshes)
WHOLE, PARTS = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


class Training:
    """A model with tensors smaller than the number of ranks; the same inputs on each rank."""

    def __init__(self, seed: int, *, sharded: bool = True, bare: Any = None, **options: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        set_seed(seed)
        self.accelerator = Accelerator(cpu=True, **options)
        self.bare = bare or torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
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


def save(folder: Path, layout: str, sharded: bool) -> dict[str, Any]:
    training = Training(1, sharded=sharded)
    training.train(3)
    training.accelerator.save_state(folder, state_dict_type=layout)
    return training.state()


def load(folder: Path, sharded: bool) -> dict[str, Any]:
    training = Training(2, sharded=sharded)
    recorded(training.accelerator.load_state, folder)  # New ranks have no random states.
    return training.state()


@pytest.fixture(scope="module")
def parts(ranks: Sessions, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint in the sharded layout, saved by two ranks, and the state that it holds."""
    folder = tmp_path_factory.mktemp("parts") / "a"
    return folder, ranks.run(2, save, folder, PARTS, True)[0]


@pytest.mark.parametrize(
    ("before", "sharded", "layout", "others"),
    [
        (2, True, PARTS, [(1, False), (4, True)]),
        (4, True, WHOLE, [(1, False), (2, True), (2, False)]),
        (4, True, PARTS, [(2, True), (4, True), (2, False)]),
        (2, False, PARTS, [(4, True)]),
    ],
)
def test_a_checkpoint_loads_with_any_number_of_ranks_sharded_and_replicated(
    ranks, tmp_path, before, sharded, layout, others
):
    expected = ranks.run(before, save, tmp_path / "a", layout, sharded)[0]
    for after, is_sharded in others:
        assert ranks.run(after, load, tmp_path / "a", is_sharded) == [expected] * after
    names = files(tmp_path / "a")
    manifest = json.loads((tmp_path / "a" / "checkpoint_manifest.json").read_text())
    assert set(manifest["files"]) | {"checkpoint_manifest.json"} == names
    in_parts = sharded and layout == PARTS
    assert ("model.safetensors" in names, "pytorch_model_fsdp_0/.metadata" in names) == (not in_parts, in_parts)


def test_layout_can_change_before_the_last_save(ranks, tmp_path):
    def save_three_times() -> list[bool]:
        from torch.distributed.fsdp import StateDictType

        plugin = FullyShardedDataParallelPlugin(state_dict_type=PARTS)
        plugin.set_auto_wrap_policy(torch.nn.Linear(1, 1))
        training = Training(1, sharded=False, fsdp_plugin=plugin)
        training.accelerator.save_state(tmp_path / "parts")
        assert training.accelerator.state.fsdp_plugin is plugin
        plugin.set_state_dict_type(WHOLE)
        training.accelerator.save_state(tmp_path / "whole")
        plugin.state_dict_type = StateDictType.SHARDED_STATE_DICT
        plugin.set_state_dict_type()
        training.accelerator.save_state(tmp_path / "parts again")
        folders = [tmp_path / name / "pytorch_model_fsdp_0" for name in ("parts", "whole", "parts again")]
        return [folder.exists() for folder in folders]

    assert ranks.run(2, save_three_times) == [[True, False, True]] * 2


class Wide(torch.nn.Sequential):
    """Two layers that a plan cuts, and a norm whose tensors are smaller than the number of ranks."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1), torch.nn.LayerNorm(1))


ARGUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "fp16": lambda: {
        "fsdp_plugin": FullyShardedDataParallelPlugin(),
        "mixed_precision": "fp16",
        "kwargs_handlers": [GradScalerKwargs(init_scale=64.0, growth_interval=2)],
    },
    "offload within a window": lambda: {
        "fsdp_plugin": FullyShardedDataParallelPlugin(cpu_offload=True),
        "gradient_accumulation_steps": 2,
    },
    "hybrid": lambda: {"parallelism_config": ParallelismConfig(2, 2)},
    "tensor parallel": lambda: {
        "parallelism_config": ParallelismConfig(1, 2, 2, tp_plan={"0": "colwise", "2": "rowwise"})
    },
}


def go_on(folder: Path, kind: str, layout: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the state when it was saved, and two updates later: without loading it, in the same run, in another."""
    training = Training(1, sharded=False, bare=Wide(), **ARGUMENTS[kind]())
    training.train(3)
    training.accelerator.save_state(folder, state_dict_type=layout)
    saved = training.state()
    training.train(2)
    found = [training.state()]
    for other in (training, Training(2, sharded=False, bare=Wide(), **ARGUMENTS[kind]())):
        other.accelerator.load_state(folder)
        assert other.state() == saved, kind
        other.train(2)
        found.append(other.state())
    return saved, found


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("fp16", PARTS), ("offload within a window", WHOLE), ("hybrid", WHOLE), ("tensor parallel", PARTS)],
)
def test_each_layout_of_ranks_resumes_from_its_checkpoint(ranks, tmp_path, kind, layout):
    for saved, found in ranks.run(4, go_on, tmp_path / "a", kind, layout):
        assert found[0] != saved
        assert found == found[:1] * 3


def test_an_optimizer_that_has_not_stepped_is_saved_without_a_step(ranks, tmp_path):
    def save_and_load() -> tuple[list[Any], list[Any]]:
        training = Training(1)
        training.accelerator.save_state(tmp_path / "a", state_dict_type=PARTS)
        before = list(training.optimizer.state)
        other = Training(2)
        other.train(2)
        other.accelerator.load_state(tmp_path / "a")
        return before, list(other.optimizer.state)

    assert ranks.run(2, save_and_load) == [([], [])] * 2


def test_a_sharded_models_whole_state_dict_is_on_rank_0_alone(ranks, tmp_path):
    def gather() -> tuple[dict[str, Any], dict[str, Any], str]:
        training = Training(1)
        state = training.accelerator.get_state_dict(training.model)
        expected = {name: _listed(tensor) for name, tensor in training.bare.state_dict().items()}
        with pytest.raises(CheckpointError) as error:
            training.accelerator.save(training.bare.state_dict(), tmp_path / "weights.bin")
        assert type(training.accelerator.unwrap_model(training.model)[0]).__name__ == "FSDPLinear"
        training.accelerator.save_model(training.model, tmp_path / "model", max_shard_size=100)
        training.accelerator.wait_for_everyone()
        other = Training(2)
        load_model(other.model, tmp_path / "model")
        assert {name: _listed(tensor) for name, tensor in other.bare.state_dict().items()} == expected
        return expected, {name: tensor.tolist() for name, tensor in state.items()}, str(error.value)

    (expected, mine, refusal), (_, others, _) = ranks.run(2, gather)
    assert mine == expected
    assert others == {}
    assert "Pass accelerator.get_state_dict(model), called on every rank" in refusal
    assert not (tmp_path / "weights.bin").exists()


def test_a_damaged_part_of_a_rank_is_an_error_on_all_ranks(ranks, parts, tmp_path):
    name = "pytorch_model_fsdp_0/__1_0.distcp"
    path = shutil.copytree(parts[0], tmp_path / "a") / name
    content = path.read_bytes()
    path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])

    def load_damaged() -> str:
        training = Training(2)
        training.train(1)
        before = training.state()
        with pytest.raises(CheckpointError) as error:
            training.accelerator.load_state(tmp_path / "a")
        assert training.state() == before
        return str(error.value)

    for message in ranks.run(2, load_damaged):
        assert f"{name} is damaged: its sha256 is" in message


@pytest.mark.filterwarnings("ignore:.*in a single process")
def test_one_process_reads_the_sharded_layout_by_load_model_and_by_torchs_own_functions(parts):
    import torch.distributed.checkpoint as dcp

    folder, expected = parts
    alone, other = (Training(2, sharded=False) for _ in range(2))
    load_model(alone.model, folder)
    dcp.load({"model": other.bare.state_dict()}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    for training in (alone, other):
        found = {name: tensor.tolist() for name, tensor in training.bare.state_dict().items()}
        assert found == {name: expected[name] for name in found}
    moments = {"optimizer": {"state": {"0.weight": {"exp_avg": torch.zeros(5, 4)}}}}
    dcp.load(moments, checkpoint_id=folder / "optimizer_0", no_dist=True)
    assert moments["optimizer"]["state"]["0.weight"]["exp_avg"].tolist() == expected["0.exp_avg"]
    extended = torch.nn.Sequential(*alone.bare, torch.nn.Linear(1, 1))
    assert load_model(extended, folder, strict=False).missing_keys == ["3.bias", "3.weight"]
    larger = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))
    words = r"(?s)nothing was loaded.*size mismatch for 0.weight: \(5, 4\) in the file, \(6, 4\) in the model\."
    with pytest.raises(CheckpointError, match=words):
        load_model(larger, folder)


def test_an_outline_of_python_3_11_2_is_read(tmp_path, monkeypatch):
    """Python 3.11.0 to 3.11.3 pickle a member of an enumeration as `getattr(type, name)`."""
    from torch.distributed.checkpoint import metadata

    kind = metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(kind, "__reduce_ex__", lambda member, _protocol: (getattr, (kind, member.name)))
    tensor = metadata.TensorStorageMetadata(metadata.TensorProperties(), torch.Size([2]), [])
    written = pickle.dumps(metadata.Metadata({"weight": tensor}))
    assert b"getattr" in written
    (tmp_path / ".metadata").write_bytes(written)
    assert ShardReader(tmp_path).read_metadata().state_dict_metadata == {"weight": tensor}


@pytest.mark.parametrize(("layout", "failing"), [(WHOLE, 0), (PARTS, 1)])
def test_a_full_disk_of_a_rank_leaves_the_earlier_checkpoint_whole(ranks, tmp_path, layout, failing):
    def fill_the_disk() -> tuple[str, bool]:
        training = Training(1)
        training.train(2)
        training.accelerator.save_state(tmp_path / "a", state_dict_type=layout)
        expected = training.state()
        training.train(1)
        fills = training.accelerator.process_index == failing
        with small_files(1000) if fills else contextlib.nullcontext(), pytest.raises(Exception) as error:
            training.accelerator.save_state(tmp_path / "a", state_dict_type=layout)
        training.accelerator.load_state(tmp_path / "a")
        return f"{error.typename}: {error.value}", training.state() == expected

    outcomes = ranks.run(2, fill_the_disk)
    assert all(whole for _, whole in outcomes)
    assert outcomes[1 - failing][0].startswith(f"CheckpointError: rank {failing} could not write its part")
    assert {path.name for path in tmp_path.iterdir()} == {"a"}


def test_a_window_of_a_sharded_model_stays_with_its_ranks_and_their_layout(ranks, tmp_path):
    def save_in_a_window() -> str:
        training = Training(1, gradient_accumulation_steps=3)
        training.train(1)
        training.accelerator.save_state(tmp_path / "a")
        plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=False)
        training = Training(1, gradient_accumulation_plugin=plugin)
        training.train(1)
        with pytest.raises(CheckpointError) as error:
            training.accelerator.save_state(tmp_path / "held back")
        return str(error.value)

    def refuse(sharded: bool) -> str:
        training = Training(2, sharded=sharded, gradient_accumulation_steps=3)
        before = training.state()
        with pytest.raises(CheckpointError) as error:
            training.accelerator.load_state(tmp_path / "a")
        assert training.state() == before
        return str(error.value)

    for message in ranks.run(2, save_in_a_window):
        assert re.search(r"are not reduced yet.*if accelerator\.sync_gradients: accelerator\.save", message)
    for message in ranks.run(4, refuse, True):
        assert "window's gradients of a sharded model on 2 ranks, which 4 cannot share" in message
    for message in (*ranks.run(2, refuse, False), refuse(False)):
        assert "holds a window's gradients of a model that was sharded in another way: " in message


def test_unknown_and_impossible_layouts_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"state_dict_type='LOCAL' is unknown\. It can be 'FULL_STATE_DICT', 'SHARDED"):
        Accelerator(cpu=True).save_state(tmp_path / "a", state_dict_type="LOCAL")
    project = ProjectConfiguration(save_on_each_node=True)
    with pytest.raises(ValueError, match="needs one folder for all machines, and save_on_each_node=True gives"):
        Accelerator(cpu=True, project_config=project).save_state(tmp_path / "a", state_dict_type=PARTS)
    assert list(tmp_path.iterdir()) == []


def test_hooks_of_rank_0_remove_what_they_save_themselves(ranks, tmp_path):
    def save_with_hook(replace: bool) -> str:
        training = Training(1)

        def hook(models: list[Any], weights: list[dict[str, Any]], folder: str) -> None:
            if replace and training.accelerator.is_main_process:
                weights[0] = dict(weights[0])
            elif training.accelerator.is_main_process:
                del weights[0]["2.bias"]

        training.accelerator.register_save_state_pre_hook(hook)
        try:
            training.accelerator.save_state(tmp_path / "a")
        except CheckpointError as error:
            return str(error)
        return ""

    assert ranks.run(2, save_with_hook, False) == ["", ""]
    assert "2.bias" not in load_file(tmp_path / "a" / "model.safetensors")
    assert all("replaced a sharded model's weights" in said for said in ranks.run(2, save_with_hook, True))
