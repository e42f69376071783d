"""A running launch is asked for a checkpoint, or to stop after its step, and says what its ranks do."""

from __future__ import annotations

import builtins
import functools
import math
import os
import re
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import Accelerator, ProjectConfiguration, Session, launch, notebook_launch, report, track
from notebook_launcher.errors import RunStoppedError
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from notebook_launcher import Run

LENGTH, NUM_UPDATES = 24, 250


def started(run: Run) -> Run:
    """Return the run once its rank 0 has reported a few times."""
    until(lambda: len(run.metrics) > 10, run)
    return run


def prepare(accelerator: Accelerator, lr: float = 0.1) -> Any:
    model = torch.nn.Linear(1, 1)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))


def train(num_updates: int, *, checkpoint: str | None = None, names: bool = False) -> Any:
    """Train, from a checkpoint if there is one; return the weights."""
    configuration = ProjectConfiguration(project_dir=".", automatic_checkpoint_naming=names)
    accelerator = Accelerator(gradient_accumulation_steps=2, project_config=configuration)
    torch.manual_seed(0)
    data = torch.randn(LENGTH, 2)
    loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=1, shuffle=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.5)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    done = 0
    if checkpoint is not None:
        accelerator.load_state(checkpoint)
        done = int(checkpoint.rpartition("_")[2])
    while True:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(inputs) - targets).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            done += accelerator.sync_gradients
            report(done=done, rate=scheduler.get_last_lr()[0])
            if done == num_updates:
                return accelerator.unwrap_model(model).weight.detach()


def test_each_request_is_answered_once_and_training_resumes_from_the_update_that_was_saved(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)

    def saved() -> list[Path]:
        return list(tmp_path.glob("checkpoints/update_*"))

    def are_there(number: int) -> bool:
        return len(saved()) == number

    run = launch(train, 2, args=(NUM_UPDATES,), output="rank0")
    for number in (1, 2):
        until(lambda: run.snapshot().ranks[0].step, run)
        run.save()
        until(functools.partial(are_there, number), run)
    whole = run.result()
    said = re.findall(r"saved \S*/checkpoints/update_(\d+), after update \1\n", capsys.readouterr().out)
    assert sorted(f"update_{number}" for number in said) == sorted(path.name for path in saved())
    checkpoint = {"checkpoint": str(saved()[0])}
    rest = notebook_launch(train, 2, args=(NUM_UPDATES,), kwargs=checkpoint, output="none")
    assert all(torch.equal(*weights) for weights in zip(rest, whole, strict=True))


def test_stop_after_the_step_waits_for_it(tmp_path):
    marks = tmp_path / "marks"

    def loop() -> None:
        for number in track(range(10**9)):
            os.write(1, b"begun\n")
            while number == 3 and not marks.exists():
                time.sleep(0.001)
            os.write(1, b"ended\n")

    run = launch(loop, 1, output="none")
    until(lambda: run.logs(0).count("begun") == 4, run)
    run.stop(after_step=True, wait=False)
    assert run.state == "stopping"
    assert not run.wait(0.7)  # Longer than any rung below SIGKILL gives.
    marks.touch()
    with pytest.raises(RunStoppedError, match="the run was stopped before rank 0 returned"):
        run.result()
    assert (run.logs(0).count("begun"), run.logs(0).count("ended")) == (4, 4)
    assert run.stop() == "ask"


@pytest.mark.parametrize(("num_processes", "loops"), [(3, "prepared"), (2, "reporting")])
def test_all_ranks_stop_after_the_same_update(tmp_path, num_processes, loops):
    def loop() -> None:
        accelerator = Accelerator(gradient_accumulation_steps=2)
        data, (model, optimizer) = DataLoader(TensorDataset(torch.ones(64, 1))), prepare(accelerator, lr=1e-6)
        if loops == "prepared":
            data = accelerator.prepare(data)
        rank, num_updates = accelerator.process_index, 0
        try:
            while True:
                for number, (inputs,) in enumerate(data, 1):
                    if loops == "prepared":
                        with accelerator.accumulate(model):
                            accelerator.backward(model(inputs).sum())
                            optimizer.step()
                            optimizer.zero_grad()
                        num_updates += accelerator.sync_gradients
                    elif number % 2:
                        with accelerator.no_sync(model):
                            accelerator.backward(model(inputs).sum())
                    else:
                        accelerator.backward(model(inputs).sum())
                        optimizer.step()
                        optimizer.zero_grad()
                        num_updates += 1
                    time.sleep(0.002 * rank)  # One rank is ahead of the other in every window.
                    report(num_updates=num_updates)
        except BaseException as error:
            # Not one that waited in a reduction for a peer that had stopped before it.
            weight = accelerator.unwrap_model(model).weight.item()
            (tmp_path / f"{rank}").write_text(f"{type(error).__name__} after {num_updates} updates: {weight!r}")
            raise

    run = started(launch(loop, num_processes, output="none"))
    assert run.stop(after_step=True) == "ask"
    assert {rank.state for rank in run.ranks} == {"stopped"}
    assert run.snapshot().failures == ()
    ends = {path.read_text() for path in tmp_path.iterdir()}
    assert len(ends) == 1, ends
    assert ends.pop().startswith("RunStopped after ")


