"""Random number generators that a function takes along: they are named, and ranks are told how to make their own."""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import notebook_launch
from notebook_launcher.travel.random_states import describe_copies

if TYPE_CHECKING:
    from collections.abc import Callable

shared = random.Random(0)


def uses_a_global(scale: float = 1.0) -> float:
    return scale * shared.random()


def has_a_default(generator: np.random.RandomState = np.random.RandomState(0)) -> float:  # noqa: B008 - the case
    return float(generator.rand())


def names_an_attribute(holder: Any) -> Any:
    return holder.shared


def capture(value: Any) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return value, args, kwargs

    return function


GENERATOR = torch.Generator()
FOUND: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], list[str]]] = {
    "global": (uses_a_global, (), {}, ["shared"]),
    "default": (has_a_default, (), {}, ["generator"]),
    "closure": (capture(GENERATOR), (), {}, ["value"]),
    "list": (capture([1, GENERATOR]), (), {}, ["value[1]"]),
    "dict": (capture({"noise": np.random.default_rng()}), (), {}, ["value['noise']"]),
    "argument": (capture(1), (GENERATOR,), {"rng": shared}, ["args[0]", "rng"]),
    "partial": (functools.partial(capture(1), GENERATOR), (2,), {}, ["args[0]"]),
    "loader": (capture(DataLoader(TensorDataset(torch.ones(1)), generator=GENERATOR)), (), {}, []),
    "no numbers of its own": (capture(random.SystemRandom()), (), {}, []),
    "class and module": (capture([np.random.Generator, random, np.random]), (), {}, []),
    "attribute": (names_an_attribute, (1,), {}, []),
    "built-in": (print, (), {}, []),
}


@pytest.mark.parametrize("case", FOUND)
def test_generators_are_found_by_name(case: str) -> None:
    function, args, kwargs, names = FOUND[case]
    assert describe_copies(function, args, kwargs, num_ranks=2).partition(": every")[0] == ", ".join(names)


@pytest.mark.parametrize(("num_processes", "output", "count"), [(2, "rank0", 1), (1, "rank0", 0), (2, "none", 0)])
def test_launch_of_several_ranks_names_them_once(
    num_processes: int, output: str, count: int, capfd: pytest.CaptureFixture[str]
) -> None:
    notebook_launch(uses_a_global, num_processes, output=output, runs_folder=None)
    shown = capfd.readouterr().out
    assert shown.count("shared: every rank gets an equal copy of this random number generator") == count
    assert shown.count("make it in the function: random.Random(torch.initial_seed() + dist.get_rank())") == count


def test_trials_of_a_study_in_memory_are_named(tmp_path):
    optuna = pytest.importorskip("optuna", reason="Optuna is not among the packages of the tests")
    in_memory = optuna.create_study()
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.log"))
    trial, kept = in_memory.ask(), optuna.create_study(storage=optuna.storages.JournalStorage(backend))

    def train(studies):
        trial.report(0.5, 0)

    text = describe_copies(train, ([in_memory, kept],), {"other": kept.ask()}, num_ranks=1)
    first, second = text.splitlines()
    assert first.startswith("trial: ranks get a copy of this trial")
    assert second.startswith("args[0][0]: ranks get a copy of this study")
