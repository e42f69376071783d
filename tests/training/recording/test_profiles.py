"""Profiles: of a running training by `run.profile(...)`, and the profiler that an Accelerator builds."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from notebook_launcher import Accelerator, launch, report, tunable
from notebook_launcher.errors import CallOrderError, NoSuchRankError
from notebook_launcher.kernel.inspection.profiles import Profile
from notebook_launcher.messaging import messages
from notebook_launcher.training.plugins import ProfileKwargs
from notebook_launcher.training.recording import profiling
from notebook_launcher.training.recording.profiling import UpdateProfile, build_profiler
from tests.support.toy_training import micro_batch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from notebook_launcher import Run
    from tests.support.toy_training import Sessions


pytestmark = pytest.mark.usefixtures("compiler_cache")


def train() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    left = 10**9
    while left:
        with micro_batch(accelerator, optimizer, model) as backward:
            with torch.profiler.record_function("my forward"):
                loss = model(torch.ones(4, 2)).square().mean()
            backward(loss)
        if accelerator.sync_gradients:
            left = min(left - 1, int(tunable("left", 10**9)))
            report(loss=loss)
        if tunable("profiled", False):
            with accelerator.profile():
                while tunable("profiled", False):
                    with micro_batch(accelerator, optimizer, model) as backward:
                        backward(model(torch.ones(4, 2)).mean())


@pytest.fixture
def run() -> Iterator[Run]:
    run = launch(train, 2, output="none", monitor=False)
    while not run.metrics or run._data.live.settings.of_accelerator == {}:
        run.wait(0.01)
    yield run
    run.stop()


def test_profile_lasts_as_many_updates_on_each_chosen_rank(run: Run) -> None:
    folder = Path(os.environ["NOTEBOOK_LAUNCHER_RUNS"]) / run.id
    while not folder.exists():
        run.wait(0.05)
    profile = run.profile(3, ranks=(1, 0))
    assert [(profiled.rank, profiled.updates, profiled.problem) for profiled in profile] == [(0, 3, ""), (1, 3, "")]
    assert profile[0].first_update == profile[1].first_update
    # Two micro-batches for each update.
    calls = {row[0]: row[1] for row in profile[0].operators}
    assert calls["my forward"] == 6
    assert calls["Optimizer.step#SGD.step"] == 3
    for rank, path in profile.traces.items():
        assert path.name == f"trace_rank{rank}_update{profile[rank].first_update}.json.gz"
        with gzip.open(path) as file:
            names = [event["name"] for event in json.load(file)["traceEvents"]]
        assert names.count("my forward") == 6
    assert "rank 0: 3 updates from update " in profile.table
    assert "my forward" in profile.table
    html = profile._repr_html_()
    assert f'{profile.traces[1].name}" download' in html
    again = run.profile(1)
    assert [profiled.rank for profiled in again] == [0]
    assert again[0].first_update >= profile[0].first_update + 3
    assert not [log for log in map(run.logs, range(2)) if "USDT" in log or "Warning" in log]


def test_profile_of_the_function_itself_and_its_end_cut_profiles_short(run: Run) -> None:
    run.set(profiled=True)
    while not run.changes:
        run.wait(0.01)
    with pytest.raises(CallOrderError, match=r"torch\.profiler is active in this rank already"):
        run.profile()
    run.set(profiled=False)
    while len(run.changes) < 2:
        run.wait(0.01)
    assert run.profile(1)[0].updates == 1
    run.set(left=60)
    profile = run.profile(100, ranks=[1])
    assert 0 < profile[0].updates < 100
    run.wait()
    with pytest.raises(CallOrderError, match="there is nothing left to profile"):
        run.profile()


def test_run_without_an_update_has_nothing_to_profile() -> None:
    run = launch(time.sleep, 1, args=(60,), output="none", monitor=False)
    with pytest.raises(CallOrderError, match="so there is nothing to profile"):
        run.profile()
    for updates in (0, 101, 2.0, True):
        with pytest.raises(ValueError, match="updates must be a whole number from 1 to 100"):
            run.profile(updates)  # type: ignore[arg-type]
    for ranks in ((1,), (-1,), (0, True)):
        with pytest.raises(NoSuchRankError, match=r"profile\(ranks=.*: there is no rank .*: this run has rank 0 alone"):
            run.profile(1, ranks=ranks)
    for nothing in ((), 0):
        with pytest.raises(ValueError, match=r"profile\(ranks=.*\): ranks must be a list of .* ranks=\[0\]"):
            run.profile(1, ranks=nothing)  # type: ignore[arg-type]
    run.stop()


def work() -> None:
    torch.ones(8, 8) @ torch.ones(8, 8)


def profile_here(folder: Path | None) -> Any:
    order = messages.ProfileOrder(ranks=(0,), updates=1, folder=None if folder is None else str(folder))
    profile = UpdateProfile(0, order, 5)
    work()
    return profile.finish(6)


def test_trace_is_bounded_and_needs_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = profile_here(None)
    assert (record.trace, record.problem) == ("", "no trace was written: the run keeps no folder (runs_folder=None)")
    assert "aten::mm" in [row[0] for row in record.operators]
    monkeypatch.setattr(profiling, "MAX_TRACE", 10)
    record = profile_here(tmp_path)
    assert "was not kept" in record.problem
    assert list(tmp_path.iterdir()) == []
    assert record.problem in Profile([record]).table
    assert record.problem in Profile([record])._repr_html_()


# The profiler that an Accelerator builds.


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


def test_each_rank_writes_its_trace(ranks: Sessions, tmp_path: Path) -> None:
    def profile_a_rank() -> None:
        with build_profiler(ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path / "traces"))):
            work()

    ranks.run(2, profile_a_rank)
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
