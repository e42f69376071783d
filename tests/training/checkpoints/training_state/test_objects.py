"""Objects of the user, schedulers and the scaler in a checkpoint of one process."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
import pytest

from notebook_launcher.training.accelerator import Accelerator
from notebook_launcher.training.checkpoints import CheckpointError
from tests.support.toy_checkpoints import Meter

pytestmark = pytest.mark.usefixtures("compiler_cache")


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


def test_objects_without_a_state_are_listed():
    class Half:
        def state_dict(self) -> None: ...

    with pytest.raises(ValueError, match=r"(?s)Item at index 1, `Half`.*Item at index 3, `int`"):
        Accelerator(cpu=True).register_for_checkpointing(Meter(), Half(), Meter(), 5)


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
