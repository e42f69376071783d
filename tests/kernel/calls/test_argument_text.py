"""Arguments of a call in a few words: in the run, its folder, its views and beside another run's."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import json
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from notebook_launcher import launch, open_run, report
from notebook_launcher.drawing.run_picture import static_html, static_text
from notebook_launcher.history.curves import Curves
from notebook_launcher.kernel.calls.checks import MAX_ARGUMENTS, describe_arguments
from notebook_launcher.widgets import compare
from notebook_launcher.widgets.monitor.feed import Feed
from notebook_launcher.wording import MAX_VALUE, describe_value
from tests.support.drawn_runs import Balanced

if TYPE_CHECKING:
    from notebook_launcher import Run

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


def train(lr: float = 0.1, *layers: int, name: str = "net", **more: Any) -> float:
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
        (train, "train"),
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
    assert len(describe_arguments(train, (), {f"x{number}": 1 for number in range(1000)})) == MAX_ARGUMENTS


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "words"),
    [
        (train, (), {}, {"lr": "0.1", "name": "'net'"}),
        (train, (0.2, 8, 9), {"depth": 3}, {"lr": "0.2", "layers": "(8, 9)", "name": "'net'", "depth": "3"}),
        (functools.partial(train, 0.3, name="a"), (), {"name": "b"}, {"lr": "0.3", "name": "'b'"}),
        (functools.partial(functools.partial(train, lr=1), lr=2), (), {}, {"lr": "2", "name": "'net'"}),
        (train, (), {"api_key": "hush"}, {"lr": "0.1", "name": "'net'"}),
        (Trainer().fit, (), {}, {"lr": "0.1"}),
        (Trainer.make, (4,), {}, {"size": "4"}),
        (Trainer(), (), {}, {"steps": "3"}),
        (max, (1, 2), {}, {"argument 1": "1", "argument 2": "2"}),  # Written in C, without a signature.
    ],
)
def test_arguments_have_names_and_defaults(function: Any, args: Any, kwargs: Any, words: dict[str, str]) -> None:
    assert describe_arguments(function, args, kwargs) == words


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    first = launch(train, 2, kwargs={"name": SCRIPT}, output="none")
    second = launch(functools.partial(train, lr=0.2), 2, kwargs={"name": SCRIPT}, output="none")
    return [run for run in (first, second) if run.wait(50)]


def test_run_and_its_folder_record_the_arguments(runs: list[Run]) -> None:
    told = {"lr": "0.2", "name": describe_value(SCRIPT)}
    assert runs[1].snapshot().arguments == told
    recorded = open_run(runs[1].id)
    assert recorded.snapshot().arguments == told
    assert json.loads((recorded.folder / "config.json").read_bytes())["arguments"] == told
    assert recorded.config == runs[1].config


def test_views_show_the_arguments(runs: list[Run]) -> None:
    snapshot = runs[1].snapshot()
    assert Feed(runs[1]).reset()["run"]["arguments"].startswith("lr=0.2, name=")
    page = static_html(snapshot, Curves())
    assert "lr=0.2, name='<script>" in Balanced(page).text
    assert "<script>" not in page
    assert "\x1b" not in page
    assert "lr=0.2" in static_text(snapshot)


def test_comparison_shows_the_argument_in_which_two_runs_differ(runs: list[Run]) -> None:
    comparison = compare(*runs)
    assert comparison.settings == {"arguments.lr": {"A": "0.1", "B": "0.2"}}
    assert "arguments.lr" in repr(comparison)
    assert "<script>" not in comparison._repr_html_()
