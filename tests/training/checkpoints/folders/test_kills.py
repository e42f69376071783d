"""Processes that are killed while they save: at every moment the previous save or the new one is whole.

A process is killed before each of its calls to the file system in turn, by an audit hook; what is then on
the disk is loaded, and saved over.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.toy_training import shards_on_cpus

ROOT = Path(__file__).resolve().parents[4]

HARNESS = '''
import json, os, signal, sys, warnings
from pathlib import Path

CALLS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.scandir", "os.listdir",
         "ctypes.dlsym", "fcntl.flock")

def die_before(number):
    """Kill this process before its call of that number to the file system."""
    left = [number]
    def hook(event, arguments):
        if event in CALLS:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

def killed(number, work):
    """Do work in a process that is killed before its call of that number; return whether it came to that."""
    child = os.fork()
    if child == 0:
        die_before(number)
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0, status
    return os.WIFSIGNALED(status)

def survey(begin, save, load, folder):
    """Kill save() at every call; return what load() found after each, and how many calls there were."""
    found, number = [], 0
    while True:
        begin()
        was_killed = killed(number, save)
        found.append(load())
        save()
        assert load() == "new", (number, load())
        left = sorted(path.name for path in folder.parent.iterdir())
        inside = sorted(path.name for path in folder.iterdir() if path.name.startswith("."))
        assert left == [folder.name] and not inside, (number, left, inside)
        if not was_killed:
            return {"found": found, "calls": number}
        number += 1
'''


def run(program: str, folder: Path, *arguments: Any) -> dict[str, Any]:
    answer = subprocess.run(
        [sys.executable, "-c", HARNESS + textwrap.dedent(program), str(folder), *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    result: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return result


def check(result: dict[str, Any], *, at_least: int) -> None:
    """The old save was whole until one moment, and the new one from then on."""
    assert result["calls"] >= at_least
    turn = result["found"].index("new")
    assert set(result["found"][:turn]) == {"old"}
    assert set(result["found"][turn:]) == {"new"}


FOLDERS = """
import shutil
from notebook_launcher.training.checkpoints.folders import staging
from notebook_launcher.training.checkpoints.folders.durable_files import write_text

target, way = Path(sys.argv[1]), sys.argv[2]
NAMES = ("a", "below/b", "c", "entry")

def begin():
    shutil.rmtree(target.parent, ignore_errors=True)
    target.mkdir(parents=True)
    for name in (*NAMES, "gone") if way != "new" else ():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text("old")
    if way == "shared":
        (target / "mine").write_text("old")
    if way == "new":
        target.rmdir()

def save():
    stage = staging.open_stage(target)
    for name in NAMES:
        (stage / name).parent.mkdir(exist_ok=True)
        write_text(stage / name, "new")
    staging.publish(stage, target, last="entry", stale={"gone"}, replaceable=way == "alone")

def load():
    if way == "shared":  # in the other cases whoever looks sees a whole save, without knowing of this package
        staging.settle(target)
    if not target.exists():
        return "old"  # as there was none
    found = {name: (target / name).read_text() for name in staging.contents(target)}
    assert way != "shared" or found.pop("mine") == "old"
    (content,) = set(found.values())
    assert set(found) == {*NAMES, *(["gone"] if content == "old" else [])}, found
    return content

print(json.dumps(survey(begin, save, load, target)))
"""


@pytest.mark.parametrize(("way", "calls"), [("new", 12), ("alone", 20), ("shared", 20)])
def test_folder_changes_from_one_whole_state_to_the_next(tmp_path, way, calls):
    check(run(FOLDERS, tmp_path / "parent" / "folder", way), at_least=calls)


MODELS = """
import shutil
import torch
from notebook_launcher.training import checkpoints

torch.set_num_threads(1)
target, way, size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def model(number):
    return torch.nn.ParameterDict({name: torch.full((8,), float(number)) for name in "abc"})

