"""Checkpoints of Accelerate that are loaded here, and checkpoints of this package that Accelerate loads."""

from __future__ import annotations

import random
import shutil
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from notebook_launcher.training.accelerator import Accelerator
from notebook_launcher.training.checkpoints import CheckpointError
from notebook_launcher.training.random import set_seed
from tests.support.toy_checkpoints import Meter, listed
from tests.support.toy_training import recorded

pytestmark = pytest.mark.usefixtures("compiler_cache")

# ruff: noqa: NPY002 - the legacy generator is the one whose state is kept


def theirs(seed: int) -> Any:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return begin(accelerate.Accelerator(cpu=True), seed)


def ours(seed: int) -> Any:
    return begin(Accelerator(cpu=True), seed)


def begin(accelerator: Any, seed: int) -> tuple[Any, torch.nn.Module, Any, Any, Meter]:
    set_seed(seed)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * seed)
    scheduler = OneCycleLR(optimizer, max_lr=0.1 * seed, total_steps=9)
    prepared = accelerator.prepare(model, optimizer, scheduler)
    accelerator.register_for_checkpointing(meter := Meter({"seed": seed}))
    return accelerator, *prepared, meter


def step(accelerator: Any, model: torch.nn.Module, optimizer: Any, scheduler: Any) -> None:
    accelerator.backward(model(torch.rand(3, 2)).sum())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def states(*objects: Any) -> Any:
    draws = random.random(), float(np.random.random_sample()), torch.rand(2)
    return listed(([obj.state_dict() for obj in objects], draws))


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.filterwarnings("default")  # Accelerate's own
def test_checkpoints_are_exchanged_with_accelerate(tmp_path, safe):
    for folder, (saves, loads) in {"ours": (ours, theirs), "theirs": (theirs, ours)}.items():
        accelerator, *objects, meter = saves(1)
        step(accelerator, *objects)
        accelerator.save_state(str(tmp_path / folder), safe_serialization=safe)
        expected = states(*objects, meter)
        accelerator, *objects, meter = loads(2)
        _, warned = recorded(accelerator.load_state, str(tmp_path / folder))
        assert states(*objects, meter) == expected
    (remark,) = warned
    assert "has no manifest, because Accelerate writes none: its files cannot be verified" in remark


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
    with pytest.raises(CheckpointError, match=r"(?s)optimizer.bin cannot be read: .* Load another checkpoint"):
        accelerator.load_state(tmp_path / "a")
