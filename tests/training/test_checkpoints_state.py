"""`save_state` and `load_state` in one process: what comes back, what is refused, what is named and removed."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter, deque
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiStepLR, OneCycleLR

from notebook_launcher.training.accelerator import Accelerator
from notebook_launcher.training.checkpoints import CheckpointError, load_model
from notebook_launcher.training.plugins import ProjectConfiguration
from notebook_launcher.training.random import set_seed
from tests.support.checkpoints import files, same

pytestmark = pytest.mark.usefixtures("compiler_cache")

# ruff: noqa: NPY002 - the legacy generator is the one whose state is kept

MANIFEST = "checkpoint_manifest.json"


class Meter:
    """An object of the user with a state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Opaque:
    """An object that only unpickling restores."""


class Training:
    """A small training: dropout, a leaf tensor, two optimizers, windows of three micro-batches."""

    def __init__(self, seed: int, *, steps: int = 3, **options: Any) -> None:
        set_seed(seed)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **options)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.4), torch.nn.Linear(8, 1))
        scale = torch.rand(1, requires_grad=True)
        adam = torch.optim.AdamW(model.parameters(), lr=0.05)
        sgd = torch.optim.SGD([scale], lr=0.1, momentum=0.9)
        schedule = OneCycleLR(adam, max_lr=0.1, total_steps=50)
        self.model, self.scale, self.adam, self.sgd, self.schedule = self.accelerator.prepare(
            model, scale, adam, sgd, schedule
        )
        self.meter = Meter({"losses": [], "best": seed})
        self.accelerator.register_for_checkpointing(self.meter)

    def train(self, micro_batches: int) -> None:
        for _ in range(micro_batches):
            inputs = torch.rand(5, 4) * random.random() + float(np.random.random_sample())
            with self.accelerator.accumulate(self.model, self.scale):
                loss = (self.model(inputs) * self.scale).square().mean()
                self.accelerator.backward(loss)
                for optimizer in (self.adam, self.sgd):
                    optimizer.step()
                    optimizer.zero_grad()
                self.schedule.step()
            self.meter.state["losses"].append(loss.item())

    def state(self) -> str:
        """All that it has, down to the last bit."""
        gradients = [None if one.grad is None else one.grad.tolist() for one in [*self.model.parameters(), self.scale]]
        states = [one.state_dict() for one in (self.model, self.adam, self.sgd, self.schedule, self.meter)]
        return repr(_listed((states, self.scale.tolist(), gradients)))

    def everything(self) -> tuple[str, float, float, list[float]]:
        """Its state, and the next numbers drawn in this process."""
        return self.state(), random.random(), float(np.random.random_sample()), torch.rand(3).tolist()


def _listed(value: Any) -> Any:
    match value:
        case torch.Tensor():
            return value.tolist(), str(value.dtype)
        case dict():
            return {name: _listed(one) for name, one in value.items()}
        case list() | tuple():
            return [_listed(one) for one in value]
    return value


@pytest.fixture
def training() -> Training:
    return Training(1)


@pytest.fixture
def saved(tmp_path: Path, training: Training) -> Path:
    """A checkpoint in the middle of a window."""
    training.train(4)
    folder: Path = training.accelerator.save_state(tmp_path / "checkpoint")
    return folder


@pytest.mark.parametrize("micro_batches", [0, 1, 3, 5])
@pytest.mark.parametrize("safe", [True, False])
def test_resumed_training_equals_uninterrupted(tmp_path, micro_batches, safe):
    first = Training(1)
    first.train(micro_batches)
    first.accelerator.save_state(tmp_path / "a", safe_serialization=safe)
    first.train(7)
    expected = first.everything()
    second = Training(2)
    second.train(2)  # what it had gathered is forgotten
    second.accelerator.load_state(tmp_path / "a")
    second.train(7)
    assert second.everything() == expected


def test_save_state_changes_nothing(tmp_path):
    first = Training(1)
    first.train(8)
    expected = first.everything()
    second = Training(1)
    for at in range(4):
        second.train(2)
        second.accelerator.save_state(tmp_path / f"{at % 2}")
    assert second.everything() == expected


