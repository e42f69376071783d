"""Settings that change while a run trains: `run.set`, `run.pause`, `tunable`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import Accelerator, launch, notebook_launch, open_run, report, tunable
from notebook_launcher.errors import CallOrderError, RunStoppedError
from notebook_launcher.settings.changes import ACCELERATOR_SETTINGS, apply_change, check_change, read_wanted
from notebook_launcher.training.requests import scale_rates
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from notebook_launcher import Run


def train(num_updates: int = 0) -> list[tuple[Any, ...]]:
    """Train until a tunable says so; return the settings with which each update was made."""
    accelerator = Accelerator(gradient_accumulation_steps=2, max_grad_norm=1.0)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    scheduler = schedulers.LambdaLR(optimizer, lambda update: 0.5 if update >= 2 else 1.0)
    loader = DataLoader(TensorDataset(torch.randn(64, 2)), batch_size=1)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    made: list[tuple[Any, ...]] = []
    open_for = 0
    while not tunable("enough", False):
        for (inputs,) in loader:
            with accelerator.accumulate(model):
                temperature = tunable("temperature", 0.75)
                accelerator.backward((model(inputs) * temperature).square().mean())
                open_for += 1
                if accelerator.sync_gradients:
                    rate = optimizer.param_groups[0]["lr"]
                    steps = accelerator.gradient_accumulation_steps
                    made.append((rate, accelerator.max_grad_norm, steps, open_for, temperature))
                    open_for = 0
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            report(updates=len(made))
            if num_updates and len(made) == num_updates:
                return made
    return made


@pytest.fixture
def run() -> Iterator[Run]:
    run = launch(train, 2, output="none", monitor=False)
    until(lambda: len(run.metrics) > 6, run)
    yield run
    run.stop()


def test_change_comes_after_the_same_update_on_all_ranks(run: Run) -> None:
    run.set(lr="x0.5", max_grad_norm=None, gradient_accumulation_steps=4, temperature=0.5)
    until(lambda: len(run.changes) == 4, run)
    assert [(change.name, change.before, change.after) for change in run.changes] == [
        ("lr", 0.4, 0.2), ("max_grad_norm", 1.0, None), ("gradient_accumulation_steps", 2, 4),
        ("temperature", 0.75, 0.5),
    ]  # fmt: skip
    words = r"max_grad_norm='x2' is a factor, but max_grad_norm is none, and has no value\. Give a number"
    with pytest.raises(ValueError, match=words):
        run.set(lr="x0.5", max_grad_norm="x2")
    seen = run.metrics[-1].values["updates"]
    until(lambda: run.metrics[-1].values["updates"] > seen + 4, run)
    run.set(enough=1)
    results = run.result()
    assert results[0] == results[1]
    update = run.changes[0].update
    before, after = results[0][2:update], results[0][update:]
    assert set(before) == {(0.4, 1.0, 2, 2, 0.75)}
    # A window that ends with its loader holds fewer micro-batches; none is cut by the change.
    assert {(rate, norm, steps, temperature) for rate, norm, steps, _, temperature in after} == {(0.2, None, 4, 0.5)}
    assert after[0][3] == 4
    assert results.folder is not None
    assert open_run(results.folder.name).snapshot().changes == run.changes


def test_pause_holds_all_ranks_until_resume(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.pause()
    until(lambda: run.state == "paused", run)
    update = run.snapshot().ranks[0].metrics["updates"]
    run.set(lr=0.1)
    until(lambda: run.changes, run)
    run.set(lr="x2")
    until(lambda: len(run.changes) == 2, run)
    assert {change.update for change in run.changes} == {update}
    run.resume()
    until(lambda: run.state == "running" and run.metrics[-1].values["updates"] > update, run)
    run.set(enough=True)
    results = run.result()
    assert results[0] == results[1]
    assert {made[0] for made in results[0][int(update) :]} == {0.2}
    shown = capsys.readouterr().out
    assert f"paused after update {update:g}\n" in shown
    assert f"lr 0.4 → 0.1, after update {update:g}\n" in shown


def test_paused_run_saves_and_stops_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = launch(train, 2, output="none", monitor=False, timeout=60)
    until(lambda: len(run.metrics) > 6, run)
    run.pause()
    until(lambda: run.state == "paused", run)
    attempt = run._data.attempt
    assert attempt is not None
    assert attempt.next_deadline() is None, "the time limit does not count"
    update = run.snapshot().ranks[0].metrics["updates"]
    run.save()
    run.stop(after_step=True)
    assert (tmp_path / "checkpoints" / f"update_{update:g}").is_dir()
    with pytest.raises(RunStoppedError, match="the run was stopped before ranks 0, 1 returned"):
        run.result()


def test_run_without_an_update_cannot_change() -> None:
    run = launch(time.sleep, 1, args=(60,), output="none", monitor=False)
    with pytest.raises(CallOrderError, match="so nothing can be changed"):
        run.set(lr=1)
    run.stop()
    with pytest.raises(CallOrderError, match="nothing left to change"):
        run.pause()


OFFERED = {"temperature": 0.7, "layers": 3, "noisy": True}


@pytest.mark.parametrize(("name", "wanted", "words"), [
    ("lr", "half", r"lr='half' must be a number, more than 0, or a factor such as \"x0.5\"\."),
    ("lr", "x0", "more than 0, or a factor"),
    ("lr", None, "must be a number"),
    ("max_grad_norm", 0, "or None for no clipping"),
    ("gradient_accumulation_steps", "x2", "='x2' is a str; it must be a whole number"),
    ("gradient_accumulation_steps", np.int64(0), "=0 is too small; it must be 1 or more"),
    ("temprature", 1, "this run offers lr, max_grad_norm, gradient_accumulation_steps, layers, noisy, temperature"),
    ("temperature", None, r"temperature=None must be a number, or a factor such as \"x0.5\"\."),
    ("layers", 2.5, r"layers=2.5 must be a whole number, or a factor such as \"x0.5\"\."),
    ("noisy", 3, r"noisy=3 must be True or False\."),
])  # fmt: skip
def test_impossible_changes_are_refused(name: str, wanted: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_change(name, wanted, OFFERED)


@pytest.mark.parametrize(("name", "wanted", "expected"), [
    ("gradient_accumulation_steps", np.int64(4), 4), ("temperature", np.float32(0.25), 0.25),
    ("temperature", "x0", "x0"), ("layers", "x0.5", "x0.5"), ("noisy", False, False),
])  # fmt: skip
def test_values_of_the_offered_type_are_accepted(name: str, wanted: Any, expected: Any) -> None:
    change = check_change(name, wanted, OFFERED)
    assert (change, type(change)) == (expected, type(expected))


@pytest.mark.parametrize(("wanted", "after"), [(3, 3), ("x0.5", 2.0), (" *1e-1", 0.4), ("x 2", 8.0)])
def test_factors_multiply(wanted: Any, after: float) -> None:
    assert apply_change(4.0, check_change("lr", wanted, {})) == pytest.approx(after)


def test_every_setting_in_the_table_is_shown_and_can_be_changed() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))
    wanted = dict.fromkeys(ACCELERATOR_SETTINGS, 2)
    assert [after for _, after in accelerator._steering.change(wanted).values()] == [2, 2, 2]
    assert accelerator._steering.settings() == wanted


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "restarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 8),
    "one cycle": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.4, total_steps=60),
    "cyclic": lambda optimizer: schedulers.CyclicLR(optimizer, 0.1, 0.4, step_size_up=5),
    "lambda": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "warm-up": lambda optimizer: schedulers.SequentialLR(
        optimizer, [schedulers.LinearLR(optimizer, 0.1, total_iters=10), schedulers.ExponentialLR(optimizer, 0.9)], [10]
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in .scheduler.step:UserWarning")  # torch 2.6, of SequentialLR
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_keeps_its_shape(name: str) -> None:
    def rates(changed_after: int | None) -> list[float]:
        weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
        groups: list[dict[str, Any]] = [{"params": weights[:1]}, {"params": weights[1:], "lr": 0.02}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        scheduler = SCHEDULES[name](optimizer)
        seen = []
        for step in range(40):
            optimizer.step()
            scheduler.step()
            if step == changed_after:
                scale_rates(optimizer, [scheduler], 0.5)
            seen += [float(group["lr"]) for group in optimizer.param_groups]
        return seen

    before, after = rates(None), rates(12)
    assert after[:24] == before[:24]
    assert after[24:] == pytest.approx([rate * 0.5 for rate in before[24:]])


def test_rate_of_zero_and_a_limit_of_none_take_no_factor(capsys: pytest.CaptureFixture[str]) -> None:
    def rates(wanted: Any, *, scheduled: bool) -> list[float]:
        weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
        groups: list[dict[str, Any]] = [{"params": weights[:1]}, {"params": weights[1:], "lr": torch.tensor(0.0)}]
        accelerator = Accelerator(cpu=True)
        optimizer = accelerator.prepare(torch.optim.SGD(groups, lr=0.0))
        if scheduled:
            accelerator.prepare(schedulers.LambdaLR(optimizer.optimizer, float))
        accelerator._steering.change({"lr": wanted})
        return [float(group["lr"]) for group in optimizer.param_groups]

    def change() -> list[Any]:
        limit = Accelerator(cpu=True)._steering.change({"max_grad_norm": "x0.5"})
        return [rates("x2", scheduled=False), rates(0.25, scheduled=True), limit]

    assert rates(0.25, scheduled=False) == [0.25, 0.25]
    assert notebook_launch(change, 1)[0] == [[0, 0], [0, 0], {"max_grad_norm": (None, None)}]
    shown = capsys.readouterr().out
    assert "lr='x2' changed nothing: the rate is 0 at this update, as at the start of a warm-up" in shown
    assert "lr=0.25 changed nothing" in shown
    assert "max_grad_norm='x0.5' changed nothing: gradients are not clipped" in shown


def test_tunable_is_its_default_outside_a_run_and_needs_a_name_of_its_own() -> None:
    assert tunable("temperature", 0.75) == 0.75
    for name in ("lr", "a b"):
        with pytest.raises(ValueError, match=r"the name must be a keyword for run\.set"):
            tunable(name, 1.0)


@pytest.mark.parametrize(
    ("text", "wanted"), [("1e-3", 0.001), (" 4 ", 4), ("None", None), ("on", True), ("OFF", False), (" x0.5", "x0.5")]
)
def test_text_of_a_field_is_read_as_a_value(text: str, wanted: Any) -> None:
    assert read_wanted(text) == wanted
    assert type(read_wanted(text)) is type(wanted)
