"""AMD's GPUs, with a module in torch's place that a throw-away process asks; nothing of AMD's is here, or shown."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from notebook_launcher.machine import devices

if TYPE_CHECKING:
    from pathlib import Path

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
