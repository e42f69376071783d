"""`export(...)`: scripts that torchrun, our launch and a job file run, with the numbers of the notebook's launch."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from notebook_launcher import runs
from tests.support.kernels import Kernel
from tests.support.programs import surroundings, type_command
from tests.support.warm_kernels import unchanged

if TYPE_CHECKING:
    from pathlib import Path

# A program stands for the notebook: its `__main__` has imports, constants, a decorator, a class, a value of that class
# and a tensor, all of which the function needs, and some that it does not.
NOTEBOOK = """
import functools, os, random, sys
import xml
import xml.dom.minidom
import numpy as np
import torch.nn.functional as F
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from notebook_launcher import Accelerator, LaunchConfig, export, notebook_launch, report
import helpers

WIDTH, RATES = 8, {"slow": 0.01, "fast": 0.1}
inputs = torch.arange(64.0 * 8).view(64, 8) / 100
secret = open(os.devnull)        # cannot be written, and is not used
counter = 0

def logged(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        global counter
        counter += 1
        return function(*args, **kwargs)
    return wrapper

class Base(nn.Module):
    def forward(self, x):
        return F.relu(self.first(x)).sum(1)

class Net(Base):
    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.first = nn.Linear(8, width)

class Scale:
    def __init__(self, factor): self.factor = factor

scale = Scale(0.5)

@logged
def loss_of(model, x):
    return F.mse_loss(model(x), x.sum(1) * scale.factor) + even(2)

def even(n): return 0.0 if n == 0 else odd(n - 1)
def odd(n): return 0.0 if n == 0 else even(n - 1)

def train(rate, /, steps, extra=None):
    accelerator = Accelerator()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATES[rate] * (1 if extra is None else extra.item()))
    loader = DataLoader(TensorDataset(inputs), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _, (x,) in zip(range(steps), loader):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x + np.random.rand() + random.random() + helpers.SHIFT))
            optimizer.step()
            optimizer.zero_grad()
    assert xml.dom.minidom.Document and counter == steps
    facts = [accelerator.gradient_accumulation_steps, accelerator.mixed_precision, torch.get_num_threads()]
    facts += [torch.initial_seed(), os.environ["WORD"]]
    state = accelerator.unwrap_model(model).state_dict()
    torch.save((facts, state), f"{os.environ['OUT']}-{accelerator.process_index}.pt")
    report(step=0, loss=1.0)

options = dict(
    config=LaunchConfig(mixed_precision="fp16", seed=3), mixed_precision="bf16", gradient_accumulation_steps=2,
    max_grad_norm=1.0, devices="cpu", threads_per_process=1, env={"WORD": "a"})
of_the_run = dict(name="a run", tags=["x y"], timeout=200, max_restarts=1, debug=True)
given = dict(args=("fast",), kwargs={"steps": 6, "extra": torch.tensor(0.7)})
if sys.argv[1:] == ["run"]:
    notebook_launch(train, 2, output="none", **given, **options)
    job = {"time": "1:00:00", "gres": "gpu:2", "exclusive": True}
    print(export(train, "train.py", 2, slurm=job, output="rank0", **given, **options, **of_the_run))
