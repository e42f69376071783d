"""`compat`'s launchers and shared states, as code written for Accelerate uses them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from notebook_launcher import compat, training
from notebook_launcher.compat import DistributedType, PartialState, notebook_launcher
from tests.support.toy_training import sessions_fixture

ranks = sessions_fixture(2)

RANDOM = """
import importlib, os, sys
import numpy, torch

def train(library, path):
    from torch.utils.data import DataLoader, TensorDataset, random_split
    accelerator = importlib.import_module(library).Accelerator(cpu=True)
    rows = random_split(TensorDataset(torch.randn(40, 4), torch.randn(40, 1)), [32, 8])
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(rows[0], 4, shuffle=True))
    drawn = [numpy.random.permutation(5).tolist(), rows[1].indices]
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(net(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        drawn.append((loss.item(), torch.rand(1).item()))
    with open(os.path.join(path, f"{library}-{accelerator.process_index}"), "w") as file:
        file.write(repr(drawn))

if __name__ == "__main__":
    torch.manual_seed(42)
    numpy.random.seed(7)
    for library in ("accelerate", "notebook_launcher.compat"):
        importlib.import_module(library).debug_launcher(train, (library, sys.argv[1]))
"""


def end_on_one(killed):
    if PartialState().process_index == 1:
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        message = f"the reason of rank 1, process {os.getpid()}"
        raise ValueError(message)
    PartialState().wait_for_everyone()


def test_runs_in_several_processes(tmp_path):
    def write_rank(folder):
        state = PartialState()
        (folder / str(state.process_index)).write_text(f"{state.num_processes} {state.distributed_type}", "ascii")

    assert notebook_launcher(write_rank, (tmp_path,), num_processes=2, rdzv_backend="c10d") is None
    assert sorted((path.name, path.read_text()) for path in tmp_path.iterdir()) == [
        ("0", f"2 {DistributedType.MULTI_CPU}"),  # as the enumerations of this Python are written
        ("1", f"2 {DistributedType.MULTI_CPU}"),
    ]


@pytest.mark.slow
def test_ranks_draw_the_random_numbers_of_forks(tmp_path):
    (tmp_path / "program.py").write_text(RANDOM)
    words = [sys.executable, str(tmp_path / "program.py"), str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # Forks whose threads outnumber the cores take minutes.
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    theirs, ours = (
        [(tmp_path / f"{library}-{rank}").read_text() for rank in range(2)]
        for library in ("accelerate", "notebook_launcher.compat")
    )
    assert ours == theirs


def test_one_process_runs_here():
    seen: list[str] = []
    notebook_launcher(seen.append, ("here",), num_processes=1)
    assert seen == ["here"]


def test_failure_is_a_child_failed_error_with_the_workers_message():
    before = int(time.time())
    with pytest.raises(ChildFailedError, match="the reason of rank 1") as caught:
        notebook_launcher(end_on_one, (False,), num_processes=2)
    assert isinstance(caught.value.__cause__, ValueError)
    rank, failure = caught.value.get_first_failure()
    assert rank == 1
    assert f"the reason of rank 1, process {failure.pid}" in failure.message
    assert all(before <= failure.timestamp <= time.time() for failure in caught.value.failures.values())
    assert f"(pid: {failure.pid})" in str(caught.value)


def test_killed_process_is_named_with_its_pid_and_signal():
    with pytest.raises(ChildFailedError) as caught:
        notebook_launcher(end_on_one, (True,), num_processes=2)
    rank, failure = caught.value.get_first_failure()
    assert (rank, failure.exitcode) == (1, -signal.SIGKILL)
    assert failure.pid > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": None}, "num_processes=None: pass the number"),
        ({"num_processes": 2, "num_nodes": 2}, "num_nodes=2, node_rank=0: one node is supported"),
        ({"num_processes": 0}, "num_processes=0 is too small"),
        ({"num_processes": 2, "mixed_precision": "fp4"}, "mixed_precision='fp4' is unknown"),
    ],
)
def test_arguments_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        notebook_launcher(print, **options)


def test_tpu_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setenv("TPU_NAME", "local")
    with pytest.raises(ValueError, match=r"TPUs are not supported .* ranks compute on CPUs and NVIDIA GPUs"):
        notebook_launcher(print, num_processes=1)


def shared_states():
    compat.AcceleratorState._reset_state(True)
    compat.GradientState._reset_state()
    first = compat.Accelerator(cpu=True, mixed_precision="bf16")
    assert compat.PartialState().__dict__ is compat.PartialState().__dict__
    accelerator = compat.Accelerator(cpu=True, gradient_accumulation_plugin=compat.GradientAccumulationPlugin(5))
    assert accelerator.mixed_precision == first.mixed_precision == compat.AcceleratorState().mixed_precision == "bf16"
    assert compat.GradientState().num_steps == first.gradient_state.num_steps == 5
    accelerator.sync_gradients = False
    assert not compat.GradientState().sync_gradients
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(6))))
    for _ in loader:
        assert compat.GradientState().active_dataloader is loader
    assert compat.GradientState().active_dataloader is None
    with pytest.raises(ValueError, match="mixed_precision='no': an Accelerator of this process has 'bf16'"):
        compat.Accelerator(cpu=True, mixed_precision="no")
    compat.AcceleratorState._reset_state()
    compat.Accelerator(cpu=True, mixed_precision="no")
    compat.AcceleratorState._reset_state(True)
    compat.GradientState._reset_state()


def test_newest_accelerator_is_shared(ranks):
    ranks.run(2, shared_states)


def test_every_documented_name_is_offered():
    for name in {*compat.__all__, *training.__all__}:
        assert getattr(compat, name) is not None
    for module in (compat, compat.utils.memory, training):
        with pytest.raises(AttributeError, match="has no attribute 'Accelerater'"):
            _ = module.Accelerater
    assert "Accelerator" in {*dir(compat)}.intersection(dir(training))
