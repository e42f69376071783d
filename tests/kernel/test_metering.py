"""Memory, load and GPUs of ranks over time: in a live run, its folder and its page; NVML is a library of our own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from notebook_launcher import launch, open_run
from notebook_launcher.history.schema import RankUsage
from notebook_launcher.kernel.metering import MAX_SAMPLES, MIN_SAMPLES, UsageMeter, halve
from notebook_launcher.widgets.monitor.feed import Feed
from tests.support.compiled_libraries import NVML, compile_library, needs_compiler
from tests.support.kernels import ROOT

if TYPE_CHECKING:
    from pathlib import Path


PROGRAM = """
import ctypes, threading, time
from notebook_launcher import launch
from notebook_launcher.kernel import metering
from notebook_launcher.machine import devices
left_open = ctypes.CDLL("libnvidia-ml.so.1").num_left_open
metering.GPU_INTERVAL = 60

gpus = devices.detect().gpus
print([(gpu.index, gpu.name, gpu.total_memory, gpu.free_memory, gpu.capability) for gpu in gpus], left_open())

def wait():
    from notebook_launcher import track
    for _ in track(range(10**6)): time.sleep(0.01)

run = launch(wait, 3, devices="cpu", output="none")
run._data.gpus = metering.GpuMeter((1, 0))  # This torch may have no CUDA: then no rank gets one by itself.
first = run.snapshot().ranks
again = run.snapshot().ranks
run._data.gpus._looked_at -= 60
later = run.snapshot().ranks
print([(rank.gpu_memory, rank.gpu_utilization) for rank in first], [rank.gpu_memory for rank in again])
print([(rank.gpu_memory, rank.gpu_utilization) for rank in later], left_open())
run.stop()
print([(rank.gpu_memory, rank.gpu_utilization) for rank in run.ranks], left_open())
"""


def output_of(program: str, libraries: Path) -> str:
    env = {**os.environ, "LD_LIBRARY_PATH": str(libraries), "PYTHONPATH": str(ROOT), "NOTEBOOK_LAUNCHER_RUNS": "off"}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_compiler
def test_meter_reads_memory_and_utilisation_of_each_ranks_gpu(tmp_path: Path) -> None:
    compile_library(tmp_path, "libnvidia-ml.so.1", NVML)
    machine, first, later, over = output_of(PROGRAM, tmp_path).splitlines()
    gb = 10**9
    assert machine == f"{[(at, 'Pretend', 80 * gb, 79 * gb, (9, 0)) for at in (0, 1)]} 0"
    # The launch has looked once more. Ranks take the GPUs in turn, and nobody looks twice within the interval.
    assert first == f"{[(3 * gb, None), (3 * gb, 0.93), (3 * gb, None)]} {[3 * gb] * 3}"
    assert later == f"{[(4 * gb, None), (4 * gb, 0.93), (4 * gb, None)]} 1"
    assert over == f"{[(4 * gb, None)] * 3} 0"


def test_meter_reads_nothing_without_nvml(tmp_path: Path) -> None:
    program = (
        "from notebook_launcher.kernel.metering import GpuMeter; meter = GpuMeter((0,)); "
        "print(meter.read(0)); meter.close(); print(meter.read(0))"
    )
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    assert output_of(program, tmp_path) == "GpuReading(memory=None, utilization=None)\n" * 2


def keep_one_processor_busy(seconds: float) -> None:
    import time

    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def test_memory_and_load_of_a_run_are_sampled_kept_and_sent_to_the_page(tmp_path: Path) -> None:
    run = launch(keep_one_processor_busy, 1, args=(3.4,), runs_folder=str(tmp_path), output="none", monitor=False)
    run.result(50)
    usage = run.snapshot().usage[0]
    assert len(usage.times) >= 3
    assert usage.times[0] >= 1.0
    assert all(memory is not None and memory > 10**7 for memory in usage.memory)
    assert usage.load[0] is None
    assert all(load is not None and 0.0 < load < 2.0 for load in usage.load[1:])
    kept = open_run(tmp_path / run.id).snapshot().usage[0]
    assert kept.memory == usage.memory
    assert kept.load == tuple(load if load is None else round(load, 3) for load in usage.load)
    sent = {plot["title"]: plot for plot in Feed(run).reset()["usage"]}
    assert list(sent) == ["memory, GB", "load, processors"]
    assert len(sent["memory, GB"]["lines"][0]["y"]) == len(usage.times)


def test_samples_of_a_long_run_are_bounded_and_keep_their_peaks() -> None:
    usage = RankUsage(
        times=(1.0, 2.0, 3.0),
        memory=(5, 7, 6),
        load=(None, 1.0, 0.5),
        gpu_memory=(None, None, None),
        gpu_utilization=(0.5, 1.0, 0.0),
    )
    assert halve(usage) == RankUsage(
        times=(2.0, 3.0), memory=(7, 6), load=(1.0, 0.5), gpu_memory=(None, None), gpu_utilization=(0.75, 0.0)
    )
    assert UsageMeter(0.0, 1).room == MAX_SAMPLES
    assert UsageMeter(0.0, 1000).room == MIN_SAMPLES
