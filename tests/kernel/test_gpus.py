"""GPUs as NVML tells of them, with a library in NVML's place that is compiled here; no GPU is needed, or used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from notebook_launcher.kernel.meter import GpuMeter, GpuReading
from tests.support.kernels import ROOT

if TYPE_CHECKING:
    from pathlib import Path

COMPILER = shutil.which("cc") or shutil.which("gcc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")

# Two GPUs; each look at one finds 1 GB more used. The second does not tell how busy it is, as one that is
# partitioned (MIG) does not. It counts who has it open.
NVML = r"""
#include <stdio.h>
#include <string.h>
typedef struct { int used; const char *uuid; } device;
static device devices[2] = {{0, "GPU-aaaa"}, {0, "GPU-bbbb"}};
static int num_open = 0;
int num_left_open(void) { return num_open; }
int nvmlInit_v2(void) { num_open++; return 0; }
int nvmlShutdown(void) { num_open--; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = &devices[index]; return 0; }
int nvmlDeviceGetName(void *handle, char *name, unsigned size) { snprintf(name, size, "Pretend"); return 0; }
int nvmlDeviceGetUUID(device *handle, char *uuid, unsigned size) { snprintf(uuid, size, "%s", handle->uuid); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetMemoryInfo(device *handle, unsigned long long *memory) {
    memory[0] = 80000000000ULL; memory[2] = 1000000000ULL * ++handle->used; memory[1] = memory[0] - memory[2];
    return 0;
}
int nvmlDeviceGetUtilizationRates(device *handle, unsigned *rates) {
    rates[0] = 93; rates[1] = 40;
    return handle == &devices[1] ? 3 : 0;
}
"""
PROGRAM = """
import ctypes, threading, time
from notebook_launcher import launch
from notebook_launcher.kernel import meter
from notebook_launcher.machine import devices
from notebook_launcher.widgets.feed import Feed
left_open = ctypes.CDLL("libnvidia-ml.so.1").num_left_open
meter.INTERVAL = 60

gpus = devices.look().gpus
print([(gpu.index, gpu.name, gpu.total_memory, gpu.free_memory, gpu.capability) for gpu in gpus], left_open())

def wait():
    from notebook_launcher import track
    for _ in track(range(10**6)): time.sleep(0.01)

run = launch(wait, 3, devices="cpu", output="none")
run._data.gpus = meter.GpuMeter((1, 0))  # This torch may have no CUDA: then no rank gets one by itself.
first = run.snapshot().ranks
again = run.snapshot().ranks
run._data.gpus._looked_at -= 60
later = Feed(run).reset()["ranks"]
print([(rank.gpu_memory, rank.gpu_utilization) for rank in first], [rank.gpu_memory for rank in again])
print([(rank["gpu_memory"], rank["gpu_utilization"]) for rank in later], left_open())
run.stop()
print([(rank.gpu_memory, rank.gpu_utilization) for rank in run.ranks], left_open())
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(NVML)
    assert COMPILER is not None
    made, source = str(folder / "libnvidia-ml.so.1"), str(folder / "nvml.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-w", "-o", made, source], check=True)
    return folder


@needs_compiler
def test_meter_reads_memory_and_utilisation_of_each_ranks_gpu(library: Path) -> None:
    env = {**os.environ, "LD_LIBRARY_PATH": str(library), "PYTHONPATH": str(ROOT), "NOTEBOOK_LAUNCHER_RUNS": "off"}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    machine, first, later, over = done.stdout.splitlines()
    gb = 10**9
    assert machine == f"{[(at, 'Pretend', 80 * gb, 79 * gb, (9, 0)) for at in (0, 1)]} 0"
    # The launch has looked once more. Ranks take the GPUs in turn, and nobody looks twice within the interval.
    assert first == f"{[(3 * gb, None), (3 * gb, 0.93), (3 * gb, None)]} {[3 * gb] * 3}"
    assert later == f"{[(4 * gb, None), (4 * gb, 0.93), (4 * gb, None)]} 1"
    assert over == f"{[(4 * gb, None)] * 3} 0"


def test_without_gpus_there_is_nothing_to_read() -> None:
    meter = GpuMeter(())
    assert meter.read(0) == GpuReading(None, None)
    meter.close()


def test_meter_reads_nothing_without_nvml(tmp_path: Path) -> None:
    program = (
        "from notebook_launcher.kernel.meter import GpuMeter; meter = GpuMeter((0,)); print(meter.read(0)); "
        "meter.close(); print(meter.read(0))"
    )
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "GpuReading(memory=None, utilization=None)\n" * 2
