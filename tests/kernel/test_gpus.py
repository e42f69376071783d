"""GPUs as NVML tells of them, with a library in NVML's place that is compiled here; no GPU is needed, or used."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from notebook_launcher import Session, report
from notebook_launcher.kernel.metering.gpu_meter import GpuMeter, GpuReading
from notebook_launcher.kernel.ranks import describe_restart
from tests.support.kernels import ROOT

if TYPE_CHECKING:
    from pathlib import Path

COMPILER = shutil.which("cc") or shutil.which("gcc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")

# Two GPUs; each look at one finds 1 GB more used. The second does not tell how busy it is, as one that is
# partitioned (MIG) does not. It counts who has it open.
NVML = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct { int used; const char *uuid; } device;
static device devices[2] = {{0, "GPU-aaaa"}, {0, "GPU-bbbb"}};
static int num_open = 0;
int num_left_open(void) { return num_open; }
int nvmlInit_v2(void) { num_open++; return 0; }
int nvmlShutdown(void) { num_open--; return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "535.183.01"); return 0; }
/* PRETEND_CODES: what NVML answers for each GPU, such as "0,4,15": usable, no permission, lost. */
static int code_of(unsigned index) {
    const char *codes = getenv("PRETEND_CODES");
    while (codes && index-- && (codes = strchr(codes, ','))) codes++;
    return codes ? atoi(codes) : 0;
}
int nvmlDeviceGetCount_v2(unsigned *count) {
    const char *codes = getenv("PRETEND_CODES");
    for (*count = codes ? 1 : 2; codes && (codes = strchr(codes, ',')); codes++) ++*count;
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = &devices[index % 2];
    return code_of(index);
}
static device slice = {0, "MIG-cccc"};
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    *handle = &slice;
    return strcmp(uuid, "MIG-cccc") ? 6 : 0;
}
int nvmlDeviceGetMaxMigDeviceCount(device *handle, unsigned *count) {
    *count = handle == &devices[1] ? 3 : 0;
    return handle == &devices[1] ? 0 : 3;
}
int nvmlDeviceGetMigDeviceHandleByIndex(device *handle, unsigned index, void **found) {
    *found = &slice;
    return index == 1 ? 0 : 6;
}
/* PRETEND_SECOND: the name of the second GPU, where the cards differ. */
int nvmlDeviceGetName(device *handle, char *name, unsigned size) {
    const char *second = getenv("PRETEND_SECOND");
    snprintf(name, size, "%s", second && handle == &devices[1] ? second : "Pretend");
    return 0;
}
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
from notebook_launcher.kernel.metering import gpu_meter
from notebook_launcher.machine import devices
from notebook_launcher.widgets.monitor.feed import Feed
left_open = ctypes.CDLL("libnvidia-ml.so.1").num_left_open
gpu_meter.INTERVAL = 60

gpus = devices.detect().gpus
print([(gpu.index, gpu.name, gpu.total_memory, gpu.free_memory, gpu.capability) for gpu in gpus], left_open())

def wait():
    from notebook_launcher import track
    for _ in track(range(10**6)): time.sleep(0.01)

run = launch(wait, 3, devices="cpu", output="none")
run._data.gpus = gpu_meter.GpuMeter((1, 0))  # This torch may have no CUDA: then no rank gets one by itself.
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
        "from notebook_launcher.kernel.metering.gpu_meter import GpuMeter; meter = GpuMeter((0,)); "
        "print(meter.read(0)); meter.close(); print(meter.read(0))"
    )
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "GpuReading(memory=None, utilization=None)\n" * 2


LOOK = """
from notebook_launcher.machine import devices
machine = devices.detect()
print([(gpu.key, gpu.selector) for gpu in machine.gpus])
print(machine.left_out, machine.driver)
print(machine.why_no_gpu)
"""


def look(library: Path, **variables: str) -> list[str]:
    env = {**os.environ, "LD_LIBRARY_PATH": str(library), "PYTHONPATH": str(ROOT)}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(
        [sys.executable, "-c", LOOK], env={**env, **variables}, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


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
    env = {**os.environ, "LD_LIBRARY_PATH": str(library), "PYTHONPATH": str(ROOT), "PRETEND_SECOND": "Faster"}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run([sys.executable, "-c", MIXED], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "GPU-bbbb / 1 x Faster\n"


@needs_compiler
def test_slices_of_all_partitioned_gpus_are_listed(library: Path, tmp_path: Path) -> None:
    program = "from notebook_launcher.machine import nvml; print(nvml.find_slices())"
    env = {**os.environ, "LD_LIBRARY_PATH": str(library), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "['MIG-cccc']\n"
    without = subprocess.run(
        [sys.executable, "-c", program],
        env={**env, "LD_LIBRARY_PATH": str(tmp_path), "PRETEND_CODES": "4"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert without.stdout == "[]\n"


# CUDA's driver as its documentation has it: a child of a process that has initialised it is refused.
DRIVER = r"""
#include <unistd.h>
static int owner = 0;
int cuInit(unsigned flags) { if (!owner) owner = getpid(); return owner == getpid() ? 0 : 3; }
"""
FORKS = """
import ctypes, dataclasses, torch
from notebook_launcher import ConfigError, LaunchConfig
from notebook_launcher.kernel import fork_check
from notebook_launcher.kernel.plan import make_plan
plan = dataclasses.replace(make_plan(LaunchConfig(start_method="fork", threads_per_process=1)), gpus=(0,))
print(fork_check.adapt(plan) is plan)
driver = ctypes.CDLL("libcuda.so.1")
print(fork_check.adapt(plan) is plan)
driver.cuInit(0)  # as CuPy or JAX would
try:
    fork_check.adapt(plan)
except ConfigError as error:
    print(error)
"""


@needs_compiler
def test_fork_of_a_kernel_in_which_any_library_initialised_cuda_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cuda.c").write_text(DRIVER)
    assert COMPILER is not None
    made, source = str(tmp_path / "libcuda.so.1"), str(tmp_path / "cuda.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-w", "-o", made, source], check=True)
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", FORKS], env=env, capture_output=True, text=True, check=True)
    clean, loaded, refusal = done.stdout.splitlines()
    assert (clean, loaded) == ("True", "True")
    assert refusal.startswith("start_method='fork' with GPUs: this kernel has touched CUDA")


def test_stop_that_costs_ranks_their_memory_reports_the_reason_and_the_remedy() -> None:
    assert describe_restart([1], stopped_in_nccl=False).endswith("variables of earlier runs are gone on it")
    told = describe_restart([0, 1], stopped_in_nccl=True)
    assert told.startswith(
        "ranks 0, 1 had died and were restarted; variables of earlier runs are gone on them. With NCCL"
    )
    assert "run.stop(after_step=True)" in told


def test_notice_after_a_stop_with_nccl_names_what_would_have_kept_the_memory(capfd: pytest.CaptureFixture[str]) -> None:
    def hold() -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_IGN)
        report(begun=1)
        time.sleep(60)

    with Session(1) as session:
        session.run(int)
        tree = session._ranks.tree
        assert tree is not None
        object.__setattr__(tree.setup, "backend", "nccl")  # The rank has gloo's group; the kernel's words are tried.
        run = session.launch(hold)
        while not run.metrics:
            assert not run.wait(0.01), run.exception()
        run.stop()
    assert "With NCCL a stop ends each rank that waits for its GPU" in capfd.readouterr().out
