"""A call before any process starts: errors that are found, arguments in a few words, a fork of a kernel with CUDA."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from notebook_launcher import (
    ConfigError,
    Session,
    find_executable_batch_size,
    launch,
    notebook_launch,
    open_run,
    report,
)
from notebook_launcher.drawing.run_picture import static_html, static_text
from notebook_launcher.history.curves import Curves
from notebook_launcher.kernel.calls.checks import MAX_ARGUMENTS, check_call, describe_arguments
from notebook_launcher.widgets import compare
from notebook_launcher.widgets.monitor.feed import Feed
from notebook_launcher.wording import MAX_VALUE, describe_value
from tests.support.compiled_libraries import compile_library, needs_compiler
from tests.support.drawn_runs import Balanced
from tests.support.kernels import ROOT


def train(lr: float, epochs: int = 1) -> tuple[float, int]:
    return lr, epochs


def spawned(rank: int, world_size: int) -> tuple[int, int]:
    return rank, world_size


@find_executable_batch_size(starting_batch_size=4)
def sized(batch_size: int, lr: float) -> tuple[int, float]:
    return batch_size, lr


def takes_no_arguments(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper() -> Any:
        return function(0.5)

    return wrapper


async def coroutine() -> None:
    pass


def generator() -> Any:
    yield 1


class Costly:
    """An argument whose repr would copy data from a GPU, or take long."""

    def __repr__(self) -> str:
        raise AssertionError


class AsyncModel:
    async def __call__(self) -> None:
        pass


too_many: Any = functools.partial(train, 1, 2, 3)  # type: ignore[call-arg]
unknown: Any = functools.partial(train, epoch=3)  # type: ignore[call-arg]
LACKS_LR = r"train\(lr.*\) .*cannot be called with args=\(\), kwargs=\{\}: missing a required argument: 'lr'"
SPAWNED = r"remove the parameter rank, and write rank = torch\.distributed\.get_rank\(\) as the function's first"


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "message"),
    [
        (None, (), {}, r"fn=None is a NoneType, which cannot be called. Pass the function itself"),
        (3, (), {}, r"fn=3 is an int, which cannot be called"),
        (coroutine, (), {}, r"coroutine is a coroutine function \(async def\).*asyncio.run\(coroutine\(\)\)"),
        (functools.partial(coroutine), (), {}, r"coroutine is a coroutine function"),
        (AsyncModel(), (), {}, r"AsyncModel is a coroutine function"),
        (generator, (), {}, r"generator is a generator function \(it has a yield\)"),
        (train, (), {}, LACKS_LR),
        (train, (1, 2, 3), {}, r"too many positional arguments"),
        (too_many, (), {}, r"train\(lr.*args=\(1, 2, 3\).*too many positional arguments"),
        (unknown, (1,), {}, r"got an unexpected keyword argument 'epoch'"),
        (train, (1,), {"epoch": 2}, r"got an unexpected keyword argument 'epoch'"),
        (spawned, (2,), {}, SPAWNED),
        (spawned, (), {}, r"Arguments go by name: notebook_launch\(fn, 2, args="),
        (sized, (), {}, r"sized\(lr: .* missing a required argument: 'lr'"),
        (takes_no_arguments(train), (0.1,), {}, r"train\(\) .*too many positional arguments"),
        (functools.cache(train), (1, 2, 3), {}, r"too many positional arguments"),
        (train, "x", {}, r"args='x' is a str; it must be a tuple. Write args=\('x',\)"),
        (train, 0.1, {}, r"args=0.1 is a float; it must be a tuple. Write args=\(0.1,\)"),
        (train, (), [1], r"kwargs=\[1\] must map the names of arguments to their values"),
        (train, (), {1: 2}, r"kwargs=\{1: 2\} must map the names"),
        (train, Costly(), {}, r"args=Costly is a Costly; it must be a tuple\. Write args=\(Costly,\)"),
        (train, (list(range(10**6)), Costly()), {"epoch": 2}, r"args=\(\[0, 1, 2, 3, 4, 5, \.\.\.\], Costly\), kwargs"),
    ],
)
def test_objects_that_cannot_be_called_are_refused(function: Any, args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_call(function, args, kwargs, launcher="notebook_launch(fn, 2")


def test_advice_about_arguments_in_a_session_shows_a_call_of_the_session() -> None:
    session = Session(2, devices="cpu")
    for name in ("run", "launch"):
        with pytest.raises(ConfigError, match=rf"Arguments go by name: session\.{name}\(fn, args=\(\.\.\.\), kwargs="):
            getattr(session, name)(spawned)
    session.close()


@pytest.mark.parametrize(
    ("places", "options", "written"),
    [
        (((0.1,),), {"num_processes": 3}, r"train, 3, args=\(0.1,\)"),
        (((0.1,), 3), {}, r"train, 3, args=\(0.1,\)"),
        (([0.1], 3, "bf16"), {}, r"train, 3, args=\(0.1,\)"),
        ((3, 0.1, 3), {}, r"train, 3, args=\(0.1, 3\)"),
        (("x", "y"), {}, r"train, 2, args=\('x', 'y'\)"),
    ],
)
def test_positional_arguments_of_the_function_get_advice(
    places: tuple[Any, ...], options: dict[str, Any], written: str
) -> None:
    with pytest.raises(ConfigError, match=rf"go by name. Write launch\({written}\)\.$"):
        launch(train, *places, **options)


def test_arguments_given_as_options_get_advice() -> None:
    message = r"unknown option epochs=. train has a parameter of that name, .* write kwargs=\{'epochs': 3\}\."
    with pytest.raises(ConfigError, match=message):
        notebook_launch(train, 2, args=(0.1,), epochs=3)
    with pytest.raises(ConfigError, match=r"unknown option epoch=. help\(LaunchConfig\) lists the options"):
        notebook_launch(train, 2, args=(0.1,), epoch=3)


SCRIPT = "<script>'\"\x1b[31m"


class Optimizer(enum.Enum):
    ADAM = "adam"


@dataclasses.dataclass
class Options:
    lr: float
    api_key: str
    weights: Any = None


class Broken:
    def __repr__(self) -> str:
        raise ValueError

    @property
    def shape(self) -> Any:
        raise RuntimeError


class Slow:
    def __repr__(self) -> str:
        time.sleep(60)
        return ""


class Trainer:
    def fit(self, lr: float = 0.1) -> None: ...

    @classmethod
    def make(cls, size: int = 2) -> None: ...

    def __call__(self, steps: int = 3) -> None: ...


def learn(lr: float = 0.1, *layers: int, name: str = "net", **more: Any) -> float:
    report(step=1, loss=lr)
    return lr


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.1, "0.1"),
        (None, "None"),
        (float("nan"), "nan"),
        ("a\nb", r"'a\nb'"),
        ([1, [2, 3], {"a": None}], "[1, [2, 3], {'a': None}]"),
        (np.float32(2), "np.float32(2.0)"),
        (torch.bfloat16, "torch.bfloat16"),
        (torch.zeros(3, 4), "Tensor(3, 4)"),
        ([torch.zeros(2)], "[Tensor(2,)]"),
        (np.zeros((2, 3)), "ndarray(2, 3)"),
        (torch.nn.Linear(2, 2), "Linear"),
        (Optimizer.ADAM, "Optimizer.ADAM"),
        (Path("a/b"), "'a/b'"),
        (Trainer, "Trainer"),
        (learn, "learn"),
        (Options(0.1, "hush", torch.zeros(2)), "Options(lr=0.1, weights=Tensor(2,))"),
        (argparse.Namespace(lr=0.1, token="hush"), "Namespace(lr=0.1)"),
        (types.SimpleNamespace(model=Slow()), "SimpleNamespace(model=Slow)"),
        ({"lr": 0.1, "password": "hush"}, "{'lr': 0.1, ...}"),
        (b"x" * 10**7, "bytes of 10,000,000"),
        (set(range(10**6)), "set of 1,000,000"),
        (dict.fromkeys(range(10**6)), "{0: None, 1: None, 2: None, 3: None, 4: None, 5: None, ...}"),
        (Broken(), "Broken"),
        (Slow(), "Slow"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_value_is_described_in_few_words(value: Any, words: str) -> None:
    assert describe_value(value) == words


def test_descriptions_are_limited_in_length() -> None:
    deep: Any = 1
    for _ in range(100):
        deep = [deep, "x" * 1000]
    assert all(len(describe_value(value)) <= MAX_VALUE for value in (deep, "x" * 10**6, [Options(1, "", deep)] * 9))
    assert len(describe_arguments(learn, (), {f"x{number}": 1 for number in range(1000)})) == MAX_ARGUMENTS


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "words"),
    [
        (learn, (), {}, {"lr": "0.1", "name": "'net'"}),
        (learn, (0.2, 8, 9), {"depth": 3}, {"lr": "0.2", "layers": "(8, 9)", "name": "'net'", "depth": "3"}),
        (functools.partial(learn, 0.3, name="a"), (), {"name": "b"}, {"lr": "0.3", "name": "'b'"}),
        (functools.partial(functools.partial(learn, lr=1), lr=2), (), {}, {"lr": "2", "name": "'net'"}),
        (learn, (), {"api_key": "hush"}, {"lr": "0.1", "name": "'net'"}),
        (Trainer().fit, (), {}, {"lr": "0.1"}),
        (Trainer.make, (4,), {}, {"size": "4"}),
        (Trainer(), (), {}, {"steps": "3"}),
        (max, (1, 2), {}, {"argument 1": "1", "argument 2": "2"}),  # Written in C, without a signature.
    ],
)
def test_arguments_have_names_and_defaults(function: Any, args: Any, kwargs: Any, words: dict[str, str]) -> None:
    assert describe_arguments(function, args, kwargs) == words


def test_arguments_of_runs_are_recorded_shown_and_compared() -> None:
    options: dict[str, Any] = {"kwargs": {"name": SCRIPT}, "output": "none"}
    first, second = launch(learn, 2, **options), launch(functools.partial(learn, lr=0.2), 2, **options)
    assert first.wait(50)
    assert second.wait(50)
    snapshot, recorded = second.snapshot(), open_run(second.id)
    assert snapshot.arguments == recorded.snapshot().arguments == {"lr": "0.2", "name": describe_value(SCRIPT)}
    assert json.loads((recorded.folder / "config.json").read_bytes())["arguments"] == snapshot.arguments
    assert recorded.config == second.config
    assert Feed(second).reset()["run"]["arguments"].startswith("lr=0.2, name=")
    page = static_html(snapshot, Curves())
    assert "lr=0.2, name='<script>" in Balanced(page).text
    assert "<script>" not in page
    assert "\x1b" not in page
    assert "lr=0.2" in static_text(snapshot)
    comparison = compare(first, second)
    assert comparison.settings == {"arguments.lr": {"A": "0.1", "B": "0.2"}}
    assert "arguments.lr" in repr(comparison)
    assert "<script>" not in comparison._repr_html_()


# CUDA's driver as its documentation has it: a child of a process that has initialised it is refused.
DRIVER = r"""
#include <unistd.h>
static int owner = 0;
int cuInit(unsigned flags) { if (!owner) owner = getpid(); return owner == getpid() ? 0 : 3; }
"""
FORKS = """
import ctypes, dataclasses, torch
from notebook_launcher import ConfigError, LaunchConfig
from notebook_launcher.kernel.calls import checks
from notebook_launcher.kernel.plan import make_plan
plan = dataclasses.replace(make_plan(LaunchConfig(start_method="fork", threads_per_process=1)), gpus=(0,))
print(checks.adapt(plan) is plan)
driver = ctypes.CDLL("libcuda.so.1")
print(checks.adapt(plan) is plan)
driver.cuInit(0)  # as CuPy or JAX would
try:
    checks.adapt(plan)
except ConfigError as error:
    print(error)
"""


@needs_compiler
def test_fork_of_a_kernel_in_which_any_library_initialised_cuda_is_refused(tmp_path: Path) -> None:
    compile_library(tmp_path, "libcuda.so.1", DRIVER)
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", FORKS], env=env, capture_output=True, text=True, check=True)
    clean, loaded, refusal = done.stdout.splitlines()
    assert (clean, loaded) == ("True", "True")
    assert refusal.startswith("start_method='fork' with GPUs: this kernel has touched CUDA")
