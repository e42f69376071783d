"""Checkpoints, settings, pauses and stops at the same update of ranks whose boards are on two nodes."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
import torch

from notebook_launcher import Accelerator, Session, launch, report, tunable
from notebook_launcher.engines.cluster.command_engines import Commands
from notebook_launcher.errors import CallOrderError
from tests.engines.options import QUIET
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from notebook_launcher import Run


@pytest.fixture(scope="module")
def engine() -> Iterator[Commands]:
    with Commands([[], ["env"]]) as engine:
        engine.look()
        yield engine


def train(folder: str) -> list[float]:
    """Train until a tunable says so; return the learning rate of each update."""
    os.chdir(folder)
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    rates: list[float] = []
    while not tunable("enough", False):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).square().mean())
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
        report(updates=len(rates))
    return rates


def begun(run: Run) -> Run:
    """Wait for the first curve, with which the kernel knows that the ranks can be asked."""
    until(lambda: len(run.metrics) > 0, run)
    return run


def last_updates(run: Run) -> list[float]:
    return [max(point.values["updates"] for point in run.metrics if point.rank == rank) for rank in range(3)]


def test_requests_come_after_the_same_update_on_all_nodes_in_each_call(engine: Commands, tmp_path: Path) -> None:
    with Session(3, engine=engine, **QUIET) as session:
        run = begun(session.launch(train, args=(str(tmp_path),)))
        run.set(lr=0.25)
        run.save()
        until(lambda: len(list(tmp_path.glob("checkpoints/update_*"))) == 1, run)
        run.save()
        run.set(enough=1)
        assert not isinstance(run.exception(60), Exception)
        first, *others = run.result()
        assert others == [first, first]
        assert (first[0], first[-1]) == (0.5, 0.25)
        for folder in tmp_path.glob("checkpoints/update_*"):
            assert len(list(folder.glob("random_states_*"))) == 3

        run = begun(session.launch(train, args=(str(tmp_path),)))
        run.pause()
        until(lambda: run.state == "paused", run)
        run.resume()
        until(lambda: run.state == "running", run)
        assert run.stop(after_step=True) == "ask"
        assert len(set(last_updates(run))) == 1


def test_save_over_nodes_without_an_accelerator_is_refused(engine: Commands) -> None:
    run = launch(wait, 2, engine=engine, **QUIET)
    until(lambda: len(run.metrics) == 2, run)
    with pytest.raises(
        CallOrderError, match="no Accelerator has made an update in this run yet, so it cannot be saved"
    ):
        run.save()
    run.stop()


def wait() -> None:
    report(up=1)
    time.sleep(60)