def test_files_have_accelerates_names(saved):
    assert files(saved) == {
        "model.safetensors",
        "optimizer.bin",
        "optimizer_1.bin",
        "scheduler.bin",
        "custom_checkpoint_0.pkl",
        "random_states_0.pkl",
        "leaves.bin",
        "window_0.bin",
        MANIFEST,
    }


def test_manifest_lists_objects_files_and_versions(saved):
    manifest = json.loads((saved / MANIFEST).read_text())
    assert manifest["format"] == 1
    assert manifest["num_processes"] == 1
    assert manifest["objects"] == {
        "models": 1, "leaves": 1, "optimizers": 2, "schedulers": 1, "dataloaders": 0, "custom_objects": 1,
    }  # fmt: skip
    assert manifest["versions"]["torch"] == torch.__version__
    assert set(manifest["files"]) == files(saved) - {MANIFEST}
    assert all(record["bytes"] == (saved / name).stat().st_size for name, record in manifest["files"].items())


def test_two_models_have_two_files_and_each_gets_its_own(tmp_path):
    def prepare() -> tuple[Accelerator, list[torch.nn.Module]]:
        accelerator = Accelerator(cpu=True)
        return accelerator, [accelerator.prepare(torch.nn.Linear(2, 2)) for _ in range(3)]

    accelerator, models = prepare()
    accelerator.save_state(tmp_path / "a")
    assert {"model.safetensors", "model_1.safetensors", "model_2.safetensors"} < files(tmp_path / "a")
    other, others = prepare()
    other.load_state(tmp_path / "a")
    assert all(same(mine, its) for mine, its in zip(models, others, strict=True))


def test_weights_alone_are_loaded_too(saved, training):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.4), torch.nn.Linear(8, 1))
    load_model(model, saved)
    assert same(model, training.model)


# What is refused, and that nothing was loaded then.


def refuse(training: Training, folder: Path, words: str, **options: Any) -> None:
    set_seed(5)
    expected = training.everything()
    set_seed(5)
    with pytest.raises(CheckpointError, match=words):
        training.accelerator.load_state(folder, **options)
    assert training.everything() == expected


FILES = ["model.safetensors", "optimizer.bin", "optimizer_1.bin", "scheduler.bin", "custom_checkpoint_0.pkl",
         "random_states_0.pkl", "leaves.bin", "window_0.bin"]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_missing_file_is_named(saved, name):
    (saved / name).unlink()
    refuse(Training(2), saved, rf"{name} is missing, and \d+ bytes with sha256 [0-9a-f]{{64}} were written")


@pytest.mark.parametrize("name", FILES)
def test_truncated_file_is_named(saved, name):
    content = (saved / name).read_bytes()
    (saved / name).write_bytes(content[:-1])
    refuse(Training(2), saved, rf"{name} is damaged: {len(content) - 1} bytes, where {len(content)} were written")


@pytest.mark.parametrize("name", FILES)
def test_changed_bit_is_noticed(saved, name):
    content = bytearray((saved / name).read_bytes())
    content[len(content) // 2] ^= 1
    (saved / name).write_bytes(content)
    refuse(Training(2), saved, rf"{name} is damaged: its sha256 is [0-9a-f]{{64}}, and [0-9a-f]{{64}} was written")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": "x"}', "\xff\xfe"])
def test_manifest_that_does_not_parse_is_refused(saved, text):
    (saved / MANIFEST).write_bytes(text.encode("latin1"))
    refuse(Training(2), saved, f"{MANIFEST} is damaged")


def test_newer_format_is_refused(saved):
    manifest = json.loads((saved / MANIFEST).read_text())
    (saved / MANIFEST).write_text(json.dumps({**manifest, "format": 3}))
    refuse(Training(2), saved, "has format 3, and this version reads up to 2. .* install that version or a later one")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.accelerator.prepare(torch.nn.Linear(1, 1)), "holds 1 models, and 2 are prepared here"),
        (lambda t: t.accelerator.prepare(torch.zeros(1, requires_grad=True)), "holds 1 leaves, and 2 are prepared"),
        (
            lambda t: t.accelerator.prepare(torch.optim.SGD(t.model.parameters(), lr=0.1)),
            "holds 2 optimizers, and 3 are prepared here; nothing was loaded. Prepare and register the same objects",
        ),
        (
            lambda t: t.accelerator.prepare(LambdaLR(t.adam.optimizer, lambda _: 1.0)),
            "holds 1 schedulers, and 2 are prepared here",
        ),
        (
            lambda t: t.accelerator.register_for_checkpointing(Meter()),
            r"holds 1 custom objects, and 2 are registered here.*\n*.*load_model\(model, ",
        ),
        (lambda t: t.adam.add_param_group({"params": [torch.zeros(1)]}), r"groups have \[4\] parameters.*\[4, 1\]"),
    ],
)
def test_other_objects_than_were_saved_are_refused(saved, change, words):
    other = Training(2)
    change(other)
    refuse(other, saved, words)


