"""`save_state` and `load_state` in one process: what comes back, what is refused, and hooks."""

from __future__ import annotations

import json
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from notebook_launcher.training.accelerator import Accelerator
from notebook_launcher.training.checkpoints import CheckpointError
from notebook_launcher.training.random import set_seed
from tests.support.checkpoints import files, same
from tests.support.toy_checkpoints import Meter, Training

pytestmark = pytest.mark.usefixtures("compiler_cache")

MANIFEST = "checkpoint_manifest.json"
FILES = ["model.safetensors", "optimizer.bin", "optimizer_1.bin", "scheduler.bin", "custom_checkpoint_0.pkl",
         "random_states_0.pkl", "leaves.bin", "window_0.bin"]  # fmt: skip


@pytest.mark.parametrize(("micro_batches", "safe"), [(0, True), (1, False), (3, True), (5, False)])
def test_resumed_training_equals_uninterrupted_and_saving_changes_nothing(tmp_path, micro_batches, safe):
    through = Training(1)
    through.train(micro_batches + 7)
    expected = through.everything()
    first = Training(1)
    first.train(micro_batches)
    for _ in range(2):
        first.accelerator.save_state(tmp_path / "a", safe_serialization=safe)
    first.train(7)
    assert first.everything() == expected
    second = Training(2)
    second.train(2)  # what it had gathered is forgotten
    second.accelerator.load_state(tmp_path / "a")
    second.train(7)
    assert second.everything() == expected


def test_files_have_accelerates_names_and_a_manifest_lists_them(saved):
    assert files(saved) == {*FILES, MANIFEST}
    manifest = json.loads((saved / MANIFEST).read_text())
    assert manifest["format"] == 1
    assert manifest["num_processes"] == 1
    assert manifest["objects"] == {
        "models": 1, "leaves": 1, "optimizers": 2, "schedulers": 1, "dataloaders": 0, "custom_objects": 1,
    }  # fmt: skip
    assert manifest["versions"]["torch"] == torch.__version__
    assert set(manifest["files"]) == set(FILES)
    assert all(record["bytes"] == (saved / name).stat().st_size for name, record in manifest["files"].items())


# What is refused, and that nothing was loaded then.


def refuse(training: Training, folder: Path, words: str, **options: Any) -> None:
    set_seed(5)
    expected = training.everything()
    set_seed(5)
    with pytest.raises(CheckpointError, match=words):
        training.accelerator.load_state(folder, **options)
    assert training.everything() == expected


def test_file_that_is_missing_shorter_or_changed_is_named(saved):
    training = Training(2)
    for name in FILES:
        content = (saved / name).read_bytes()
        (saved / name).unlink()
        refuse(training, saved, rf"{name} is missing, and \d+ bytes with sha256 [0-9a-f]{{64}} were written")
        (saved / name).write_bytes(content[:-1])
        refuse(training, saved, rf"{name} is damaged: {len(content) - 1} bytes, where {len(content)} were written")
        middle = len(content) // 2
        (saved / name).write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        refuse(training, saved, rf"{name} is damaged: its sha256 is [0-9a-f]{{64}}, and [0-9a-f]{{64}} was written")
        (saved / name).write_bytes(content)


def test_manifest_that_does_not_parse_or_is_newer_is_refused(saved):
    training, manifest = Training(2), json.loads((saved / MANIFEST).read_text())
    for text in ("", "{", "[]", '{"format": 1}', '{"format": "x"}', "\xff\xfe"):
        (saved / MANIFEST).write_bytes(text.encode("latin1"))
        refuse(training, saved, f"{MANIFEST} is damaged")
    (saved / MANIFEST).write_text(json.dumps({**manifest, "format": 4}))
    refuse(training, saved, "has format 4, and this version reads up to 3. .* install that version or a later one")


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
        (
            lambda t: setattr(t.model[0], "bias", torch.nn.Parameter(torch.zeros(9))),
            r"(?s)does not fit Sequential.*size mismatch for 0.bias: \(8,\) in the",
        ),
        (lambda t: t.adam.add_param_group({"params": [torch.zeros(1)]}), r"groups have \[4\] parameters.*\[4, 1\]"),
    ],
)
def test_other_objects_than_were_saved_are_refused(saved, change, words):
    other = Training(2)
    change(other)
    refuse(other, saved, words)


def test_several_models_have_their_own_files_and_other_names_are_loaded_if_asked(tmp_path):
    def prepare(*, bias: bool = False) -> tuple[Accelerator, list[Any]]:
        accelerator = Accelerator(cpu=True)
        return accelerator, [accelerator.prepare(torch.nn.Linear(2, 2, bias=bias)) for _ in range(3)]

    accelerator, models = prepare()
    with pytest.raises(TypeError, match=r"save_state\(\) has no argument safe_serialisation=\. Did you mean safe_s"):
        accelerator.save_state(tmp_path / "a", safe_serialisation=False)
    accelerator.save_state(tmp_path / "a", exclude_frozen_parameters=True)  # DeepSpeed's
    assert {"model.safetensors", "model_1.safetensors", "model_2.safetensors"} < files(tmp_path / "a")
    other, others = prepare()
    other.load_state(tmp_path / "a")
    assert all(same(mine, its) for mine, its in zip(models, others, strict=True))
    other, others = prepare(bias=True)
    with pytest.raises(TypeError, match=r"load_state\(\) has no argument stricht=\. Did you mean strict"):
        other.load_state(tmp_path / "a", stricht=False)
    with pytest.raises(CheckpointError, match=r"Missing key\(s\) in state_dict: 'bias'"):
        other.load_state(tmp_path / "a")
    other.load_state(tmp_path / "a", strict=False, map_location="on_device")
    assert all(torch.equal(mine.weight, its.weight) for mine, its in zip(models, others, strict=True))


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


# Objects of the user, schedulers and the scaler.


class Opaque:
    """An object that only unpickling restores."""


@pytest.mark.parametrize(
    "state",
    [
        {"a": 1, "b": [2.5, None, "x", b"y", 1j], "c": (1, {2, 3}), 4: True},
        {"number": np.float64(1.5), "n": np.int8(3)},
        {"count": Counter("hello"), "frozen": frozenset({1}), "range": range(3)},
        None,
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


def test_scaler_is_restored_and_reported_if_missing(tmp_path):
    saving, other, full = (Accelerator(cpu=True, mixed_precision=kind) for kind in ("fp16", "fp16", "no"))
    assert saving.scaler is not None
    assert other.scaler is not None
    saving.scaler.load_state_dict({**saving.scaler.state_dict(), "scale": 8.0, "_growth_tracker": 5})
    saving.save_state(tmp_path / "half")
    other.load_state(tmp_path / "half")
    assert other.scaler.state_dict() == saving.scaler.state_dict()
    full.save_state(tmp_path / "full")
    with pytest.warns(UserWarning, match="was not saved in fp16: the gradient scaler begins with its initial"):
        other.load_state(tmp_path / "full")
    full.load_state(tmp_path / "half")
