"""Runs that lose a node for good: they go on with the ranks of the nodes that are left, or say why not."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from notebook_launcher import Accelerator, Commands, ConfigError, launch, open_run, report
from tests.support.waiting import until

if TYPE_CHECKING:
    from notebook_launcher.kernel.run.handle import Run

AGENT = "notebook_launcher.engines.cluster.agent"
pytestmark = pytest.mark.timeout(500)
QUIET: dict[str, Any] = {"output": "none", "monitor": False, "threads_per_process": 1, "max_restarts": 1}
NUM_SAMPLES = 24
SAVED_AFTER = 2
"""Batches after which the first attempt saves; it takes one more, whose samples must come again."""


class Progress:
    """The epoch, which belongs to the checkpoint."""

    epoch = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


def train(folder: str) -> tuple[str, str | None, list[tuple[int, float]]]:
    """Two epochs; the first attempt saves in the first one, takes another batch, and waits until a node is lost."""
    accelerator = Accelerator(cpu=True, project_dir=folder)
    # No model, with which each rank would import torch's compiler.
    data: Any = torch.arange(float(NUM_SAMPLES)).view(-1, 1)
    loader = accelerator.prepare(DataLoader(data, batch_size=1, shuffle=True))
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    loaded = accelerator.load_state()
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    seen: list[tuple[int, float]] = []
    while progress.epoch < 2:
        for batch in loader:
            seen.append((progress.epoch, batch.item()))
            if is_first and len(seen) == SAVED_AFTER:
                accelerator.save_state(Path(folder) / "first")
                (Path(folder) / f"seen-{accelerator.process_index}").write_text(json.dumps(seen))
            report(step=len(seen), loss=1.0)
            while is_first and len(seen) > SAVED_AFTER:
                time.sleep(0.05)
        progress.epoch += 1
    return os.environ["WORLD_SIZE"], None if loaded is None else loaded.name, seen


def wait_for_a_loss() -> str:
    report(up=1)
    while os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(0.05)
    return os.environ["WORLD_SIZE"]


def mortal(gone: Path) -> list[str]:
    """Return the command of a node that cannot be reached any more once a file is there."""
    return ["bash", "-c", f'if [ -e "{gone}" ]; then echo no route to host >&2; exit 255; fi; exec "$@"', "node"]


def lose_node_of(run: Run, rank: int, gone: Path) -> None:
    """Kill the agent of a rank's node, and let it never come back."""
    gone.touch()
    pid = run.ranks[rank].pid
    assert pid is not None
    agent = next(parent for parent in psutil.Process(pid).parents() if AGENT in parent.cmdline())
    agent.kill()


def agents() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if AGENT in process.cmdline()]


@pytest.mark.slow
def test_resumed_run_continues_with_the_ranks_of_the_other_node(
    home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    with Commands([mortal(gone), []]) as engine:  # The node of ranks 0 and 1 and of the store is lost.
        options: dict[str, Any] = {**QUIET, "output": "all", "resume": "checkpoint", "engine": engine, "seed": 5}
        run = launch(train, 3, args=(str(tmp_path),), **options)
        until(lambda: len([point for point in run.metrics if point.step == SAVED_AFTER + 1]) == 3, run)
        lose_node_of(run, 0, gone)
        results = run.result()
    assert not agents()
    assert [value[:2] for value in results] == [("1", "first")]
    before = [tuple(entry) for path in tmp_path.glob("seen-*") for entry in json.loads(path.read_text())]
    assert len(before) == 3 * SAVED_AFTER
    seen = [*before, *(entry for value in results for entry in value[2])]
    assert sorted(seen) == [(epoch, float(number)) for epoch in range(2) for number in range(NUM_SAMPLES)]
    line = "node 0 did not come up: its command ended with 255. Continuing with 1 of 3 ranks on 1 node"
    shown = capfd.readouterr().out
    assert f"train: {line}, from the checkpoint first" in shown
    assert re.search(r"train: attempt 1 failed after .*: node 0 .* is gone, with ranks 0, 1.*; starting again", shown)
    record = open_run(run.id).snapshot()
    assert (record.num_processes, len(record.ranks), record.restarts) == (1, 1, 1)
    (change,) = record.changes
    assert (change.name, change.before, change.after, change.source) == ("num_processes", 3, 1, "launcher")
    assert record.config["num_processes"] == 3


@pytest.mark.slow
def test_lost_ranks_need_a_run_that_can_do_without_them_or_an_idle_node(home: Path, tmp_path: Path) -> None:
    gone, also_gone = tmp_path / "gone", tmp_path / "also gone"
    reason = "The run cannot continue on the remaining nodes: shard=2"
    with Commands([mortal(gone), mortal(also_gone)]) as engine:
        run = launch(wait_for_a_loss, 2, engine=engine, shard=2, resume="checkpoint", **QUIET)
        until(lambda: len(run.metrics) == 2, run)
        lose_node_of(run, 1, also_gone)
        with pytest.raises(ConfigError, match=rf"(?s)node 1 did not come up: .*\n{reason}"):
            run.result()
        also_gone.unlink()
        run = launch(wait_for_a_loss, 1, engine=engine, nodes=1, resume="checkpoint", **QUIET)
        until(lambda: run.metrics, run)
        lose_node_of(run, 0, gone)
        assert list(run.result()) == ["1"]
    assert run.changes == ()
