"""A process that is killed while it saves: at every moment the previous save or the new one is whole.

A process is killed before each of its calls to the file system in turn; what is then on the disk is loaded, and saved
over.
"""

from __future__ import annotations

import functools
import itertools
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from notebook_launcher.training import checkpoints
from notebook_launcher.training.accelerator import Accelerator
from notebook_launcher.training.checkpoints import folders as staging
from notebook_launcher.training.checkpoints.folders import write_text
from notebook_launcher.training.parallelism.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_launcher.training.plugins import ProjectConfiguration
from tests.support.killing import NEVER, check, interpreter, start_killed, survey, survey_others, were_killed
from tests.support.toy_training import shards_on_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., dict[str, Any]]]:
    """Call a program with texts, in an interpreter for all programs of the file, and return its result."""
    with interpreter() as call:
        yield call


NAMES = ("a", "below/b", "c", "entry")


def folders(folder: str, way: str) -> dict[str, Any]:
    """Survey saves of plain files: into no folder, in place of a folder (alone), and beside other files (shared)."""
    target = Path(folder)

    def begin() -> None:
        shutil.rmtree(target.parent, ignore_errors=True)
        target.mkdir(parents=True)
        for name in (*NAMES, "gone") if way != "new" else ():
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_text("old")
        if way == "shared":
            (target / "mine").write_text("old")
        if way == "new":
            target.rmdir()

    def save() -> None:
        stage = staging.open_stage(target)
        for name in NAMES:
            (stage / name).parent.mkdir(exist_ok=True)
            write_text(stage / name, "new")
        staging.publish(stage, target, last="entry", stale={"gone"}, replaceable=way == "alone")

    def load() -> str:
        if way == "shared":  # in the other cases whoever looks sees a whole save, without knowing of this package
            staging.settle(target)
        if not target.exists():
            return "old"  # as there was none
        found = {name: (target / name).read_text() for name in staging.contents(target)}
        assert way != "shared" or found.pop("mine") == "old"
        (content,) = set(found.values())
        assert set(found) == {*NAMES, *(["gone"] if content == "old" else [])}, found
        return content

    return survey(begin, save, load, target)


@pytest.mark.parametrize(("way", "calls"), [("new", 12), ("alone", 20), ("shared", 20)])
def test_folder_changes_from_one_whole_state_to_the_next(run, tmp_path, way, calls):
    check(run(folders, tmp_path / "parent" / "folder", way), at_least=calls)


def models(folder: str) -> dict[str, Any]:
    """Survey saves of a model's weights, in a folder with a file of the user's."""
    torch.set_num_threads(1)
    target = Path(folder)

    def model(number: int) -> torch.nn.ParameterDict:
        return torch.nn.ParameterDict({name: torch.full((8,), float(number)) for name in "abc"})

    def begin() -> None:
        shutil.rmtree(target.parent, ignore_errors=True)
        target.mkdir(parents=True)
        checkpoints.save_model(model(1), target, max_shard_size=32)
        (target / "config.json").write_text("mine")

    def save() -> None:
        checkpoints.save_model(model(2), target, max_shard_size=64)

    def load() -> str:
        found = model(0)
        checkpoints.load_model(found, target)
        (value,) = {float(number) for tensor in found.values() for number in tensor}
        assert (target / "config.json").read_text() == "mine"
        return {1: "old", 2: "new"}[int(value)]

    return survey(begin, save, load, target, every=2)


@pytest.mark.slow
def test_model_is_the_old_one_or_the_new_one(run, tmp_path):
    check(run(models, tmp_path / "parent" / "folder"), at_least=20)