def test_model_of_another_shape_is_refused(saved):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Dropout(0.4), torch.nn.Linear(9, 1))
    leaf = torch.rand(1, requires_grad=True)
    adam, sgd = torch.optim.AdamW(model.parameters()), torch.optim.SGD([leaf])
    accelerator.prepare(model, leaf, adam, sgd, OneCycleLR(adam, max_lr=0.1, total_steps=50))
    accelerator.register_for_checkpointing(Meter())
    with pytest.raises(CheckpointError, match=r"(?s)does not fit Sequential.*size mismatch for 0.bias: \(8,\) in the"):
        accelerator.load_state(saved)
    assert not adam.state_dict()["state"]


def test_leaf_tensor_of_another_shape_is_refused(tmp_path):
    for size, check in ((2, None), (3, r"leaf tensor 0 has shape \(2,\) in the file, and \(3,\) here")):
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(torch.zeros(size, requires_grad=True))
        if check is None:
            accelerator.save_state(tmp_path / "a")
        else:
            with pytest.raises(CheckpointError, match=check):
                accelerator.load_state(tmp_path / "a")


def test_names_of_weights_may_differ_if_asked(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2, bias=False))
    accelerator.save_state(tmp_path / "a")
    other = Accelerator(cpu=True)
    other.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"Missing key\(s\) in state_dict: 'bias'"):
        other.load_state(tmp_path / "a")
    other.load_state(tmp_path / "a", strict=False, map_location="on_device")
    assert torch.equal(other._models[0].weight, accelerator._models[0].weight)


def test_unknown_map_location_is_refused(saved, training):
    with pytest.raises(ValueError, match=r"map_location='moon' is unknown. It can be 'cpu', 'on_device'"):
        training.accelerator.load_state(saved, map_location="moon")


# Objects of the user's.


@pytest.mark.parametrize(
    "state",
    [
        {"a": 1, "b": [2.5, None, "x", b"y", 1j], "c": (1, {2, 3}), 4: True},
        {"array": np.arange(6).reshape(2, 3).tolist(), "number": float(np.float64(1.5))},
        {"count": Counter("hello"), "frozen": frozenset({1}), "range": range(3)},
        {"tensor": [1.0, 2.0]},
        None,
        [1, 2],
        "text",
    ],
)
def test_states_of_plain_types_just_work(tmp_path, state):
    for meter in (Meter(state), Meter("other")):
        accelerator = Accelerator(cpu=True)
        accelerator.register_for_checkpointing(meter)
        if meter.state == "other":
            accelerator.load_state(tmp_path / "a")
        else:
            accelerator.save_state(tmp_path / "a")
    assert meter.state == state


