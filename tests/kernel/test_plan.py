"""The options settled against what the machine has: here machines that are made up."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from notebook_launcher import ConfigError, LaunchConfig
from notebook_launcher.kernel import plan
from notebook_launcher.machine import devices
from notebook_launcher.machine.allocation import SHARING_VARIABLE
from notebook_launcher.machine.devices import GPU, Machine
from notebook_launcher.processes.libraries import TENSORS_IN_HUGE_PAGES
from notebook_launcher.processes.rank.rendezvous import STILL_DISPLAYS, torchrun_environment
from notebook_launcher.settings.training_settings import RESERVED


def gpu(index: int, name: str = "H200", **fields: Any) -> GPU:
    return GPU(index=index, name=name, total_memory=1, free_memory=1, **fields)


def machine(num_cores: int = 8, num_gpus: int = 0, *, has_cuda: bool = True) -> Machine:
    why = "" if num_gpus and has_cuda else "no GPU found" if not num_gpus else "this torch is built without CUDA"
    return Machine(num_cores=num_cores, gpus=tuple(map(gpu, range(num_gpus))), why_no_gpu=why)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make_plan(on: Machine, **options: Any) -> plan.Plan:
        monkeypatch.setattr(devices, "detect", lambda: on)
        return plan.make_plan(LaunchConfig(**options))

    return make_plan


def test_models_cannot_be_shared_out_over_more_ranks_than_the_machine_gives(make: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        make(machine(2), shard=4)
    assert str(caught.value) == (
        "shard=4 with num_processes=None, which is 2 here: 2 / 4 is not a whole number of replicas. It can be 1, 2, or "
        "pass num_processes=4."
    )
    assert make(machine(2), shard=2).num_processes == 2


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


def test_models_are_not_shared_out_over_gpus_by_gloo(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"shard=2 on GPUs with gloo, which ranks get that share a GPU: .* as GPUs"):
        make(machine(8, 1), num_processes=2, shard=2)
    assert make(machine(8, 1), num_processes=2, shard=2, devices="cpu").backend == "gloo"
    assert make(machine(8, 2), shard=2).backend == "nccl"


def test_ranks_share_a_gpu_with_nccl_if_its_variable_is_set(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARING_VARIABLE, raising=False)
    for backend, expected in (("auto", "nccl"), ("nccl", "nccl"), ("gloo", "gloo")):
        made = make(machine(8, 1), num_processes=2, backend=backend, env={SHARING_VARIABLE: "1"})
        assert (made.num_processes, made.backend) == (2, expected)
    assert make(machine(8, 1), num_processes=2, env={SHARING_VARIABLE: "0"}).backend == "gloo"
    assert make(machine(8), num_processes=2, env={SHARING_VARIABLE: "1"}).backend == "gloo"
    monkeypatch.setenv(SHARING_VARIABLE, "1")
    assert make(slices(2)).backend == "nccl"


@pytest.mark.parametrize(
    ("on", "options", "message"),
    [
        (machine(2), {"num_processes": 1000}, r"=1000 is too many for this machine: it has 2 cores, and 64"),
        (machine(2), {"backend": "nccl"}, r"nccl' needs a GPU for each rank: no GPU found. Use backend='gloo'"),
        (
            machine(8, 2),
            {"backend": "nccl", "num_processes": 4},
            r"=2, or backend='gloo' to let ranks share. \(NCCL 2.30",
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
    assert "ACCELERATE_USE_CPU" not in environ
    on_cpus = make(machine(8)).environ
    assert (on_cpus.get("ACCELERATE_MIXED_PRECISION"), on_cpus["ACCELERATE_USE_CPU"]) == (None, "true")


def found(variable: str | None) -> tuple[tuple[GPU, ...], str]:
    """Return which of three GPUs and one slice a value of `CUDA_VISIBLE_DEVICES` shows."""
    gpus = [gpu(at, uuid=f"GPU-{'abc'[at]}") for at in range(3)]

    def find_slice(name: str, place: int) -> GPU | None:
        return gpu(place, selector=name) if name in ("MIG-x", "MIG-y") else None

    return devices.choose_visible(gpus, variable, find_slice)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, ["GPU-a", "GPU-b", "GPU-c"]),
        ("2,0", ["2", "0"]),
        ("", []),
        ("1,7,0", ["1"]),
        ("GPU-b", ["GPU-b"]),
        ("GPU-", []),
        ("GPU-b,0", ["GPU-b"]),
        ("-1", []),
        ("MIG-x", ["MIG-x"]),
        ("MIG-x,MIG-y", ["MIG-x", "MIG-y"]),
        ("MIG-x,MIG-z,MIG-y", ["MIG-x"]),
    ],
)
def test_visible_gpus_follow_cudas_rule_and_keep_the_users_names(variable: str | None, expected: list[str]) -> None:
    assert [gpu.selector for gpu in found(variable)[0]] == expected


@pytest.mark.parametrize("variable", ["0,0", "GPU-a,GPU-a", "MIG-x,MIG-x"])
def test_gpu_that_is_named_twice_hides_all(variable: str) -> None:
    assert found(variable) == ((), f"CUDA_VISIBLE_DEVICES={variable!r} names a GPU twice, which hides all of them")


def slices(num: int) -> Machine:
    return Machine(num_cores=8, gpus=tuple(gpu(at, selector=f"MIG-{at}") for at in range(num)), why_no_gpu="")


def test_each_rank_gets_a_slice_of_its_own(make: Any) -> None:
    made = make(slices(2))
    assert (made.num_processes, made.backend, made.gpus) == (2, "gloo", ("MIG-0", "MIG-1"))
    setup = dataclasses.replace(made.setup(many_calls=False), environ=made.environ)
    assert [torchrun_environment(setup, rank)["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)] == ["MIG-0", "MIG-1"]
    assert make(slices(1)).backend == "nccl"


def test_the_variables_that_a_rank_sets_itself_are_the_reserved_ones(make: Any) -> None:
    setup = make(machine(8)).setup(many_calls=False)
    defaults = {*TENSORS_IN_HUGE_PAGES, *STILL_DISPLAYS}  # `env=` may give others.
    assert set(torchrun_environment(setup, 0)) - defaults == set(RESERVED)


def test_ranks_get_gpus_by_names_that_cuda_reads_alike(make: Any) -> None:
    kinds = ("RTX 3060", "H200")
    gpus = tuple(gpu(at, kind, uuid=f"GPU-{at}", selector=f"GPU-{at}") for at, kind in enumerate(kinds))
    made = make(Machine(num_cores=8, gpus=gpus, why_no_gpu=""), devices=[1])
    assert made.environ["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert made.found == "1 x H200"


@pytest.mark.parametrize(
    ("driver", "num", "kind", "avoids"),
    [
        ("535.183.01", 2, "RTX 4090", True),
        ("550.40.07", 2, "RTX 4090", False),
        ("535.183.01", 1, "RTX 4090", False),
        ("535.183.01", 2, "H200", False),
        ("", 2, "RTX 4090", False),
    ],
)
def test_peer_access_is_avoided_where_an_old_driver_promises_it(
    make: Any, monkeypatch: pytest.MonkeyPatch, *, driver: str, num: int, kind: str, avoids: bool
) -> None:
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    gpus = tuple(gpu(at, kind) for at in range(num))
    made = make(Machine(num_cores=8, gpus=gpus, why_no_gpu="", driver=driver))
    assert (made.environ.get("NCCL_P2P_DISABLE") == "1") is avoids
    assert (f"NCCL without peer access (driver {driver})" in made.summary) is avoids


def test_amd_gpus_are_chosen_by_their_own_variable(make: Any) -> None:
    gpus = tuple(gpu(at, "MI300X", selector=str(at)) for at in range(2))
    on = Machine(num_cores=8, gpus=gpus, why_no_gpu="", variable="HIP_VISIBLE_DEVICES")
    assert make(on, devices=[1]).environ["HIP_VISIBLE_DEVICES"] == "1"
    assert make(on, devices="cpu").environ["HIP_VISIBLE_DEVICES"] == "-1"
