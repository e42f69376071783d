"""Memory and load of ranks over time: in a live run, in its folder and its page, and in a bounded number of samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher import launch, open_run
from notebook_launcher.history.schema import RankUsage
from notebook_launcher.kernel.metering import MAX_SAMPLES, MIN_SAMPLES, UsageMeter, halve
from notebook_launcher.widgets.monitor.feed import Feed

if TYPE_CHECKING:
    from pathlib import Path


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