"""


def run_program(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    (folder / "helpers.py").write_text("SHIFT = 0.25\n")
    (folder / "notebook.py").write_text(NOTEBOOK)
    env = {**surroundings(folder), "OUT": "notebook"}
    done = run_program(sys.executable, "notebook.py", "run", cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    (folder / "shown.txt").write_text(done.stdout)
    return folder


def saved(folder: Path, name: str, rank: int) -> tuple[list[Any], dict[str, torch.Tensor]]:
    facts, state = torch.load(folder / f"{name}-{rank}.pt")
    return facts, state


def assert_equal_to_the_bit(folder: Path, name: str) -> None:
    for rank in range(2):
        facts, state = saved(folder, name, rank)
        expected_facts, expected = saved(folder, "notebook", rank)
        assert facts == expected_facts
        assert facts == [2, "bf16", 1, facts[3], "a"]
        assert state.keys() == expected.keys()
        for key, value in state.items():
            assert torch.equal(value, expected[key]), key


LAUNCHED = (
    "    notebook-launcher launch -n 2 --cpu --timeout 200.0 --max_restarts 1 --output rank0 --name 'a run' "
    "--tag 'x y' train.py"
)


@pytest.mark.slow
def test_job_file_runs_under_torchrun_with_equal_numbers(folder):
    job = (folder / "train.sbatch").read_text()
    assert "#SBATCH --time=1:00:00\n#SBATCH --gres=gpu:2\n#SBATCH --exclusive\n" in job
    assert "#SBATCH --nodes=1\n" in job
    env = {**surroundings(folder), "OUT": str(folder / "job"), "NOTEBOOK_LAUNCHER_RUNS": "off"}
    done = run_program("bash", str(folder / "train.sbatch"), cwd="/", env=env, timeout=100)
    assert done.returncode == 0, done.stderr
    assert_equal_to_the_bit(folder, "job")


def test_script_runs_under_our_launch_with_equal_numbers_and_the_options_of_the_run(folder, home):
    done = type_command(*shlex.split(LAUNCHED)[1:], cwd=folder, env={"OUT": "launched"})
    assert done.returncode == 0, done.stderr
    assert_equal_to_the_bit(folder, "launched")
    (run,) = runs(home)
    assert (run.name, run.tags) == ("a run", ("x y",))
    assert (run.config.timeout, run.config.max_restarts, run.config.output) == (200, 1, "rank0")


def test_script_holds_what_the_function_needs_and_nothing_else(folder):
    text = (folder / "train.py").read_text()
    for line in (
        "import numpy as np\n",
        "import torch.nn.functional as F\n",
        "import torch.nn as nn\n",
        "import xml.dom.minidom\n",
        "from torch.utils.data import DataLoader\n",
        "RATES = {'slow': 0.01, 'fast': 0.1}\n",
        "os.environ.setdefault('WORD', 'a')\n",
        "    adopt(max_grad_norm=1.0)\n",
        "    train('fast', steps=6, extra=_VALUES['argument extra'])\n",
    ):
        assert line in text
    assert "secret" not in text
    assert text.index("class Base(") < text.index("class Net(")
    assert text.index("def logged(") < text.index("@logged")
    assert (folder / "shown.txt").read_text().splitlines() == [
        f"written: {folder}/train.py, {folder}/train.values, {folder}/train.sbatch",
        "    torchrun --standalone --nproc-per-node=2 --max-restarts=1 train.py",
        LAUNCHED,
        "    sbatch train.sbatch",
        "debug=True is left out: a script has no cell in which a debugger opens",
        "torchrun has no name, output, tags, timeout: `notebook-launcher launch` has",
    ]


REGISTRIES = """
import functools, os, torch
from pathlib import Path
from notebook_launcher import export

KINDS = {}
ORDER = []
SEEN: set = set()

def register(name):
    def put(fn):
        KINDS[name] = fn
        return fn
    return put

@register("twice")
def twice(x): return 2 * x

@register("plus")
def plus(x): return x + OFFSET

OFFSET = 5

class Registry:
    def __init__(self): self.kept = {}
    def __call__(self, cls):
        self.kept[cls.__name__] = cls
        return cls

models = Registry()

@models
class Small: pass

ORDER.append(plus)
ORDER += [twice]
SEEN.add(Small)

def train():
    import torch.distributed as dist
    kept = models.kept == {"Small": Small} and SEEN == {Small}
    print(sorted(KINDS), KINDS["plus"](1), [f.__name__ for f in ORDER], kept, dist.get_world_size())

def told(*args, **more):
    try:
        export(*args, **more)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")

export(train, "out.py", 1, devices="cpu", setup="SETTING = OFFSET")
for f in (twice, plus): KINDS[f.__name__ + "!"] = f
told(train, "wrong.py", 1, devices="cpu")
gone = 1
def train(x=gone): pass
del gone
told(train, "wrong.py", 1, devices="cpu")
"""


REFUSALS = """
def make():
    def inner(): pass
    return inner
inner, square, file = make(), lambda x: x, open(os.devnull)
def uses_inner(): inner()
def uses_lambda(): square(2)
def uses_file(): file.read()
def magic(): get_ipython().system("ls")
exec("def made(): pass")
def uses_made(): made()
class Odd: pass
odd = Odd()
def default(x=odd): pass
def fine(x=1): return unheard_of
told(uses_inner, "a.py")
told(uses_lambda, "a.py")
told(uses_file, "a.py")
told(magic, "a.py")
told(uses_made, "a.py")
told(default, "a.py")
told(functools.partial(fine, 1), "a.py")
told(fine, "a.txt")
told(fine, "no/such/a.py")
told(fine, "a.py", seed="x")
told(fine, "a.py", args=(1, 2))
told(fine, "a.py", args=(file,))
Path("mine.py").write_text("x = 1")
told(fine, "mine.py")
Path("held.values").write_text("mine")
told(fine, "held.py", args=(torch.ones(2),))
print(os.listdir("."))
print(export(fine, "mine.py", overwrite=True, seed=1, num_processes=3, devices="cpu", max_restarts=2))
print(export(fine, "mine.py", seed=1, num_processes=1, devices="cpu"))
print(export(os.path.join, "joined.py", args=("a", "b"), num_processes=1, devices="cpu").notes)
"""


@pytest.fixture(scope="module")
def told_by_a_program(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of a program that exports its functions, and what it has printed."""
    folder = tmp_path_factory.mktemp("told")
    (folder / "notebook.py").write_text(REGISTRIES + REFUSALS)
    done = run_program(sys.executable, "notebook.py", cwd=folder, env=surroundings(folder))
    assert done.returncode == 0, done.stderr
    return folder, done.stdout.splitlines()


