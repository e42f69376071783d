"""Checkpoints of several ranks: of each its own part, other numbers of ranks, and what fails on one of them."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import resource
import signal
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from notebook_launcher import RankFailedError, notebook_launch
from notebook_launcher.training import checkpoints
from notebook_launcher.training.accelerator import Accelerator
from notebook_launcher.training.checkpoints import CheckpointError
from notebook_launcher.training.checkpoints.saving import merge_windows
from notebook_launcher.training.random import set_seed
from tests.support.checkpoints import files
from tests.support.toy_training import session_fixture, shards_on_cpus

if TYPE_CHECKING:
    from pathlib import Path


class Training:
    """A model in windows of three micro-batches; every rank draws its own inputs."""

    def __init__(self, seed: int) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        set_seed(seed, device_specific=True)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        scale = torch.ones(1, requires_grad=True)
        optimizer = torch.optim.Adam([*model.parameters(), scale], lr=0.05)
        self.model, self.scale, self.optimizer = self.accelerator.prepare(model, scale, optimizer)

    def train(self, micro_batches: int) -> None:
        for _ in range(micro_batches):
            with self.accelerator.accumulate():
                loss = (self.model(torch.rand(5, 4) + random.random()) * self.scale).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()

    def everything(self) -> str:
        """All of it on this rank, down to the last bit."""
        model = self.accelerator.unwrap_model(self.model).state_dict()
        weights = {name: tensor.tolist() for name, tensor in model.items()}
        state = {
            at: {k: v.tolist() for k, v in one.items()} for at, one in self.optimizer.state_dict()["state"].items()
        }
        gradients = [
            None if parameter.grad is None else parameter.grad.tolist()
            for parameter in [*self.model.parameters(), self.scale]
        ]
        return repr((weights, self.scale.tolist(), state, gradients, random.random(), torch.rand(2).tolist()))


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
                self.accelerator.backward(self.loss(value), weight)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return float(self.accelerator.unwrap_model(self.model).weight.item())

    def loss(self, value: float) -> torch.Tensor:
        """A loss whose gradient is -value, through the model, so that DDP sees it."""
        loss: torch.Tensor = -self.model(torch.tensor([[value]], dtype=torch.float64)).sum()
        return loss


def warm_up() -> None:
    """Do nothing."""


ranks = session_fixture(2, warm_up)


@pytest.mark.parametrize("micro_batches", [3, 4])
def test_resumed_training_equals_uninterrupted_on_each_rank(ranks, tmp_path, micro_batches):
    def interrupted() -> tuple[str, str]:
        first = Training(1)
        first.train(micro_batches)
        first.accelerator.save_state(tmp_path / "a")
        first.train(7)
        expected = first.everything()
        second = Training(2)
        second.accelerator.load_state(tmp_path / "a")
        second.train(7)
        return expected, second.everything()

    (expected_0, found_0), (expected_1, found_1) = ranks.run(interrupted)
    assert found_0 == expected_0
    assert found_1 == expected_1
    assert found_0 != found_1
    windows = {"window_0.bin", "window_1.bin"} if micro_batches % 3 else set()
    assert files(tmp_path / "a") == windows | {
        "model.safetensors", "optimizer.bin", "leaves.bin", "random_states_0.pkl", "random_states_1.pkl",
        "checkpoint_manifest.json",
    }  # fmt: skip
    assert json.loads((tmp_path / "a" / "checkpoint_manifest.json").read_text())["num_processes"] == 2


@dataclasses.dataclass
class Stateful:
    """An object of the user."""

    state: Any

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_object_whose_state_differs_between_ranks_is_saved_and_loaded_by_rank(ranks, tmp_path):
    """A position in a shard, a buffer of samples, or a schedule by the rank's own loss; what is equal is saved once."""

    def begin(values: tuple[Any, ...]) -> tuple[Accelerator, list[Any]]:
        accelerator = Accelerator(cpu=True)
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        accelerator.prepare(optimizer, schedule)
        objects = [Stateful(value) for value in values]
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
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accelerator.load_state(tmp_path / "a")
        position, equal, buffer = (made.state for made in objects)
        found = [position, equal["names"], buffer["rows"][0].tolist(), schedule.state_dict()["best"]]
        return found, [str(warning.message) for warning in caught]

    ranks.run(save)
    own = {f"{name}_rank_1.{end}" for name, end in [("custom_checkpoint_0", "pkl"), ("custom_checkpoint_2", "pkl")]}
    assert {name for name in files(tmp_path / "a") if "_rank_" in name} == {*own, "scheduler_rank_1.bin"}
    by_rank = [[100 + rank, ["aa", "aa"], [rank, rank], rank] for rank in range(2)]
    assert list(ranks.run(load)) == [(by_rank[0], []), (by_rank[1], [])]
    found, remarks = load()
    assert found == by_rank[0]
    assert len(remarks) == 3
    words = "a state of Stateful (custom_checkpoint_0.pkl) for each of 2 ranks, and 1 load it: the states of rank 1 are"
    assert words in remarks[1]
    *others, (found, _) = notebook_launch(load, 3, devices="cpu", output="none")
    assert [found for found, _ in others] == by_rank
    assert found == by_rank[0]
    assert "3 load it: rank 2 got rank 0's." in others[0][1][2]