def begin():
    shutil.rmtree(target.parent, ignore_errors=True)
    target.mkdir(parents=True)
    checkpoints.save_model(model(1), target, max_shard_size=32)
    if way == "shared":
        (target / "config.json").write_text("mine")

def save():
    checkpoints.save_model(model(2), target, max_shard_size=size)

def load():
    found = model(0)
    checkpoints.load_model(found, target)
    (value,) = {float(number) for tensor in found.values() for number in tensor}
    assert way != "shared" or (target / "config.json").read_text() == "mine"
    return {1: "old", 2: "new"}[value]

print(json.dumps(survey(begin, save, load, target)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("way", "size"), [("alone", 32), ("shared", 64)])
def test_model_is_the_old_one_or_the_new_one(tmp_path, way, size):
    check(run(MODELS, tmp_path / "parent" / "folder", way, size), at_least=20)


STATES = """
import random, shutil
import torch
from notebook_launcher.training.accelerator import Accelerator

torch.set_num_threads(1)
target = Path(sys.argv[1])

class Note:
    def state_dict(self):
        return {"number": self.number}
    def load_state_dict(self, state):
        self.number = state["number"]

class Training:
    \"\"\"One number in every part.\"\"\"
    def __init__(self, number):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=9)
        self.model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(self.model.weight, number)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25 * number)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(9 * number * self.model(torch.ones(1, 1)).sum())
        self.note = Note()
        self.note.number = number
        self.accelerator.register_for_checkpointing(self.note)
        random.seed(number)
    def numbers(self):
        draw = random.random()
        return {
            self.model.weight.item(),
            self.model.weight.grad.item(),
            self.optimizer.param_groups[0]["lr"] / 0.25,
            self.note.number,
            next(number for number in range(9) if random.Random(number).random() == draw),
        }

old, new = Training(1), Training(2)

def begin():
    shutil.rmtree(target.parent, ignore_errors=True)
    target.parent.mkdir(parents=True)
    random.seed(1)
    old.accelerator.save_state(target)

def save():
    random.seed(2)
    new.accelerator.save_state(target)

def load():
    found = Training(3)
    found.accelerator.load_state(target)
    (number,) = found.numbers()
    return {1: "old", 2: "new"}[number]

print(json.dumps(survey(begin, save, load, target)))
"""


@pytest.mark.slow
def test_state_is_the_old_one_or_the_new_one_in_all_its_parts(tmp_path):
    check(run(STATES, tmp_path / "parent" / "folder"), at_least=20)


NUMBERED = """
import shutil
from notebook_launcher.training.accelerator import Accelerator
from notebook_launcher.training.plugins import ProjectConfiguration

project = Path(sys.argv[1])
folder = project / "checkpoints"

class Note:
    def __init__(self, number):
        self.number = number
    def state_dict(self):
        return {"number": self.number}
    def load_state_dict(self, state):
        self.number = state["number"]

def accelerator(number):
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
    was_killed = killed(number, accelerator(3)[0].save_state)
    made, note = accelerator(0)
    made.load_state()
    found.append({2: "old", 3: "new"}[note.number])
    note.number = made.save_iteration
    made.save_state()
    assert sorted(path.name for path in folder.iterdir()) == [f"checkpoint_{note.number + at}" for at in (-1, 0)]
    if not was_killed:
        break
    number += 1
print(json.dumps({"found": found, "calls": number}))
"""


@pytest.mark.slow
def test_newest_checkpoint_is_whole_and_the_limit_is_kept(tmp_path):
    check(run(NUMBERED, tmp_path / "project"), at_least=20)


PARTS = """
import shutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from notebook_launcher.training.accelerator import Accelerator

torch.set_num_threads(1)
target = Path(sys.argv[1])

def make(number):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, number)
    return model, torch.optim.SGD(model.parameters(), lr=0.25 * number)

def save(number, last_call):
    \"\"\"Save a sharded model in a process that is killed before a call; return whether it was.\"\"\"
    child = os.fork()
    if child == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model, _ = make(number)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.25 * number))
        die_before(last_call)
        accelerator.save_state(target, state_dict_type="SHARDED_STATE_DICT")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0, status
    return os.WIFSIGNALED(status)

def load():
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*make(3))
    accelerator.load_state(target)
    (number,) = {model.weight.item(), optimizer.param_groups[0]["lr"] / 0.25}
    return {1: "old", 2: "new"}[number]

found, number, kept = [], 0, target.parents[1] / "kept"
target.parent.mkdir(parents=True)
save(1, 10**6)
assert (target / "pytorch_model_fsdp_0" / ".metadata").exists()
shutil.copytree(target, kept)
while True:
    shutil.rmtree(target.parent)
    shutil.copytree(kept, target)
    was_killed = save(2, number)
    found.append(load())
    assert not save(2, 10**6)
    assert load() == "new", number
    left = sorted(path.name for path in target.parent.iterdir())
    assert left == [target.name] and not list(target.glob(".[!m]*")), (number, left)
    if not was_killed:
        break
    number += 2  # every other call: each takes two saves in a process of its own
print(json.dumps({"found": found, "calls": number}))
"""


@pytest.mark.slow
@shards_on_cpus
def test_sharded_state_is_the_old_one_or_the_new_one(tmp_path):
    check(run(PARTS, tmp_path / "parent" / "folder"), at_least=20)


PARTS_OF_RANKS = '''
import itertools, shutil
import torch
import torch.distributed as dist
from notebook_launcher.training.accelerator import Accelerator
from notebook_launcher.training.parallelism.fsdp_plugin import FullyShardedDataParallelPlugin

torch.set_num_threads(1)
target, victims = Path(sys.argv[1]), json.loads(sys.argv[2])
scratch, numbers = target.parents[1], itertools.count()

def make(number):
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.constant_(model.weight, number)
    return model, torch.optim.SGD(model.parameters(), lr=0.25 * number)

def rank_of(rank, number, last_call, store):
    """Save as one of two ranks that share a model out."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    model, optimizer = accelerator.prepare(*make(number))
    if rank in victims:
        die_before(last_call)
    accelerator.save_state(target, state_dict_type="SHARDED_STATE_DICT")

def save(number, last_call):
    """Save on two ranks, of which the victims are killed before a call; return whether any was."""
    store, children = str(scratch / f"store {next(numbers)}"), []
    for rank in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            status = 1  # what a peer's death leads to
            try:
                rank_of(rank, number, last_call, store)
                status = 0
            finally:
                os._exit(status)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert all(end == 0 for end in ends) or -signal.SIGKILL in ends, ends
    return any(ends)

def load():
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*make(3))
    accelerator.load_state(target)
    (number,) = {*model.weight.flatten().tolist(), optimizer.param_groups[0]["lr"] / 0.25}
    return {1: "old", 2: "new"}[number]

found, number, kept = [], 0, scratch / "kept"
target.parent.mkdir(parents=True)
assert not save(1, 10**6)
assert (target / "pytorch_model_fsdp_0" / ".metadata").exists()
shutil.copytree(target, kept)
while True:
    shutil.rmtree(target.parent)
    shutil.copytree(kept, target)
    was_killed = save(2, number)
    found.append(load())
    assert not save(2, 10**6)
    assert load() == "new", number
    left = sorted(path.name for path in target.parent.iterdir())
    assert left == [target.name] and not list(target.glob(".[!m]*")), (number, left)
    if not was_killed:
        break
    number += 2  # every other call: each takes two saves on two ranks
print(json.dumps({"found": found, "calls": number}))
'''


@pytest.mark.slow
@shards_on_cpus
@pytest.mark.parametrize("victims", [[0], [1], [0, 1]], ids=["the rank that publishes", "its peer", "both"])
def test_sharded_state_of_two_ranks_is_the_old_one_or_the_new_one(tmp_path, victims):
    check(run(PARTS_OF_RANKS, tmp_path / "parent" / "folder", json.dumps(victims)), at_least=6)
