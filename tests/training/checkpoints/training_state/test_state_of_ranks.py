"""Checkpoints of several ranks: of each its own part, other numbers of ranks, and what fails on one of them."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from notebook_launcher.training.accelerator import Accelerator
from notebook_launcher.training.checkpoints import CheckpointError
from notebook_launcher.training.checkpoints.saving import merge_windows
from notebook_launcher.training.plugins import ProjectConfiguration
from notebook_launcher.training.random import set_seed
from tests.support.checkpoints import files
from tests.support.toy_checkpoints import Meter
from tests.support.toy_training import recorded


class Averaging:
    """A model that becomes the weighted mean of what it has seen, where a window of four micro-batches ends."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(model.weight)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))

    def see(self, steps: list[list[tuple[float, float | None]]]) -> float:
        """See a value of a weight for each rank in each step; return the weight that the model has then."""
        for step in steps:
            value, weight = step[self.accelerator.process_index]
            with self.accelerator.accumulate(self.model):
                # A loss whose gradient is -value, through the model, so that DDP sees it.
                loss = -self.model(torch.tensor([[value]], dtype=torch.float64)).sum()
                self.accelerator.backward(loss, weight)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return float(self.accelerator.unwrap_model(self.model).weight.item())


def test_object_whose_state_differs_between_ranks_is_saved_and_loaded_by_rank(ranks, tmp_path):
    """A position in a shard, a buffer of samples, or a schedule by the rank's own loss; what is equal is saved once."""

    def begin(values: tuple[Any, ...]) -> tuple[Accelerator, list[Any]]:
        accelerator = Accelerator(cpu=True)
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        accelerator.prepare(optimizer, schedule)
        objects = [Meter(value) for value in values]
        accelerator.register_for_checkpointing(*objects)
        return accelerator, [schedule, *objects]

    def save() -> None:
        rank = torch.distributed.get_rank()
        text = "aa"[rank:][:1] * 2  # Equal, and another object.
        equal = {"names": [text, text], "tensor": torch.arange(3)}
        buffer = {"rows": [torch.full((2,), float(rank)), torch.tensor(1)]}
        accelerator, (schedule, *_) = begin((100 + rank, equal, buffer))
        schedule.step(rank)
        accelerator.save_state(tmp_path / "a")

    def load() -> tuple[list[Any], list[str]]:
        accelerator, (schedule, *objects) = begin((0, 0, 0))
        _, remarks = recorded(accelerator.load_state, tmp_path / "a")
        position, equal, buffer = (made.state for made in objects)
        found = [position, equal["names"], buffer["rows"][0].tolist(), schedule.state_dict()["best"]]
        return found, remarks

    ranks.run(2, save)
    own = {f"{name}_rank_1.{end}" for name, end in [("custom_checkpoint_0", "pkl"), ("custom_checkpoint_2", "pkl")]}
    assert {name for name in files(tmp_path / "a") if "_rank_" in name} == {*own, "scheduler_rank_1.bin"}
    by_rank = [[100 + rank, ["aa", "aa"], [rank, rank], rank] for rank in range(2)]
    assert ranks.run(2, load) == [(by_rank[0], []), (by_rank[1], [])]
    found, remarks = load()
    assert found == by_rank[0]
    assert len(remarks) == 3
    words = "a state of Meter (custom_checkpoint_0.pkl) for each of 2 ranks, and 1 load it: the states of rank 1 are"
    assert words in remarks[1]
    *others, (found, _) = ranks.run(3, load)
    assert [found for found, _ in others] == by_rank
    assert found == by_rank[0]
    assert "3 load it: rank 2 got rank 0's." in others[0][1][2]


# Six or eight micro-batches: two steps of the first ranks, then two of the others.
VALUES = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0]


@pytest.mark.parametrize(("before", "after", "weigh"), [(2, 1, False), (1, 2, True), (2, 3, True), (3, 2, False)])
def test_open_window_resumes_with_another_number_of_ranks(ranks, tmp_path, before, after, weigh):
    seen = iter([(value, float(at % 3 + 1) if weigh else None) for at, value in enumerate(VALUES)])
    first = [[next(seen) for _ in range(before)] for _ in range(2)]
    second = [[next(seen) for _ in range(after)] for _ in range(2)]

    def begin() -> None:
        training = Averaging()
        training.see(first)
        training.accelerator.save_state(tmp_path / "a")

    def finish() -> float:
        training = Averaging()
        recorded(training.accelerator.load_state, tmp_path / "a")  # New ranks have no random states.
        return training.see(second)

    ranks.run(before, begin)
    pairs = [(value, weight or 1.0) for step in (*first, *second) for value, weight in step]
    mean = sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
    assert ranks.run(after, finish) == pytest.approx([mean] * after, rel=1e-12)


