"""The options settled against what the machine has: here machines that are made up."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_launcher import ConfigError, LaunchConfig
from notebook_launcher.kernel import plan
from notebook_launcher.machine import devices
from notebook_launcher.machine.devices import GPU, Machine


def machine(num_cores: int = 8, num_gpus: int = 0, *, has_cuda: bool = True) -> Machine:
    gpus = tuple(GPU(index=at, name="H200", total_memory=1, free_memory=1) for at in range(num_gpus))
    return Machine(
        num_cores=num_cores,
        gpus=gpus,
        torch_has_cuda=has_cuda,
        why_no_gpu="" if gpus and has_cuda else "no GPU found" if not gpus else "this torch is built without CUDA",
    )


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make_plan(on: Machine, **options: Any) -> plan.Plan:
        monkeypatch.setattr(devices, "look", lambda: on)
        return plan.make_plan(LaunchConfig(**options))

    return make_plan


@pytest.mark.parametrize(
    ("on", "options", "expected"),
    [
        (machine(8), {}, (4, "gloo", False, 2)),
        (machine(2), {}, (2, "gloo", False, 1)),
        (machine(2), {"num_processes": 8}, (8, "gloo", False, 1)),
        (machine(8, 4), {}, (4, "nccl", True, 2)),
        (machine(8, 4), {"num_processes": 8}, (8, "gloo", True, 1)),
        (machine(8, 4), {"devices": [1, 3]}, (2, "nccl", True, 4)),
        (machine(8, 4), {"devices": "cpu"}, (4, "gloo", False, 2)),
        (machine(8, 4, has_cuda=False), {}, (4, "gloo", False, 2)),
        (machine(8), {"backend": None}, (4, None, False, 2)),
        (machine(8), {"threads_per_process": 3}, (4, "gloo", False, 3)),
    ],
)
def test_options_that_are_none_are_chosen(make: Any, on: Machine, options: dict[str, Any], expected: Any) -> None:
    made = make(on, **options)
    assert (made.num_processes, made.backend, made.use_gpu, made.threads_per_process) == expected


@pytest.mark.parametrize(
    ("on", "options", "message"),
    [
        (
            machine(2),
            {"num_processes": 1000},
            r"num_processes=1000 is too many for this machine: it has 2 cores, and 64",
        ),
        (
            machine(2),
            {"backend": "nccl"},
            r"backend='nccl' needs a GPU for each rank: no GPU found. Use backend='gloo'",
        ),
        (
            machine(8, 2),
            {"backend": "nccl", "num_processes": 4},
            r"there are 2. Use num_processes=2, or backend='gloo'",
        ),
        (machine(8, 2), {"backend": "nccl", "devices": "cpu"}, r"devices='cpu' excludes every GPU"),
        (machine(8, 2), {"devices": [0, 5]}, r"devices=\[0, 5\]: there is no GPU 5. Visible are 0: H200, 1: H200"),
        (machine(8), {"devices": [0]}, r"devices=\[0\]: no GPU found. Use devices='cpu'"),
    ],
)
def test_options_beyond_the_machine_are_refused(make: Any, on: Machine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        make(on, **options)
    assert refusal.value.field in options


def test_ranks_see_the_chosen_gpus_and_settings(make: Any) -> None:
    environ = make(machine(8, 4), devices=[1, 3], mixed_precision="bf16", gradient_accumulation_steps=4).environ
    assert environ["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "4"


def test_options_that_were_not_given_are_not_exported(make: Any) -> None:
    environ = make(machine(8)).environ
    assert not {"ACCELERATE_MIXED_PRECISION", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"} & set(environ)
    assert environ["ACCELERATE_USE_CPU"] == "true"
    assert make(machine(8), env={"OMP_NUM_THREADS": "7"}).environ["OMP_NUM_THREADS"] == "7"


def test_summary_names_the_hardware_and_the_chosen_options(make: Any) -> None:
    summary = make(machine(8, 4, has_cuda=False), num_processes=2, seed=7, start_method="spawn").summary
    assert summary == "2 CPU ranks, gloo, spawn, 4 threads each, this torch is built without CUDA, seed 7"


@pytest.mark.parametrize(
    ("variable", "expected"),
    [(None, [0, 1, 2]), ("2,0", [2, 0]), ("", []), ("1,7,0", [1]), ("GPU-b", [1]), ("-1", [])],
)
def test_visible_gpus_follow_cudas_rule(variable: str | None, expected: list[int]) -> None:
    gpus = [(GPU(index=at, name="", total_memory=0, free_memory=0), f"GPU-{'abc'[at]}") for at in range(3)]
    assert [gpu.index for gpu in devices._visible(gpus, variable)] == expected


def test_hardware_of_this_machine_can_be_read() -> None:
    assert devices.look().num_cores >= 1