def test_numpy_arrays_and_numbers_are_plain(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(
        meter := Meter({"array": np.eye(2), "number": np.float64(2), "n": np.int8(3)})
    )
    accelerator.save_state(tmp_path / "a")
    meter.state = None
    accelerator.load_state(tmp_path / "a")
    assert meter.state["array"].tolist() == [[1, 0], [0, 1]]
    assert (meter.state["number"], meter.state["n"]) == (2, 3)


@pytest.mark.parametrize(("state", "name"), [(Opaque(), r"Opaque"), (deque([1]), r"collections\.deque")])
def test_other_types_are_announced_when_saved_and_refused_unless_asked_for(tmp_path, state, name):
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(meter := Meter(state))
    with pytest.warns(UserWarning, match=rf"custom_checkpoint_0.pkl holds .*{name}: load_state will refuse it"):
        accelerator.save_state(tmp_path / "a")
    meter.state = None
    with pytest.raises(CheckpointError, match=rf"_0.pkl holds .*{name}, which is not loaded without permission"):
        accelerator.load_state(tmp_path / "a")
    assert meter.state is None
    accelerator.load_state(tmp_path / "a", {"weights_only": False})
    assert type(meter.state) is type(state)


def test_torchs_own_list_of_safe_types_stays_as_it_was(saved):
    before = set(torch.serialization.get_safe_globals())
    assert not before & {frozenset, range}
    torch.serialization.add_safe_globals([Opaque, frozenset])
    Training(2).accelerator.load_state(saved)
    assert set(torch.serialization.get_safe_globals()) == {*before, Opaque, frozenset}
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(list(before))


def test_objects_without_a_state_are_listed():
    class Half:
        def state_dict(self) -> None: ...

    with pytest.raises(ValueError, match=r"(?s)Item at index 1, `Half`.*Item at index 3, `int`"):
        Accelerator(cpu=True).register_for_checkpointing(Meter(), Half(), Meter(), 5)


@pytest.mark.parametrize("schedule", [lambda o: MultiStepLR(o, [2, 4]), lambda o: LambdaLR(o, lambda n: 1 / (n + 1))])
def test_schedulers_are_restored(tmp_path, schedule):
    def prepare() -> tuple[Accelerator, Any, LRScheduler]:
        accelerator = Accelerator(cpu=True)
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        return accelerator, *accelerator.prepare(optimizer, schedule(optimizer))

    accelerator, optimizer, scheduler = prepare()
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    accelerator.save_state(tmp_path / "a")
    other, _, other_scheduler = prepare()
    other.load_state(tmp_path / "a")
    assert other_scheduler.get_last_lr() == scheduler.get_last_lr() != [1.0]
    assert other_scheduler.state_dict() == scheduler.state_dict()


def test_scaler_is_restored_and_reported_if_missing(tmp_path):
    saving, other, full = (Accelerator(cpu=True, mixed_precision=kind) for kind in ("fp16", "fp16", "no"))
    assert saving.scaler is not None
    assert other.scaler is not None
    saving.scaler.load_state_dict({**saving.scaler.state_dict(), "scale": 8.0, "_growth_tracker": 5})
    saving.save_state(tmp_path / "half")
    other.load_state(tmp_path / "half")
    assert other.scaler.state_dict() == saving.scaler.state_dict()
    full.save_state(tmp_path / "full")
    with pytest.warns(UserWarning, match="was not saved in fp16: the gradient scaler starts afresh"):
        other.load_state(tmp_path / "full")
    full.load_state(tmp_path / "half")


# Hooks.


def test_hooks_may_save_and_load_models_themselves(tmp_path, training):
    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        assert [type(model) for model in models] == [torch.nn.Sequential]
        (Path(folder) / "mine").mkdir()
        torch.save(weights.pop(), Path(folder) / "mine" / "weights.pt")

    def load(models: list[Any], folder: str) -> None:
        models.pop().load_state_dict(torch.load(Path(folder) / "mine" / "weights.pt"))

    training.accelerator.register_save_state_pre_hook(save)
    training.accelerator.save_state(tmp_path / "a")
    assert "mine/weights.pt" in files(tmp_path / "a")
    assert "mine/weights.pt" in json.loads((tmp_path / "a" / MANIFEST).read_text())["files"]
    assert "model.safetensors" not in files(tmp_path / "a")
    other = Training(2)
    refuse(other, tmp_path / "a", "model.safetensors is missing")
    other.accelerator.register_load_state_pre_hook(load)
    other.accelerator.load_state(tmp_path / "a")
    assert other.state() == training.state()
    (tmp_path / "a" / "mine" / "weights.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"mine/weights.pt is damaged: 0 bytes"):
        other.accelerator.load_state(tmp_path / "a")


def test_hook_that_was_removed_is_not_called(tmp_path, training):
    called = []
    handle = training.accelerator.register_save_state_pre_hook(lambda *arguments: called.append(arguments))
    training.accelerator.save_state(tmp_path / "a")
    handle.remove()
    training.accelerator.save_state(tmp_path / "a")
    assert len(called) == 1


def test_hook_that_fails_leaves_the_earlier_checkpoint_whole(saved, training):
    expected = training.state()

    def fail(*_: Any) -> None:
        raise KeyError("my mistake")

    handle = training.accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(KeyError, match="my mistake"):
        training.accelerator.save_state(saved)
    handle.remove()
    assert {path.name for path in saved.parent.iterdir()} == {"checkpoint"}
    training.accelerator.load_state(saved)
    assert training.state() == expected


# Folders.


def test_saving_again_leaves_nothing_of_the_earlier_checkpoint_and_all_else(saved, training):
    (saved / "notes.txt").write_text("mine")
    (saved / "below").mkdir()
    (saved / "below" / "model.safetensors").write_text("mine too")
    training.train(2)  # the window has ended
    training.accelerator.save_state(saved)
    assert "window_0.bin" not in files(saved)
    assert (saved / "notes.txt").read_text() == "mine"
    assert (saved / "below" / "model.safetensors").read_text() == "mine too"
    other = Training(2)
    other.accelerator.load_state(saved)
    assert other.state() == training.state()
    assert {path.name for path in saved.parent.iterdir()} == {"checkpoint"}


def test_checkpoint_of_accelerates_is_replaced_whole(tmp_path, training):
    (tmp_path / "a").mkdir()
    for name in ("random_states_0.pkl", "random_states_1.pkl", "pytorch_model.bin", "sampler.bin", "keep.txt"):
        (tmp_path / "a" / name).write_text("theirs")
    training.accelerator.save_state(tmp_path / "a")
    assert not files(tmp_path / "a") & {"random_states_1.pkl", "pytorch_model.bin", "sampler.bin"}
    assert "keep.txt" in files(tmp_path / "a")


def test_files_beside_no_checkpoint_stay_whatever_their_name(tmp_path, training):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "pytorch_model.bin").write_text("mine")
    training.accelerator.save_state(tmp_path / "a")
    assert (tmp_path / "a" / "pytorch_model.bin").read_text() == "mine"


def test_save_state_needs_a_folder_or_automatic_naming(tmp_path, training):
    with pytest.raises(CheckpointError, match=r"load_state\('.*nowhere'\): there is no folder"):
        training.accelerator.load_state(tmp_path / "nowhere")
    for method in ("save_state", "load_state"):
        with pytest.raises(
            ValueError, match=rf"{method}\(\) needs a folder: pass one, or .*automatic_checkpoint_naming"
        ):
            getattr(training.accelerator, method)()
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file; a checkpoint is a folder"):
        training.accelerator.save_state(tmp_path / "file")


def test_tilde_is_expanded_in_folder(tmp_path, monkeypatch, training):
    monkeypatch.setenv("HOME", str(tmp_path))
    training.accelerator.save_state("~/a")
    assert (tmp_path / "a" / MANIFEST).exists()
    training.accelerator.load_state("~/a")


def project(tmp_path: Path, **options: Any) -> Accelerator:
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, **options)
    return Accelerator(cpu=True, project_config=config)