class Note:
    """A registered object whose state is one number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class Training:
    """One number in every part."""

    def __init__(self, number: int) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=9)
        self.model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(self.model.weight, number)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25 * number)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(9 * number * self.model(torch.ones(1, 1)).sum())
        self.note = Note(number)
        self.accelerator.register_for_checkpointing(self.note)
        random.seed(number)

    def numbers(self) -> set[float]:
        draw = random.random()
        assert self.model.weight.grad is not None
        return {
            self.model.weight.item(),
            self.model.weight.grad.item(),
            self.optimizer.param_groups[0]["lr"] / 0.25,
            self.note.number,
            next(number for number in range(9) if random.Random(number).random() == draw),
        }


def states(folder: str) -> dict[str, Any]:
    """Survey saves of the whole state of a training."""
    torch.set_num_threads(1)
    target, old, new = Path(folder), Training(1), Training(2)

    def begin() -> None:
        shutil.rmtree(target.parent, ignore_errors=True)
        target.parent.mkdir(parents=True)
        random.seed(1)
        old.accelerator.save_state(target)

    def save() -> None:
        random.seed(2)
        new.accelerator.save_state(target)

    def load() -> str:
        found = Training(3)
        found.accelerator.load_state(target)
        (number,) = found.numbers()
        return {1: "old", 2: "new"}[int(number)]

    return survey(begin, save, load, target, every=2)


@pytest.mark.slow
def test_state_is_the_old_one_or_the_new_one_in_all_its_parts(run, tmp_path):
    check(run(states, tmp_path / "parent" / "folder"), at_least=20)


def numbered(folder: str) -> dict[str, Any]:
    """Survey saves into numbered folders, of which two are kept."""
    project = Path(folder)

    def accelerator(number: int) -> tuple[Accelerator, Note]:
        config = ProjectConfiguration(str(project), automatic_checkpoint_naming=True, total_limit=2, iteration=number)
        made = Accelerator(cpu=True, project_config=config)
        made.register_for_checkpointing(note := Note(number))
        return made, note

    found, number = [], 0
    while True:
        shutil.rmtree(project, ignore_errors=True)
        project.mkdir()
        for at in range(3):
            accelerator(at)[0].save_state()
        was_killed = were_killed([start_killed(number, accelerator(3)[0].save_state)])
        made, note = accelerator(0)
        made.load_state()
        found.append({2: "old", 3: "new"}[note.number])
        note.number = made.save_iteration
        made.save_state()
        names = sorted(path.name for path in (project / "checkpoints").iterdir())
        assert names == [f"checkpoint_{note.number + at}" for at in (-1, 0)]
        if not was_killed:
            return {"found": found, "calls": number}
        number += 1


@pytest.mark.slow
def test_newest_checkpoint_is_whole_and_the_limit_is_kept(run, tmp_path):
    check(run(numbered, tmp_path / "project"), at_least=20)


# --------------------------------------------------------------------------------------------------------------------
# Ranks that are killed while they save a sharded model.


def make_sharded(number: int) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model and an optimizer that hold one number in all their parts."""
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.constant_(model.weight, number)
    return model, torch.optim.SGD(model.parameters(), lr=0.25 * number)


def load_sharded(target: Path) -> str:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*make_sharded(3))
    accelerator.load_state(target)
    (number,) = {*model.weight.flatten().tolist(), optimizer.param_groups[0]["lr"] / 0.25}
    return {1: "old", 2: "new"}[int(number)]


class Rank:
    """A process that saves a sharded model."""

    def __init__(self, target: Path, number: int) -> None:
        self.target = target
        self.number = number
        self.accelerator: Any = None

    def join(self, rank: int, store: str) -> None:
        """Prepare a model that two ranks share out."""
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
        self.accelerator.prepare(*make_sharded(self.number))

    def save(self) -> None:
        self.accelerator.save_state(self.target, state_dict_type="SHARDED_STATE_DICT")


def two_ranks(folder: str, victim: str) -> dict[str, Any]:
    """Survey saves of a model that two ranks share out, of which one is killed."""
    torch.set_num_threads(1)
    target, numbers = Path(folder), itertools.count()

    def save(number: int, last_call: int) -> bool:
        store = str(target.parents[1] / f"store {next(numbers)}")
        children = []
        for at in range(2):
            rank = Rank(target, number)
            dies_before = last_call if str(at) == victim else NEVER
            children.append(start_killed(dies_before, rank.save, functools.partial(rank.join, at, store)))
        return were_killed(children)

    return survey_others(save, lambda: load_sharded(target), target)


@pytest.mark.slow
@shards_on_cpus
@pytest.mark.parametrize("victim", ["0", "1"], ids=["the rank that publishes", "its peer"])
def test_sharded_state_of_two_ranks_is_the_old_one_or_the_new_one(run, tmp_path, victim):
    check(run(two_ranks, tmp_path / "parent" / "folder", victim), at_least=6)
