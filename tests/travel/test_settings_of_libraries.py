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
from tests.support.warm_kernels import evaluate, run_cell, warm_kernel

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


MANNERS = """
import logging, os, sys, warnings
from notebook_launcher import Session, notebook_launch
def manners():
    import found_by_relative_entry
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("one", UserWarning)
        warnings.warn("two", FutureWarning)
    levels = [logging.getLogger(name).getEffectiveLevel() for name in (None, "own", "own.inner")]
    return [str(w.message) for w in caught], levels, found_by_relative_entry.VALUE
def in_ranks(**options):
    return notebook_launch(manners, 2, **options)[1]
os.makedirs("lib")
os.makedirs("elsewhere")
os.makedirs("spread")
open("lib/found_by_relative_entry.py", "w").write("VALUE = 1")
open("beside.py", "w").write("VALUE = 'beside'")
open("spread/part.py", "w").write("VALUE = 'part of a namespace package'")
open("hidden.py", "w").write("VALUE = 'imported before'")
open("elsewhere/hidden.py", "w").write("VALUE = 'never imported'")
open("elsewhere/late.py", "w").write("VALUE = 'late'")
sys.path.append("lib")
import found_by_relative_entry, beside, spread.part, hidden
def values(): return [module.VALUE for module in (beside, spread.part, hidden, late)]
"""


def test_manners_of_the_kernel_hold_in_the_ranks(tmp_path):
    with warm_kernel(cwd=tmp_path) as kernel:
        run_cell(kernel, MANNERS + "session = Session(2)\nos.chdir('elsewhere')")
        usual = evaluate(kernel, "in_ranks()")
        assert usual == (["one", "two"], [30, 30, 30], 1)
        run_cell(
            kernel,
            "warnings.filterwarnings('ignore', category=FutureWarning)\nlogging.getLogger('own').setLevel('DEBUG')",
        )
        ways = "in_ranks(), in_ranks(start_method='fork'), session.run(manners)[1]"
        assert evaluate(kernel, f"manners(), {ways}") == ((["one"], [30, 10, 10], 1),) * 4
        run_cell(kernel, "del warnings.filters[0]\nlogging.getLogger('own').setLevel(0)")
        assert evaluate(kernel, ways) == (usual,) * 3
        code = "[in_ranks(env={'PYTHONWARNINGS': 'ignore'}, start_method=way)[0] for way in ('forkserver', 'fork')]"
        assert evaluate(kernel, code) == [[], []]
        # After os.chdir the entry "" of sys.path means another folder; the kernel has modules of both.
        run_cell(kernel, "import late")
        ways = "values(), *(notebook_launch(values, 2, start_method=way)[1] for way in ('forkserver', 'fork'))"
        expected = ["beside", "part of a namespace package", "imported before", "late"]
        assert evaluate(kernel, f"{ways}, session.run(values)[1]") == (expected,) * 4
        run_cell(kernel, "session.close()")
