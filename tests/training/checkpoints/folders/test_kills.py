"""A process that is killed while it saves: at every moment the previous save or the new one is whole.

A process is killed before each of its calls to the file system in turn; what is then on the disk is loaded, and saved
over.
"""

from __future__ import annotations

import functools
import itertools
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
from notebook_launcher.training.random import set_seed
from tests.support.killing import NEVER, check, interpreter, start_killed, survey, were_killed
from tests.support.toy_checkpoints import Meter, Training
from tests.support.toy_training import shards_on_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., dict[str, Any]]]:
    """Call a program with texts, in an interpreter for all programs of the file, and return its result."""
    with interpreter() as call:
        yield call


def killed(save: Callable[[], object]) -> Callable[[int], bool]:
    """Return the function that saves in a process which is killed before a call of a number, or in this one."""

    def run(number: int) -> bool:
        if number != NEVER:
            return were_killed([start_killed(number, lambda: save)])
        save()
        return False

    return run


NAMES = ("a", "below/b", "c", "entry")


def folders(folder: str, way: str) -> dict[str, Any]:
    """Survey saves of plain files: into no folder, in place of a folder (alone), and beside other files (shared)."""
    target = Path(folder)
    old = {"new": (), "alone": (*NAMES, "gone"), "shared": (*NAMES, "gone", "mine")}[way]

    def begin() -> None:
        for name in old:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_text("old")

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

    return survey(begin, killed(save), load, target)


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

    return survey(begin, killed(save), load, target, every=2)


@pytest.mark.slow
def test_model_is_the_old_one_or_the_new_one(run, tmp_path):
    check(run(models, tmp_path / "parent" / "folder"), at_least=20)


def states(folder: str) -> dict[str, Any]:
    """Survey saves of the whole state of a training inside a window."""
    torch.set_num_threads(1)
    target, trainings = Path(folder), [Training(seed) for seed in range(3)]

    def save(number: int) -> None:
        set_seed(number)
        trainings[number].accelerator.save_state(target)

    expected = {}
    for number, name in ((1, "old"), (2, "new")):
        trainings[number].train(number)
        set_seed(number)
        expected[repr(trainings[number].everything())] = name

    def load() -> str:
        trainings[0].accelerator.load_state(target)
        return expected[repr(trainings[0].everything())]

    return survey(lambda: save(1), killed(lambda: save(2)), load, target, every=4)


@pytest.mark.slow
def test_state_is_the_old_one_or_the_new_one_in_all_its_parts(run, tmp_path):
    check(run(states, tmp_path / "parent" / "folder"), at_least=20)


def numbered(folder: str) -> dict[str, Any]:
    """Survey saves into numbered folders, of which two are kept."""
    target = Path(folder)

    def begin(*, loads: bool = True) -> tuple[Accelerator, Meter]:
        config = ProjectConfiguration(str(target.parent), automatic_checkpoint_naming=True, total_limit=2)
        accelerator = Accelerator(cpu=True, project_config=config)
        accelerator.register_for_checkpointing(meter := Meter())
        if loads:
            accelerator.load_state()
        return accelerator, meter

    def save_old() -> None:
        accelerator, meter = begin(loads=False)
        for meter.state in range(3):
            accelerator.save_state()

    def prepare() -> Callable[[], object]:
        accelerator, meter = begin()
        meter.state = accelerator.save_iteration
        return accelerator.save_state

    def save(number: int) -> bool:
        was_killed = were_killed([start_killed(number, prepare)])
        numbers = sorted(int(path.name.rpartition("_")[2]) for path in target.glob("checkpoint_*"))
        assert was_killed or (len(numbers), numbers[1] - numbers[0]) == (2, 1)
        return was_killed

    def load() -> str:
        state = begin()[1].state
        assert state >= 2, "an older checkpoint than the newest"
        return "old" if state == 2 else "new"

    return survey(save_old, save, load, target, every=2)


@pytest.mark.slow
def test_newest_checkpoint_is_whole_and_the_limit_is_kept(run, tmp_path):
    check(run(numbered, tmp_path / "project" / "checkpoints"), at_least=20)


def make_sharded(number: int) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model and an optimizer that hold one number in all their parts."""
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.constant_(model.weight, number)
    return model, torch.optim.SGD(model.parameters(), lr=0.25 * number)


def two_ranks(folder: str, victim: str) -> dict[str, Any]:
    """Survey saves of a model that two ranks share out, of which one is killed."""
    import torch.distributed.checkpoint
    import torch.distributed.fsdp  # Once, and not in each of the processes.

    torch.set_num_threads(1)
    target, numbers = Path(folder), itertools.count()

    def save(last_call: int, number: int = 2) -> bool:
        store = str(target.parents[1] / f"store {next(numbers)}")

        def prepare(rank: int) -> Callable[[], object]:
            dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
            accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
            accelerator.prepare(*make_sharded(number))
            return lambda: accelerator.save_state(target, state_dict_type="SHARDED_STATE_DICT")

        ranks = {rank: last_call if str(rank) == victim else NEVER for rank in range(2)}
        return were_killed([start_killed(call, functools.partial(prepare, rank)) for rank, call in ranks.items()])

    def begin() -> None:
        assert not save(NEVER, number=1)
        assert (target / "pytorch_model_fsdp_0" / ".metadata").exists()

    def load() -> str:
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(*make_sharded(3))
        accelerator.load_state(target)
        (number,) = {*model.weight.flatten().tolist(), optimizer.param_groups[0]["lr"] / 0.25}
        return {1: "old", 2: "new"}[int(number)]

    return survey(begin, save, load, target, every=6 if victim == "0" else 2)  # Each takes four processes.


@pytest.mark.slow
@shards_on_cpus
@pytest.mark.parametrize(("victim", "calls"), [("0", 40), ("1", 4)], ids=["the rank that publishes", "its peer"])
def test_sharded_state_of_two_ranks_is_the_old_one_or_the_new_one(run, tmp_path, victim, calls):
    check(run(two_ranks, tmp_path / "parent" / "folder", victim), at_least=calls)
