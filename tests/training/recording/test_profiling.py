"""The profiler that an Accelerator builds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from notebook_launcher import notebook_launch
from notebook_launcher.training.plugins import ProfileKwargs
from notebook_launcher.training.recording.profiling import build_profiler

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("compiler_cache")


def work() -> None:
    torch.ones(8, 8) @ torch.ones(8, 8)


def operators(file: Path) -> list[str]:
    return [event["name"] for event in json.loads(file.read_text())["traceEvents"] if event.get("cat") == "cpu_op"]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.11, at the first profile
def test_profile_writes_no_file_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with build_profiler(ProfileKwargs(activities=["CPU"], record_shapes=True)) as profile:
        work()
    (found,) = [event for event in profile.key_averages(group_by_input_shape=True) if event.key == "aten::mm"]
    assert found.input_shapes == [[8, 8], [8, 8]]
    assert list(tmp_path.iterdir()) == []


def profile_a_rank(folder: str) -> None:
    from notebook_launcher.training.plugins import ProfileKwargs
    from notebook_launcher.training.recording.profiling import build_profiler

    with build_profiler(ProfileKwargs(activities=["cpu"], output_trace_dir=folder)):
        work()


def test_each_rank_writes_its_trace(tmp_path: Path) -> None:
    notebook_launch(profile_a_rank, 2, args=(str(tmp_path / "traces"),), output="none")
    for rank in range(2):
        assert "aten::mm" in operators(tmp_path / "traces" / f"profile_{rank}.json")


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events at the end of each cycle")
def test_schedule_leaves_its_newest_whole_cycle(tmp_path: Path) -> None:
    ready: list[Any] = []
    options = ProfileKwargs(
        activities=[ProfilerActivity.CPU],  # type: ignore[list-item] # torch's own are taken too
        schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 0},
        on_trace_ready=ready.append,
        output_trace_dir=str(tmp_path),
    )
    with build_profiler(options) as profile:
        for step in range(5):  # The fifth waits for the next cycle, of which nothing is recorded.
            torch.full((step + 1,), 0.0)
            profile.step()
    assert ready == [profile]
    assert operators(tmp_path / "profile_0.json").count("aten::full") == 2


def test_unknown_activity_is_refused() -> None:
    with pytest.raises(ValueError, match=r"activities='cdua' is unknown. Did you mean 'cuda'\?"):
        build_profiler(ProfileKwargs(activities=["cdua"]))
