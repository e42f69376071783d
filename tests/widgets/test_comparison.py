"""Runs side by side: real ones, live, over, from their folders, and what is none."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher import ConfigError, Run, launch, open_run
from notebook_launcher.history.curves import Curves
from notebook_launcher.history.schema import MetricPoint
from notebook_launcher.widgets import compare
from notebook_launcher.widgets.runs.comparison import ComparedRun, Comparison
from tests.support.drawn_runs import Balanced, parse_svg, words_of

if TYPE_CHECKING:
    from pathlib import Path


def train(num_updates: int, steps: int) -> str:
    """Two metrics, one of them with a value that is not finite, and phases."""
    import torch

    from notebook_launcher import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    for step in range(num_updates):
        for _ in range(steps):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(2, 1)).mean())
        accelerator.log({"loss": 1 / (1 + step), "<b>odd</b>": float("nan") if step == 1 else step}, step=step)
    return "returned"


def train_with_pauses(pause: float) -> float:
    """Train as `train` does, with a pause outside of all phases; return the true samples per second of all ranks."""
    import time

    import torch

    from notebook_launcher import Accelerator

    accelerator = Accelerator(cpu=True)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(64, 1)), batch_size=4)
    model = torch.nn.Linear(1, 1)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    began = time.monotonic()
    for _ in range(2):
        for (inputs,) in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).mean())
                optimizer.step()
                optimizer.zero_grad()
            time.sleep(pause)
    return 128 / (time.monotonic() - began)


def fail() -> None:
    raise ValueError("<script>boom</script>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[Run]:
    """Two runs of two ranks that differ in two settings, and one that failed."""
    kept: dict[str, Any] = {"output": "none", "runs_folder": str(folder)}
    first = launch(train, 2, args=(4, 2), threads_per_process=1, env={"MODE": "hidden-value"}, **kept)
    second = launch(train, 2, args=(8, 1), **kept)
    failed = launch(fail, 1, **kept)
    return [run for run in (first, second, failed) if run.wait(50)]


def test_one_plot_holds_the_curves_of_all_runs(runs: list[Run]) -> None:
    comparison = compare(*runs)
    assert comparison.metrics == ["loss", "<b>odd</b>"]
    words = words_of(comparison.svg())
    assert {"A: train", "B: train", "C: fail", "loss", "<b>odd</b>"} <= set(words)
    assert any("NaN from step 1" in word for word in words)
    assert "loss" not in words_of(compare(*runs, metrics="<b>odd</b>").svg())


def test_settings_that_differ_are_listed(runs: list[Run]) -> None:
    comparison = compare(*runs[:2])
    assert comparison.settings["threads_per_process"] == {"A": "1", "B": "null"}
    assert comparison.settings["env['MODE']"] == {"A": "set"}
    assert "num_processes" not in comparison.settings
    assert compare(runs[0], runs[0]).settings == {}


def test_code_random_states_and_versions_that_differ_are_listed(runs: list[Run], folder: Path, tmp_path: Path) -> None:
    """Two runs with the same settings may differ in these alone."""
    moved = tmp_path / runs[1].id
    shutil.copytree(folder / runs[1].id, moved)
    environment = json.loads((moved / "environment.json").read_text())
    environment["packages"]["torch"] = "1.0"
    (moved / "environment.json").write_text(json.dumps(environment))
    (moved / "function.py").write_text("other code")
    assert compare(moved, open_run(folder / runs[1].id)).settings.keys() == {"code", "version of torch"}
    assert compare(runs[0], moved).settings["version of torch"]["B"] == "1.0"
    (moved / "random.json").write_text("{}")
    assert "random states" in compare(moved, runs[1]).settings


def test_speed_and_memory_are_measured_against_the_first(runs: list[Run]) -> None:
    comparison = compare(*runs)
    assert set(comparison.samples_per_second) == {"A", "B"}
    assert set(comparison.peak_memory) == set(comparison.seconds) == {"A", "B", "C"}
    assert comparison.seconds["A"] == runs[0].snapshot().seconds
    ratio = comparison.seconds["B"] / comparison.seconds["A"]
    assert f"{ratio:.2f}" in repr(comparison)


def test_speed_counts_the_time_outside_of_all_phases(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"output": "none", "runs_folder": str(tmp_path)}
    fast, slow = (launch(train_with_pauses, 2, args=(pause,), **kept) for pause in (0.005, 0.05))
    true = [run.result()[0] for run in (fast, slow)]
    comparison = compare(fast, slow, tmp_path / slow.id)
    # A busy machine delays the ends of the true time, too: within a half, where the phases alone gave a multiple.
    assert list(comparison.samples_per_second.values()) == pytest.approx([*true, true[1]], rel=0.5)
    for letter, run in zip("AB", (fast, slow), strict=True):
        shown = [rank.samples_per_second for rank in run.ranks]
        assert shown == pytest.approx([comparison.samples_per_second[letter]] * 2, rel=0.1)
    assert compare(tmp_path / slow.id).samples_per_second["A"] == comparison.samples_per_second["B"]


def test_notebook_shows_curves_and_tables(runs: list[Run]) -> None:
    bundle = compare(*runs)._repr_mimebundle_()
    page = Balanced(bundle["text/html"])
    for words in ("3 runs compared", "Settings that differ", "✓ done", "✗ failed", runs[1].id, "<script>boom"):
        assert words in page.text
    assert "hidden-value" not in "".join(bundle.values())
    assert 'alt="Curves of loss, &lt;b&gt;odd&lt;/b&gt;"' in bundle["text/html"]
    parse_svg(bundle["image/svg+xml"])
    assert bundle["text/plain"].startswith("3 runs compared\n")
    assert re.search(r"threads_per_process +1 +null", bundle["text/plain"])


def test_results_without_a_folder_are_compared_without_curves(runs: list[Run]) -> None:
    results = launch(print, 2, output="none", runs_folder=None).result()
    comparison = compare(runs[0], results)
    assert comparison.runs["B"].name == "results 2"
    assert comparison.runs["B"].state == "done"
    assert comparison.peak_memory["B"] == max(rank.peak_memory or 0 for rank in results.ranks) > 10**7
    assert comparison.settings == {}
    assert {"A: train", "B: results 2"} <= set(words_of(comparison.svg()))


def test_compare_accepts_ids_and_folders(runs: list[Run], folder: Path) -> None:
    comparison = compare(runs[0], folder / runs[1].id, str(folder / runs[1].id))
    assert [run.id for run in comparison.runs.values()] == [runs[0].id, runs[1].id, runs[1].id]
    assert comparison.samples_per_second["B"] == pytest.approx(compare(runs[1]).samples_per_second["A"])


@pytest.mark.parametrize(
    ("wrong", "options", "message"),
    [
        ([], {}, r"compare\(\) got no run\. Type compare\(run_a, run_b\)"),
        ([3], {}, r"argument 1 of compare\(\) is not a run: 3 \(int\)\. Pass what launch\(\) returned, or an id"),
        ([[1, 2]], {}, r"is not a run: \[1, 2\] \(list\)\. Pass the runs one by one: compare\(\*runs\)"),
        ([train], {}, r"is not a run: <function train .*\(function\)\. Pass the run, not the function"),
        ([Run], {}, r"is not a run: <class .*Run'> \(type\)\. Pass"),
        (0, {"metrics": "los"}, r"metrics='los': no run has reported 'los'\. Did you mean 'loss'\?"),
        (0, {"metrics": ["loss", "zzz"]}, r"no run has reported 'zzz'\. There are: 'loss', '<b>odd</b>'\."),
        (0, {"axis": "hours"}, r"axis='hours': there is no such axis\. Type one of 'step', 'time', 'epoch'"),
    ],
)
def test_what_is_no_run_metric_or_axis_is_refused(runs: list[Run], wrong: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compare(*([runs[0]] if wrong == 0 else wrong), **options)


def test_axis_that_a_recorded_run_does_not_have_is_refused(runs: list[Run], folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run has reported epochs\. Report them .*epoch=epoch"):
        open_run(folder / runs[0].id).svg(axis="epoch")


def test_comparison_is_drawn_by_time_and_parts_share_a_plot(runs: list[Run]) -> None:
    assert "time" in words_of(compare(*runs[:2], axis="time").svg())
    curves = []
    for _ in range(2):
        read = Curves()
        read.fold(
            MetricPoint(rank=0, step=step, time=float(step), values={"train/loss": 1 / (1 + step), "val/loss": 1.0})
            for step in range(3)
        )
        curves.append(read)
    compared = [ComparedRun(run.snapshot(), each) for run, each in zip(runs, curves, strict=False)]
    words = words_of(Comparison(compared, ["train/loss", "val/loss"]).svg())
    assert {"loss", "A train", "A val", "B train", "B val"} <= set(words)


def test_live_run_is_compared_as_it_is_now() -> None:
    def wait() -> None:
        import time

        from notebook_launcher import report, track

        report(loss=1.0)
        for _ in track(range(10**6)):
            time.sleep(0.01)

    run = launch(wait, 1, output="none")
    while not run.metrics:
        run.wait(0.01)
    comparison = compare(run)
    run.stop()
    assert comparison.runs["A"].state == "running"
    assert compare(run).runs["A"].state == "stopped"
    assert "running" in repr(comparison)