def test_checkpoints_are_numbered_and_the_newest_is_loaded(tmp_path):
    accelerator = project(tmp_path)
    accelerator.register_for_checkpointing(meter := Meter())
    for meter.state in range(11):
        assert accelerator.save_state() == tmp_path / "checkpoints" / f"checkpoint_{meter.state}"
    (tmp_path / "checkpoints" / "notes").mkdir()
    accelerator.load_state()
    assert meter.state == 10
    assert accelerator.save_iteration == 11


def test_relative_project_dir_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    accelerator = project(Path("project"))
    accelerator.save_state()
    assert accelerator.load_state() == tmp_path / "project" / "checkpoints" / "checkpoint_0"


def test_oldest_are_removed_once_the_new_one_is_whole(tmp_path):
    accelerator = project(tmp_path, total_limit=2)
    accelerator.register_for_checkpointing(meter := Meter())
    for meter.state in range(12):
        accelerator.save_state()
    folders = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert folders == {"checkpoint_10", "checkpoint_11"}

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(OSError, match="disk full"):
        accelerator.save_state()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == folders


def test_automatic_name_that_is_taken_is_not_written_over(tmp_path):
    first = project(tmp_path)
    first.save_state()
    first.save_state()
    second = project(tmp_path)
    with pytest.raises(ValueError, match=r"checkpoint_0 exists already.*iteration=2\), or call load_state\(\) first"):
        second.save_state()
    second.load_state()
    assert second.save_state() == tmp_path / "checkpoints" / "checkpoint_2"