# Six or eight micro-batches: two steps of the first ranks, then two of the others.
VALUES = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0]


@pytest.mark.parametrize("weigh", [False, True], ids=["counted", "weighed"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3), (3, 2)])
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that new ranks have no random states
            training.accelerator.load_state(tmp_path / "a")
        return training.see(second)

    def on(number: int, function: Any) -> list[Any]:
        if number == 1:
            return [function()]
        return list(ranks.run(function)) if number == 2 else list(notebook_launch(function, number, output="none"))

    on(before, begin)
    pairs = [(value, weight or 1.0) for step in (*first, *second) for value, weight in step]
    mean = sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
    assert on(after, finish) == pytest.approx([mean] * after, rel=1e-12)


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
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Accelerator(cpu=True).load_state(tmp_path / "a")
        return (random.random(), torch.rand(1).item()), [str(warning.message) for warning in caught]

    (draws_0, said_0), (draws_1, said_1) = ranks.run(load)
    assert draws_0 == expected
    assert draws_1[0] != draws_0[0]
    assert draws_1[1] != draws_0[1]
    assert len(said_0) == 1
    assert "random number generators of rank 1 start from states derived from rank 0's" in said_0[0]
    assert said_1 == []


@pytest.mark.parametrize("failing", [0, 1])
def test_rank_whose_disk_is_full_is_an_error_on_all(ranks, tmp_path, failing):
    def fill_the_disk() -> tuple[str, str, bool]:
        rank = torch.distributed.get_rank()
        training = Training(1)
        training.accelerator.save_state(tmp_path / "a")
        expected = training.everything()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            training.accelerator.save_state(tmp_path / "a")
        except (OSError, CheckpointError) as error:
            said = type(error).__name__, str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        other = Training(2)
        other.accelerator.load_state(tmp_path / "a")
        return *said, other.everything() == expected

    outcomes = ranks.run(fill_the_disk)
    assert outcomes[failing][:2] == ("OSError", "[Errno 27] File too large")
    kind, message, _ = outcomes[1 - failing]
    assert kind == "CheckpointError"
    assert message == (f"rank {failing} could not write its part of the checkpoint: OSError: [Errno 27] File too large")
    assert all(whole for *_, whole in outcomes)
    assert {path.name for path in tmp_path.iterdir()} == {"a"}


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

    mine, others = ranks.run(attempt)
    assert [kind for kind, _ in mine] == ["ValueError", "CheckpointError", "CheckpointError"]
    assert [kind for kind, _ in others] == ["CheckpointError", "CheckpointError", "KeyError"]
    assert others[0][1].startswith("rank 0 could not begin the checkpoint: ValueError: save_state() needs a folder")
    assert others[1][1].startswith("rank 0 could not find the checkpoint: CheckpointError: load_state(")
    assert mine[2][1] == "rank 1 could not load the checkpoint: KeyError: 'not on rank 1'"


@pytest.mark.parametrize("dying", [0])
def test_rank_that_dies_while_it_saves_leaves_the_earlier_checkpoint_whole(tmp_path, dying):
    def save_and_die() -> None:
        training = Training(1)
        training.accelerator.save_state(tmp_path / "a")

        def die(*_: Any) -> None:
            if training.accelerator.process_index == dying:
                os.kill(os.getpid(), signal.SIGKILL)

        training.train(3)
        training.accelerator.register_save_state_pre_hook(die)
        training.accelerator.save_state(tmp_path / "a")

    def load_and_save() -> tuple[str, str]:
        expected = Training(1).everything()
        other = Training(2)
        other.accelerator.load_state(tmp_path / "a")
        found = other.everything()
        other.accelerator.save_state(tmp_path / "a")
        return found, expected

    with pytest.raises(RankFailedError, match=f"rank {dying}"):
        notebook_launch(save_and_die, 2, output="none")
    for found, expected in notebook_launch(load_and_save, 2, output="none"):
        assert found == expected
    assert {path.name for path in tmp_path.iterdir()} == {"a"}


def test_damage_that_another_rank_finds_is_an_error_on_all(ranks, tmp_path):
    def damage_and_load() -> tuple[str, bool]:
        training = Training(1)
        training.accelerator.save_state(tmp_path / "a")
        if training.accelerator.is_main_process:
            path = tmp_path / "a" / "random_states_1.pkl"
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        training.accelerator.wait_for_everyone()
        other = Training(2)
        before = other.everything()
        set_seed(2, device_specific=True)
        other = Training(2)
        try:
            other.accelerator.load_state(tmp_path / "a")
        except CheckpointError as error:
            return str(error), other.everything() == before
        return "", False

    for message, untouched in ranks.run(damage_and_load):
        assert "random_states_1.pkl is damaged: its sha256 is" in message
        assert untouched


