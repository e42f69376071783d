"""Runs that go on from their newest checkpoint after a failure, and that save themselves when they are preempted."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from notebook_launcher import (
    Accelerator,
    CallOrderError,
    ProjectConfiguration,
    RunStoppedError,
    Session,
    launch,
    notebook_launch,
    open_run,
    report,
)
from notebook_launcher.training.checkpoints.folders import newest_of
from tests.detached.hosts import host_of
from tests.support.waiting import until

KILLED_AFTER = 9
"""Updates of the first attempt: the newest checkpoint is two updates older, in the middle of the second epoch."""


class Progress:
    """The epoch, and the data that were seen; both belong to the checkpoint."""

    def __init__(self) -> None:
        self.epoch = 0
        self.seen: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.seen = state["epoch"], list(state["seen"])


def train(folder: str, killed_after: int | None, gate: str = "") -> tuple[list[float], list[list[float]]]:
    """Three epochs of six updates with dropout and shuffled data; a checkpoint after each seventh update."""
    accelerator = Accelerator(cpu=True, project_dir=folder)
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.4), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    data: Any = torch.arange(24.0).view(-1, 1)
    loader: Any = DataLoader(data, batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    is_resumed = accelerator.load_state() is not None
    assert is_resumed == (os.environ["TORCHELASTIC_RESTART_COUNT"] != "0")
    while progress.epoch < 3:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            progress.seen += batch.flatten().tolist()
            num_updates = len(progress.seen) // 2
            report(loss=1.0)
            while gate and num_updates == 3 and not Path(gate).exists():
                time.sleep(0.02)
            if num_updates % 7 == 0:
                accelerator.save_state(Path(folder) / f"at_{num_updates}")
            if num_updates == killed_after and not is_resumed and accelerator.process_index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        progress.epoch += 1
    return progress.seen, [tensor.flatten().tolist() for tensor in model.parameters()]


def test_a_resumed_run_equals_one_that_was_never_interrupted(home: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"output": "none", "seed": 5, "resume": "checkpoint", "max_restarts": 1}
    through = notebook_launch(train, 2, args=(str(tmp_path / "a"), None), **options)
    resumed = notebook_launch(train, 2, args=(str(tmp_path / "b"), KILLED_AFTER), **options)
    assert (through.restarts, resumed.restarts) == (0, 1)
    assert resumed[0] == through[0]  # What was seen belongs to the checkpoint, which keeps rank 0's.
    assert resumed[1][1] == through[1][1]
    assert len(through[0][0]) == 36
    assert resumed.folder is not None
    steps = [point.step for point in open_run(resumed.folder.name).metrics if point.rank == 0]
    assert steps[-11:] == list(range(8, 19))  # The count goes on after the checkpoint of update 7.


@pytest.mark.parametrize("in_session", [False, True], ids=["run", "session"])
def test_a_preempted_host_saves_what_it_trains_and_stops(home: Path, tmp_path: Path, in_session: bool) -> None:
    folder, gate = tmp_path / "c", tmp_path / "gate"
    options: dict[str, Any] = {"detached": True, "resume": "checkpoint", "output": "none", "monitor": False}
    args = (str(folder), None, str(gate))
    session = Session(1, **options) if in_session else None
    run: Any = session.launch(train, args=args) if session else launch(train, 1, args=args, **options)
    until(lambda: run.metrics and run.metrics[-1].step == 3)
    host = host_of(run)
    os.kill(host.pid, signal.SIGTERM)
    until(lambda: run.state == "stopping")
    gate.touch()
    with pytest.raises(RunStoppedError, match="the run was stopped before rank 0 returned"):
        run.result()
    (saved,) = (folder / "checkpoints").iterdir()
    assert run.state == "stopped"
    assert newest_of([str(saved), str(folder / "removed")]) == saved
    host.wait(60)
    if session:
        with pytest.raises(CallOrderError, match="closed"):
            session.run(os.getpid)


def save_and_die(folder: str, victim: int, limit: int | None) -> tuple[int, int]:
    """Save after each of 8 updates; one rank dies at the moment when the fourth checkpoint is in its place."""
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=limit)
    accelerator, progress = Accelerator(cpu=True, project_config=project, check_ranks=False), Progress()
    accelerator.prepare(torch.nn.Linear(4, 1))
    accelerator.register_for_checkpointing(progress)
    loaded = accelerator.load_state()
    if loaded is None and accelerator.process_index == victim:

        def die() -> None:
            while not Path(folder, "checkpoints", "checkpoint_3").is_dir():
                pass
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=die, daemon=True).start()
    while progress.epoch < 8:
        progress.epoch += 1
        accelerator.save_state()
    return int(loaded.name.rpartition("_")[2]) if loaded is not None else -1, progress.epoch


@pytest.mark.parametrize(("victim", "limit"), [(0, None), (1, 1)])
def test_checkpoint_that_was_in_its_place_when_a_rank_died_is_resumed(tmp_path, victim, limit):
    options: dict[str, Any] = {"devices": "cpu", "output": "none", "max_restarts": 1, "resume": "checkpoint"}
    results = notebook_launch(save_and_die, 2, args=(str(tmp_path), victim, limit), **options)
    assert results.restarts == 1
    (loaded, epochs), _ = results
    assert loaded >= 3
    assert epochs == 8
