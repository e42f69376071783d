"""Objects of the user, schedulers and the scaler in a checkpoint of one process."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiStepLR

from notebook_launcher.training.accelerator import Accelerator
from notebook_launcher.training.checkpoints import CheckpointError
from tests.support.toy_checkpoints import Meter, Training

pytestmark = pytest.mark.usefixtures("compiler_cache")


class Opaque:
    """An object that only unpickling restores."""


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
    with pytest.warns(UserWarning, match="was not saved in fp16: the gradient scaler begins with its initial"):
        other.load_state(tmp_path / "full")
    full.load_state(tmp_path / "half")
