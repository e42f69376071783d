"""Options of a launch, as the ranks observe them."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pickle
from typing import Any

import pytest
import torch

from notebook_launcher import Accelerator, LaunchConfig, Session, context, notebook_launch
from notebook_launcher.settings.training_settings import steps_of
from tests.support.toy_training import shards_on_cpus

CHOSEN: dict[str, Any] = {
    "mixed_precision": "bf16",
    "gradient_accumulation_steps": 3,
    "max_grad_norm": 0.5,
    "comm_hook": "fp16",
    "check_ranks": False,
    "shard": 2,
}
WRITTEN_OUT: dict[str, Any] = {"mixed_precision": "no", "gradient_accumulation_steps": 1, "comm_hook": "no"}
"""Options that say what no option would mean."""


def seen() -> Any:
    current = context.current()
    return None if current is None else current.settings


def test_every_rank_gets_the_settings_of_the_launch_or_session() -> None:
    chosen = LaunchConfig(**CHOSEN).training_settings()
    assert {name: getattr(chosen, name) for name in CHOSEN} == CHOSEN
    assert list(notebook_launch(seen, 2, output="none", **CHOSEN)) == [chosen] * 2
    with Session(2, output="none", **CHOSEN) as session:
        assert [list(session.run(seen)), list(session.run(seen))] == [[chosen] * 2] * 2


@pytest.mark.parametrize("options", [{}, *({name: value} for name, value in CHOSEN.items()), CHOSEN, WRITTEN_OUT])
def test_settings_hold_only_the_options_that_were_given(options: dict[str, Any]) -> None:
    settings = LaunchConfig(**options).training_settings()
    assert {name: value for name, value in dataclasses.asdict(settings).items() if value is not None} == options
    assert pickle.loads(pickle.dumps(settings)) == settings


VARIABLES = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "ACCELERATE_MIXED_PRECISION": "bf16"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("bf16", 4)),
        ({"gradient_accumulation_steps": 1}, ("bf16", 1)),
        ({"mixed_precision": "no"}, ("no", 4)),
        (WRITTEN_OUT, ("no", 1)),
    ],
)
def test_explicit_default_replaces_the_environment(
    options: dict[str, Any], expected: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> list[Any]:
        makers = [importlib.import_module(library).Accelerator() for library in ("notebook_launcher", "accelerate")]
        return [(made.mixed_precision, made.gradient_accumulation_steps) for made in makers]

    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    settings = LaunchConfig(**options).training_settings().resolved(VARIABLES)
    assert (settings.mixed_precision, settings.gradient_accumulation_steps) == expected
    if len(options) != 1:
        assert list(notebook_launch(look, 1, output="none", **options)) == [[expected, expected]]


def test_invalid_environment_variable_leaves_the_setting_open() -> None:
    variables = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "0", "ACCELERATE_MIXED_PRECISION": "bf61"}
    settings = LaunchConfig().training_settings().resolved(variables)
    assert (settings.mixed_precision, settings.gradient_accumulation_steps) == (None, None)


def test_error_about_a_variable_names_the_environment() -> None:
    message = (
        r"ACCELERATE_GRADIENT_ACCUMULATION_STEPS='many' is a str; it must be a whole number\. It is a variable of the "
        r"environment: of the shell, of os\.environ, or of the launch's env=\."
    )
    with pytest.raises(ValueError, match=message):
        steps_of(None, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "many"})


def test_process_without_a_launcher_has_no_settings() -> None:
    assert seen() is None
    assert context.current() is None


def observe() -> dict[str, Any]:
    group_was_up = torch.distributed.is_initialized()
    seed = torch.initial_seed()
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = accelerator.unwrap_model(model).weight.sum().item()
    accelerator.backward(model(torch.ones(1, 1)).sum() * 8)
    optimizer.step()
    if os.environ.get("FAIL_ONCE") and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError
    return {
        "num_processes": accelerator.num_processes,
        "backend": (group_was_up, accelerator.state.backend),
        "mixed_precision": accelerator.mixed_precision,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "max_grad_norm": round(before - accelerator.unwrap_model(model).weight.sum().item(), 3),
        "comm_hook": str(accelerator.ddp_handler.comm_hook),
        "check_ranks": accelerator.rank_check is not None,
        "shard": accelerator.is_fsdp2,
        "seed": seed,
        "rank_seeds": torch.initial_seed() == seed,
        "threads_per_process": torch.get_num_threads(),
        "env": os.environ.get("MINE"),
        "max_restarts": os.environ.get("TORCHELASTIC_RESTART_COUNT"),
        "start_method": "notebook_launcher.processes.forkserver" in "".join(open(f"/proc/{os.getpid()}/cmdline")),
    }


OPTIONS: list[dict[str, Any]] = [
    {"shard": 2},
    {"num_processes": 1, "start_method": "spawn", "max_grad_norm": 0.5},
    {"backend": None, "seed": 7},
    {"comm_hook": "fp16", "rank_seeds": "alike"},
    {
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 2,
        "check_ranks": False,
        "threads_per_process": 3,
        "max_restarts": 1,
        "env": {"MINE": "here", "FAIL_ONCE": "1"},
    },
]
"""Options whose effects a rank can tell apart, so that one launch shows them."""
ELSEWHERE = """
    check_collectives debug detached devices display engine hang_notice idle_timeout monitor name nodes output
    preemption_signal processes_per_node resume runs_folder setup tags timeout
"""
"""Options that the tests of their own rooms try out: they need a front end, several machines, a host, or time."""


def test_every_option_has_a_test_of_its_effect() -> None:
    tried = {name for options in OPTIONS for name in options}
    assert tried.union(ELSEWHERE.split()) == {field.name for field in dataclasses.fields(LaunchConfig)}


PLAIN: dict[str, Any] = {"num_processes": 2, "seed": 1, "output": "none", "threads_per_process": 1}


@pytest.fixture(scope="module")
def usual() -> dict[str, Any]:
    """What a rank observes without the options."""
    observed: dict[str, Any] = notebook_launch(observe, **PLAIN)[0]
    return observed


@pytest.mark.parametrize("options", [pytest.param(OPTIONS[0], marks=shards_on_cpus), *OPTIONS[1:]], ids="+".join)
def test_option_changes_what_a_rank_observes(options: dict[str, Any], usual: dict[str, Any]) -> None:
    changed = notebook_launch(observe, **{**PLAIN, **options})[0]
    assert {name: usual[name] == changed[name] for name in options} == dict.fromkeys(options, False)