def test_checkpoint_with_an_automatic_name_is_saved_before_a_stop_after_the_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = started(launch(train, 2, args=(10**9,), kwargs={"names": True}, output="none"))
    run.save()
    assert run.stop(after_step=True) == "ask"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_0"]


def test_accelerator_that_a_session_keeps_trains_on_after_a_stop():
    def keep() -> None:
        accelerator = Accelerator()
        builtins.kept = accelerator, *prepare(accelerator)  # type: ignore[attr-defined]

    def train_on(num_updates: int) -> int:
        accelerator, model, optimizer = builtins.kept  # type: ignore[attr-defined]
        for number in track(range(num_updates)):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                optimizer.zero_grad()
            report(number=number)
        return num_updates

    # One rank: several get a new process group after a stop, to which a model that was kept does not belong.
    with Session(1, output="none") as session:
        session.run(keep)
        for _ in range(2):
            run = started(session.launch(train_on, args=(10**9,)))
            assert run.stop(after_step=True) == "ask"
            assert {rank.state for rank in run.ranks} == {"stopped"}
            try:
                assert list(session.run(train_on, args=(3,))) == [3]
            except KeyboardInterrupt as error:  # It would end all tests.
                pytest.fail(f"the next run was stopped too: {error!r}")


def test_ranks_without_another_update_stop_at_their_own_steps():
    def evaluate() -> None:
        accelerator = Accelerator()
        model, optimizer = prepare(accelerator)
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        for number in track(range(10**9)):
            time.sleep(0.001)
            report(number=number)

    run = started(launch(evaluate, 2, output="none"))
    assert run.stop(after_step=True) == "ask"
    assert {rank.state for rank in run.ranks} == {"stopped"}


def test_ranks_that_never_look_are_stopped_as_always():
    def deaf() -> None:
        print("here", flush=True)
        time.sleep(60)

    run = launch(deaf, 1, output="none")
    until(lambda: "here" in run.logs(0), run)
    assert run.stop(after_step=True) == "interrupt"


def reduce_with_the_last(mark: Path) -> None:
    accelerator = Accelerator()
    model, optimizer = prepare(accelerator)
    if accelerator.is_last_process:
        while not mark.exists():
            time.sleep(0.001)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()


def save_slowly(mark: Path) -> None:
    accelerator = Accelerator(project_dir=mark.parent)

    def hook(*_: object) -> None:
        while not mark.exists():
            time.sleep(0.001)

    accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.register_save_state_pre_hook(hook)
    accelerator.save_state(mark.parent / "state")
    dist.barrier()


@pytest.mark.parametrize(("function", "state"), [(reduce_with_the_last, "waiting"), (save_slowly, "saving")])
def test_run_shows_that_a_rank_waits_or_saves(tmp_path, function, state):
    mark = tmp_path / "mark"
    run = launch(function, 2, args=(mark,), output="none")
    until(lambda: run.ranks[0].state == state, run)
    mark.touch()
    run.result()
    assert [rank.state for rank in run.ranks] == ["returned", "returned"]


def test_first_loss_that_is_not_finite_is_named_once(capsys):
    """With the rank, the update and the batch; the ranks that get it from there are not named."""

    def loop() -> None:
        accelerator = Accelerator(gradient_accumulation_steps=2)
        rows, (model, optimizer) = torch.ones(24, 1), prepare(accelerator)
        rows[8] = torch.inf
        loader = accelerator.prepare(DataLoader(TensorDataset(rows), batch_size=2))
        for (batch,) in loader:
            with accelerator.accumulate(model):
                loss = model(batch).abs().mean()
                accelerator.backward(loss)
                report(loss=loss)
                optimizer.step()
                optimizer.zero_grad()

    notebook_launch(loop, 2, output="rank0")
    said = capsys.readouterr().out
    assert "rank 0: the loss is inf in update 2, micro-batch 1 of its window, batch 3 of the data loader" in said, said
    assert said.count("the loss is") == 1


def test_reported_loss_that_is_not_finite_is_named(capsys):
    def loop() -> None:
        report(step=3, accuracy=math.nan)
        report(step=4, loss=math.inf)

    notebook_launch(loop, 1)
    said = capsys.readouterr().out
    assert said.count("the loss is") == 1
    assert "rank 0: the loss is inf in report(loss=...) of step 4" in said