def test_where_ranks_are_averaged_the_mean_over_ranks_stays():
    windows = [
        {"state": {"windows": [{"num_batches": 2, "weight": weight}]}, "gradients": gradients}
        for weight, gradients in [(1.0, {"a": torch.tensor(2.0)}), (3.0, {"a": torch.tensor(4.0), "b": torch.ones(1)})]
    ]
    merged = merge_windows(windows, num_processes=4, nominal_divisor=True)
    assert merged["gradients"] == {"a": torch.tensor(3.0), "b": torch.tensor([0.5])}
    merged = merge_windows(windows, num_processes=4, nominal_divisor=False)
    assert merged["gradients"] == {"a": torch.tensor(1.5), "b": torch.tensor([0.25])}
    assert merged["state"] == {"windows": [{"num_batches": 2, "weight": 1.0}]}


def test_new_ranks_get_own_random_states_with_one_warning(ranks, tmp_path):
    set_seed(3)
    Accelerator(cpu=True).save_state(tmp_path / "a")
    expected = random.random(), torch.rand(1).item()

    def load() -> tuple[tuple[float, float], list[str]]:
        _, said = recorded(Accelerator(cpu=True).load_state, tmp_path / "a")
        return (random.random(), torch.rand(1).item()), said

    (draws_0, said_0), (draws_1, said_1) = ranks.run(2, load)
    assert draws_0 == expected
    assert draws_1[0] != draws_0[0]
    assert draws_1[1] != draws_0[1]
    assert len(said_0) == 1
    assert "random number generators of rank 1 start from states derived from rank 0's" in said_0[0]
    assert said_1 == []


def test_rank_that_cannot_begin_or_load_is_an_error_on_all(ranks, tmp_path):
    class Picky:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, _: Any) -> None:
            if torch.distributed.get_rank() == 1:
                raise KeyError("not on rank 1")

    def attempt() -> list[tuple[str, str]]:
        accelerator = Accelerator(cpu=True)
        accelerator.register_for_checkpointing(Picky())
        errors = []
        for step in (
            accelerator.save_state,
            lambda: accelerator.load_state(tmp_path / "nowhere"),
            lambda: accelerator.load_state(accelerator.save_state(tmp_path / "a")),
        ):
            with pytest.raises((CheckpointError, ValueError, KeyError)) as error:
                step()
            errors.append((error.typename, str(error.value)))
        return errors

    mine, others = ranks.run(2, attempt)
    assert [kind for kind, _ in mine] == ["ValueError", "CheckpointError", "CheckpointError"]
    assert [kind for kind, _ in others] == ["CheckpointError", "CheckpointError", "KeyError"]
    assert others[0][1].startswith("rank 0 could not begin the checkpoint: ValueError: save_state() needs a folder")
    assert others[1][1].startswith("rank 0 could not find the checkpoint: CheckpointError: load_state(")
    assert mine[2][1] == "rank 1 could not load the checkpoint: KeyError: 'not on rank 1'"


def test_each_machine_may_have_its_own_copy(ranks, tmp_path):
    first: Any = [[(1.0, None), (2.0, None)]] * 2
    second: Any = [[(3.0, None), (8.0, None)]] * 2

    def on_two_machines() -> tuple[float, float]:
        os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"
        rank = torch.distributed.get_rank()
        found: list[float] = []
        nothing: Any = []
        for steps in (first, nothing):
            training = Averaging()
            training.accelerator.state.local_process_index = 0
            training.accelerator.project_configuration = ProjectConfiguration(save_on_each_node=True)
            training.see(steps)
            act = training.accelerator.save_state if steps else training.accelerator.load_state
            act(tmp_path / f"machine_{rank}")
            found.append(training.see(second))
        os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank), "2"
        return found[0], found[1]

    assert ranks.run(2, on_two_machines) == [(3.5, 3.5)] * 2
    for rank in (0, 1):
        assert {f"random_states_{rank}.pkl", f"window_{rank}.bin", "model.safetensors"} <= files(
            tmp_path / f"machine_{rank}"
        )
        assert f"random_states_{1 - rank}.pkl" not in files(tmp_path / f"machine_{rank}")
