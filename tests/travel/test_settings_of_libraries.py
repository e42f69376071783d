"""Ranks have the settings of libraries that the kernel has, and keep those that they have made themselves."""

from __future__ import annotations

import sys
import types
from typing import Any

import matplotlib as mpl
import pandas as pd
import pytest
import torch

from notebook_launcher import Session, notebook_launch
from notebook_launcher.travel.settings import SETTINGS, KernelSettings, read_settings

CHANGED: dict[str, Any] = {
    "default_dtype": "float64",
    "deterministic_algorithms": (True, True),
    "float32_matmul_precision": "high",
    "cudnn_benchmark": True,
    "cudnn_deterministic": True,
    "detect_anomaly": (True, False),
    "print_options": (2, 10, 2, 60, False),
    "numpy_print_options": {"precision": 2, "suppress": True},
    "numpy_errors": {"divide": "raise"},
    "rc_params": {"figure.dpi": 42.0, "lines.linewidth": 3.0},
    "pandas_options": {"display.max_rows": 7, "display.precision": 2},
}
CPU: dict[str, Any] = {"devices": "cpu", "output": "none"}


@pytest.fixture(autouse=True)
def torch_is_as_before():
    assert read_settings() == {}
    yield
    KernelSettings(read_settings()).follow({})
    assert read_settings() == {}


def settings_of_a_rank() -> dict[str, Any]:
    assert mpl.rcParams
    assert pd.options  # The rank imports this module, with its libraries, after it has received their settings.
    return read_settings()


def test_each_setting_has_a_default_a_reader_and_a_writer():
    KernelSettings().follow(CHANGED)
    assert read_settings() == CHANGED
    assert set(CHANGED) == {name for name, setting in SETTINGS.items() if not setting.calls}


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_ranks_of_a_launch_have_the_settings_of_the_kernel(start_method):
    if start_method == "forkserver":
        assert notebook_launch(settings_of_a_rank, 1, start_method=start_method, **CPU)[:] == [{}]
    KernelSettings().follow(CHANGED)
    assert notebook_launch(settings_of_a_rank, 1, start_method=start_method, **CPU)[:] == [CHANGED]


def test_torch_that_is_still_being_imported_has_no_settings(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert read_settings() == {}


def test_model_in_double_precision_meets_tensors_in_double_precision():
    torch.set_default_dtype(torch.float64)
    model = torch.nn.Linear(2, 1)
    assert notebook_launch(lambda: model(torch.ones(1, 2)).dtype, 2, **CPU)[:] == [torch.float64] * 2


def choose(precision: str) -> dict[str, Any]:
    torch.set_float32_matmul_precision(precision)
    return read_settings()


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_ranks_of_a_session_follow_the_kernel_and_keep_their_own(start_method):
    if start_method == "fork":
        torch.set_default_dtype(torch.float64)
    with Session(2, start_method=start_method, **CPU) as session:
        torch.set_default_dtype(torch.float64)
        assert session.run(choose, args=("high",))[0] == {
            "default_dtype": "float64",
            "float32_matmul_precision": "high",
        }
        assert session.run(settings_of_a_rank)[0]["float32_matmul_precision"] == "high"
        torch.set_default_dtype(torch.float32)
        assert session.run(settings_of_a_rank)[0] == {"float32_matmul_precision": "high"}