def test_registries_are_filled_by_the_scripts_own_code_which_is_tried_first(told_by_a_program):
    folder, (entries, failing, *_) = told_by_a_program
    env = {name: value for name, value in surroundings(folder).items() if name != "RANK"}
    done = run_program(sys.executable, "out.py", cwd=folder, env=env)
    assert done.stdout == "['plus', 'twice'] 6 ['plus', 'twice'] True 1\n", done.stderr
    text = (folder / "out.py").read_text()
    assert text.index("KINDS = {}") < text.index('@register("twice")') < text.index("ORDER.append(plus)")
    assert "SETTING = OFFSET" in text
    assert "wrong.py was not written: KINDS would have 2 entries, and has 4 in the notebook. Fill it by" in entries
    assert "fail by themselves, line " in failing
    assert ": `def train(x=gone): pass`: NameError: name 'gone' is not" in failing
    assert not (folder / "wrong.py").exists()


def test_refusals_name_what_cannot_be_written_and_leave_no_file(told_by_a_program):
    _, (_, _, *lines) = told_by_a_program
    expected = [
        "make.<locals>.inner cannot be exported: only what is defined at the top level",
        "<lambda> cannot be exported: only what is defined at the top level",
        "file cannot be exported: its value, a TextIOWrapper, cannot be written to a file",
        "magic cannot be exported: it uses get_ipython() or a magic",
        "made cannot be exported: its source was not found. Define it in a cell or in a module",
        "default cannot be exported: its decorators, defaults or bases use odd",
        "partial objects cannot be exported. Pass a function that is defined with `def`",
        "export(path='a.txt'): the name of a script ends in .py.",
        "export(path='no/such/a.py'): there is no folder",
        "seed='x' is a str; it must be a whole number.",
        "fine(x=1) cannot be called with args=(1, 2)",
        "argument 1 cannot be exported: its value, a TextIOWrapper",
        "mine.py exists, and export() has not written it.",
        "held.values exists, and export() has not written it.",
    ]
    for line, words in zip(lines, expected, strict=False):
        assert line.startswith("ConfigError: "), line
        assert words in line
    assert "Its source begins: 'inner, square, file = make(), lambda x: x, open(os.devnull)'." in lines[1]
    assert sorted(eval(lines[len(expected)])) == ["held.values", "mine.py", "notebook.py", "out.py"]  # a list of names
    rest = lines[len(expected) + 1 :]
    assert rest[1] == "    torchrun --standalone --nproc-per-node=3 --max-restarts=2 mine.py"
    assert rest[3] == "unheard_of is not defined in this notebook"
    assert rest[-1] == "()"


def test_cells_of_a_notebook_are_exported(tmp_path):
    define = (
        "from notebook_launcher import export\nimport codecs, colorsys, dataclasses\n"
        "codecs.register_error('mine', lambda error: ('?', error.end))\n"
        "def mine(): return 4\n"
        "colorsys.rgb_to_hsv = mine\ncolorsys.ONE_SIXTH, colorsys.file = 2, open('/dev/null')\n"
        "@dataclasses.dataclass\nclass Point:\n    x: int = 3\n"
        "def show():\n"
        "    display(Point().x + EXTRA + colorsys.rgb_to_hsv() + colorsys.ONE_SIXTH)\n"
        "    display(b'a\\xff'.decode('ascii', 'mine'))\n"
    )
    with Kernel() as kernel:
        assert kernel.execute(define).error is None
        kernel.execute("%load_ext notebook_launcher")
        assert kernel.execute("%%everywhere\nZERO = 0\nEXTRA = ZERO").error is None
        with unchanged(kernel):
            outcome = kernel.execute(f"export(show, {str(tmp_path / 'show.py')!r}, 1, devices='cpu')")
    assert outcome.error is None, outcome.traceback
    assert "what cells have done at colorsys.file is not written" in (outcome.result or "")
    text = (tmp_path / "show.py").read_text()
    assert "\nZERO = 0\nEXTRA = ZERO\n" in text
    assert "@dataclasses.dataclass\nclass Point:\n    x: int = 3\n" in text
    assert "from IPython.display import display\n" in text
    done = run_program(sys.executable, "show.py", cwd=tmp_path, env=dict(os.environ))
    assert (done.returncode, done.stdout) == (0, "9\na?\n"), done.stderr