def test_automatic_names_need_a_project(tmp_path):
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(automatic_checkpoint_naming=True))
    with pytest.raises(ValueError, match=r"save_state\(\) without a folder needs a project"):
        accelerator.save_state()
    with pytest.raises(CheckpointError, match=r"checkpoints holds no folder checkpoint_N yet"):
        project(tmp_path).load_state()


def test_folder_that_is_named_wins_over_automatic_naming_and_is_never_removed(tmp_path):
    accelerator = project(tmp_path / "project", total_limit=1)
    for name in ("checkpoint_1", "checkpoint_2"):
        assert accelerator.save_state(tmp_path / name) == tmp_path / name
    accelerator.load_state(tmp_path / "checkpoint_1")
    assert accelerator.save_iteration == 2
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint_1", "checkpoint_2"}


# Accelerate's folders, and ours for Accelerate.


def theirs(seed: int) -> tuple[accelerate.Accelerator, torch.nn.Module, Any, Any, Meter]:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, scheduler = build(seed)
    prepared = accelerator.prepare(model, optimizer, scheduler)
    accelerator.register_for_checkpointing(meter := Meter({"seed": seed}))
    return accelerator, *prepared, meter


def ours(seed: int) -> tuple[Accelerator, torch.nn.Module, Any, Any, Meter]:
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler = build(seed)
    prepared = accelerator.prepare(model, optimizer, scheduler)
    accelerator.register_for_checkpointing(meter := Meter({"seed": seed}))
    return accelerator, *prepared, meter


def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, LRScheduler]:
    set_seed(seed)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * seed)
    return model, optimizer, OneCycleLR(optimizer, max_lr=0.1 * seed, total_steps=9)


def step(accelerator: Any, model: torch.nn.Module, optimizer: Any, scheduler: Any) -> None:
    accelerator.backward(model(torch.rand(3, 2)).sum())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def states(*objects: Any) -> Any:
    draws = random.random(), float(np.random.random_sample()), torch.rand(2)
    return _listed(([one.state_dict() for one in objects], draws))


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.filterwarnings("default")  # Accelerate's own
def test_accelerate_loads_what_we_saved(tmp_path, safe):
    accelerator, *objects, meter = ours(1)
    step(accelerator, *objects)
    accelerator.save_state(tmp_path / "a", safe_serialization=safe)
    expected = states(*objects, meter)
    accelerator, *objects, meter = theirs(2)
    accelerator.load_state(str(tmp_path / "a"))
    assert states(*objects, meter) == expected


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.filterwarnings("default")
def test_state_saved_by_accelerate_is_loaded_with_a_warning(tmp_path, safe):
    accelerator, *objects, meter = theirs(1)
    step(accelerator, *objects)
    accelerator.save_state(str(tmp_path / "a"), safe_serialization=safe)
    expected = states(*objects, meter)
    accelerator, *objects, meter = ours(2)
    with pytest.warns(
        UserWarning, match="has no manifest, because Accelerate writes none.* cannot be verified"
    ) as warned:
        accelerator.load_state(tmp_path / "a")
    assert len(warned) == 1
    assert states(*objects, meter) == expected


@pytest.mark.filterwarnings("default")
def test_accelerates_folder_must_fit_too(tmp_path):
    accelerator, *_ = theirs(1)
    accelerator.save_state(str(tmp_path / "a"))
    accelerator, *_ = ours(2)
    accelerator.register_for_checkpointing(Meter())
    with pytest.raises(CheckpointError, match="holds 1 custom objects, and 2 are registered"):
        accelerator.load_state(tmp_path / "a")
    shutil.copy(tmp_path / "a" / "optimizer.bin", tmp_path / "a" / "custom_checkpoint_1.pkl")
    (tmp_path / "a" / "optimizer.bin").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"optimizer.bin cannot be read"):
        accelerator.load_state(tmp_path / "a")
