"""GPUs as NVML and AMD's driver tell of them, with a library and a module in their place; no GPU is needed, or used."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from notebook_launcher.machine import devices
from tests.support.compiled_libraries import NVML, compile_library, needs_compiler
from tests.support.kernels import ROOT

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("nvml"), "libnvidia-ml.so.1", NVML)


LOOK = """
from notebook_launcher.machine import devices
machine = devices.detect()
print([(gpu.key, gpu.selector) for gpu in machine.gpus])
print(machine.left_out, machine.driver)
print(machine.why_no_gpu)
"""


def look(library: Path, program: str = LOOK, **variables: str) -> list[str]:
    """Run a program where this library stands in for NVML; return the lines that it prints."""
    env = {**os.environ, "LD_LIBRARY_PATH": str(library), "PYTHONPATH": str(ROOT)}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env={**env, **variables}, capture_output=True, text=True, check=True
    ).stdout.splitlines()


@needs_compiler
def test_gpus_that_the_driver_does_not_let_use_are_left_out(library: Path) -> None:
    gpus, left_out, _ = look(library, PRETEND_CODES="0,4,15,999,0")
    assert gpus == "[(0, 'GPU-aaaa'), (4, 'GPU-aaaa')]"
    assert left_out == "('GPU 1: no permission', 'GPU 2: lost by the driver', 'GPU 3: NVML error 999') 535.183.01"
    gpus, _, why = look(library, PRETEND_CODES="4")
    assert (gpus, why) == ("[]", "no GPU found (GPU 0: no permission)")


@needs_compiler
def test_slices_of_a_partitioned_gpu_are_found_by_their_names(library: Path) -> None:
    gpus, _, _ = look(library, CUDA_VISIBLE_DEVICES="MIG-cccc,MIG-dddd")
    assert gpus == "[('MIG-cccc', 'MIG-cccc')]"
    _, _, why = look(library, CUDA_VISIBLE_DEVICES="0,0")
    assert why == "CUDA_VISIBLE_DEVICES='0,0' names a GPU twice, which hides all of them"


MIXED = """
import dataclasses
from notebook_launcher import LaunchConfig
from notebook_launcher.kernel.plan import make_plan
from notebook_launcher.machine import devices
machine = dataclasses.replace(devices.detect(), why_no_gpu="")  # This torch may have no CUDA.
plan = make_plan(LaunchConfig(devices=(1,)), machine)
print(plan.environ["CUDA_VISIBLE_DEVICES"], "/", plan.found)
"""


@needs_compiler
def test_one_of_several_kinds_of_cards_is_chosen_by_its_uuid(library: Path) -> None:
    """CUDA counts the fastest card first, and NVML by the slots: a number would mean another card to each."""
    assert look(library, MIXED, PRETEND_SECOND="Faster") == ["GPU-bbbb / 1 x Faster"]


@needs_compiler
def test_slices_of_all_partitioned_gpus_are_listed(library: Path, tmp_path: Path) -> None:
    program = "from notebook_launcher.machine import devices; print(devices.find_slices())"
    assert look(library, program) == ["['MIG-cccc']"]
    assert look(tmp_path, program, PRETEND_CODES="4") == ["[]"]


TORCH = """
class cuda:
    device_count = staticmethod(lambda: 2)
    mem_get_info = staticmethod(lambda at: (at + 1, 8))
    get_device_name = staticmethod(lambda at: f"MI300X {at}")
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a ROCm driver; returns the file that is imported as torch."""
    monkeypatch.setattr(devices, "DRIVER", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in (devices.ROCM_VARIABLE, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "torch.py").write_text(TORCH)
    return tmp_path / "torch.py"


@pytest.mark.parametrize(
    ("variables", "selectors"),
    [
        ({}, ["0", "1"]),
        ({"HIP_VISIBLE_DEVICES": "3, 1"}, ["3", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, ["2", "0"]),
        ({"HIP_VISIBLE_DEVICES": "3,1", "CUDA_VISIBLE_DEVICES": "2,0"}, ["3", "1"]),
    ],
)
def test_gpus_are_counted_in_a_process_of_their_own_and_named_as_the_user_did(
    driver: Path, variables: dict[str, str], selectors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(devices, "torch_build", lambda: ("hip", "6.2"))
    machine = devices.detect()
    assert driver.exists()
    assert [gpu.selector for gpu in machine.gpus] == selectors
    assert [(gpu.name, gpu.free_memory, gpu.total_memory) for gpu in machine.gpus] == [
        ("MI300X 0", 1, 8),
        ("MI300X 1", 2, 8),
    ]
    assert (machine.variable, machine.why_no_gpu) == ("HIP_VISIBLE_DEVICES", "")


@pytest.mark.parametrize("text", ["raise ImportError", "", "import os; os._exit(1)", "print('no numbers')"])
def test_torch_that_does_not_answer_means_no_gpus(driver: Path, text: str) -> None:
    driver.write_text(text)
    assert devices.detect_with_torch() == ()


def test_without_a_driver_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "DRIVER", tmp_path / "missing")
    monkeypatch.setattr(subprocess, "run", None)
    assert devices.detect_with_torch() == ()