def test_each_machine_may_have_its_own_copy(ranks, tmp_path):
    def on_two_machines() -> bool:
        from notebook_launcher.training.plugins import ProjectConfiguration

        os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"
        rank = torch.distributed.get_rank()
        training = Training(1)
        training.accelerator.state.local_process_index = 0
        training.accelerator.project_configuration = ProjectConfiguration(save_on_each_node=True)
        training.train(4)
        training.accelerator.save_state(tmp_path / f"machine_{rank}")
        expected = training.everything()
        other = Training(2)
        other.accelerator.state.local_process_index = 0
        other.accelerator.project_configuration = ProjectConfiguration(save_on_each_node=True)
        other.accelerator.load_state(tmp_path / f"machine_{rank}")
        os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank), "2"
        return other.everything() == expected

    assert list(ranks.run(on_two_machines)) == [True, True]
    for rank in (0, 1):
        assert f"random_states_{rank}.pkl" in files(tmp_path / f"machine_{rank}")
        assert f"random_states_{1 - rank}.pkl" not in files(tmp_path / f"machine_{rank}")
        assert "model.safetensors" in files(tmp_path / f"machine_{rank}")


class Sharded:
    """A model of which each rank has a part, or with `whole` all."""

    def __init__(self, seed: int, *, whole: bool = False) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        set_seed(seed)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
        if self.accelerator.num_processes > 1 and not whole:
            fully_shard(model, mesh=init_device_mesh("cpu", (self.accelerator.num_processes,)))
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))

    def train(self, micro_batches: int) -> None:
        for _ in range(micro_batches):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(torch.rand(5, 4)).square().mean())
                self.optimizer.step()
                self.optimizer.zero_grad()

    def weights(self) -> list[Any]:
        weights = self.accelerator.unwrap_model(self.model).state_dict().values()
        return [(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).tolist() for tensor in weights]


def save_in_a_window(folder: Path) -> None:
    training = Sharded(1)
    training.train(1)
    training.accelerator.save_state(folder)


@shards_on_cpus
@pytest.mark.parametrize("micro_batches", [3, 4])
def test_sharded_models_are_saved_whole_and_loaded_in_parts(ranks, tmp_path, micro_batches):
    def interrupted() -> tuple[list[Any], list[Any], list[Any]]:
        first = Sharded(1)
        first.train(micro_batches)
        saved = first.weights()
        first.accelerator.save_state(tmp_path / "a")
        first.train(7)
        second = Sharded(2)
        second.accelerator.load_state(tmp_path / "a")
        second.train(7)
        return saved, first.weights(), second.weights()

    (saved, expected, found), _ = ranks.run(interrupted)
    assert found == expected
    alone = Sharded(3)
    if micro_batches % 3 == 0:
        alone.accelerator.load_state(tmp_path / "a")
        assert alone.weights() == saved


def test_sharded_model_is_saved_whole(ranks, tmp_path):
    def save_and_load() -> bool:
        first, second = Sharded(1), Sharded(2)
        checkpoints.save_model(first.model, tmp_path / "a", max_shard_size=200)
        first.accelerator.wait_for_everyone()
        checkpoints.load_model(second.model, tmp_path / "a")
        return first.weights() == second.weights()

    assert list(ranks.run(save_and_load)) == [True, True]


@shards_on_cpus
def test_sharded_window_stays_with_its_number_of_ranks(ranks, tmp_path):
    def go_on() -> str:
        with pytest.raises(CheckpointError) as error:
            Sharded(1).accelerator.load_state(tmp_path / "a")
        return str(error.value)

    ranks.run(save_in_a_window, args=(tmp_path / "a",))
    for message in notebook_launch(go_on, 3, output="none"):
        assert "window's gradients of a sharded model on 2 ranks, which 3 cannot share" in message


@shards_on_cpus
def test_sharded_window_is_refused_by_a_whole_model_before_anything_changes(ranks, tmp_path):
    def go_on() -> tuple[str, bool]:
        training = Sharded(1, whole=True)
        before = training.weights()
        with pytest.raises(CheckpointError) as error:
            training.accelerator.load_state(tmp_path / "a")
        return str(error.value), training.weights() == before

    ranks.run(save_in_a_window, args=(tmp_path / "a",))
    for found in (ranks.run(go_on), notebook_launch(go_on, 1, output="none")):
        for message, is_unchanged in found:
            assert "holds a window's gradients of a model that was sharded in another way: " in message
            assert is_unchanged
