"""Forks of a kernel that has touched its GPUs, with a library in the place of CUDA's driver."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.compiled_libraries import compile_library, needs_compiler
from tests.support.kernels import ROOT

if TYPE_CHECKING:
    from pathlib import Path

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
