"""Errors by which a rank loses a peer, in the words of gloo, NCCL and torch; and advice on errors of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from notebook_launcher import Accelerator, notebook_launch
from notebook_launcher.kernel.failures.culprit import is_victim, lost_its_peer
from notebook_launcher.kernel.failures.failure_display import advice_on
from notebook_launcher.messaging.messages import ExceptionReport, Frame
from tests.support.toy_training import shards_on_cpus

if TYPE_CHECKING:
    from collections.abc import Callable


IN_COLLECTIVE = "/opt/python/site-packages/torch/distributed/distributed_c10d.py"
IN_DDP = "/opt/python/site-packages/torch/nn/parallel/distributed.py"
IN_BACKWARD = "/opt/python/site-packages/torch/autograd/graph.py"
IN_LOADER = "/opt/python/site-packages/torch/utils/data/dataloader.py"
IN_NOTEBOOK = "/tmp/ipykernel_1/cell.py"
NETWORK, BACKEND, STORE = (f"torch.distributed.Dist{kind}Error" for kind in ("Network", "Backend", "Store"))


def report(type_name: str, message: str, *filenames: str) -> ExceptionReport:
    frames = tuple(Frame(filename=filename, lineno=3, name="f") for filename in (IN_NOTEBOOK, *filenames))
    return ExceptionReport(type_name=type_name, message=message, frames=frames)


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"
NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:"
LOST_PEERS = [
    ("RuntimeError", f"{GLOO}pair.cc:547] Connection closed by peer [127.0.0.1]:28912"),
    ("RuntimeError", f"{GLOO}pair.cc:538] Read error [127.0.0.1]:2891: Connection reset by peer"),
    ("RuntimeError", f"{GLOO}pair.cc:457] writev [127.0.0.1]:2891: Broken pipe"),
    ("RuntimeError", f"{GLOO}unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"),
    ("RuntimeError", f"{GLOO}pair.cc:167] timed out connecting: SO_ERROR: Connection refused, remote=[127.0.0.1]:2891"),
    ("RuntimeError", "Rank 1 failed to pass monitoredBarrier in 30000 ms"),
    (
        "RuntimeError",
        f"[Rank 0]: Rank 1 failed to pass monitoredBarrier in 30000 ms\n{GLOO}pair.cc:547] Connection closed",
    ),
    (STORE, "wait timeout after 300000ms, keys: /default_pg/0//cpu//0/1"),
    (STORE, "Timed out after 61 seconds waiting for clients. 1/2 clients joined."),
    (NETWORK, "The client socket has timed out after 60000ms while trying to connect to (127.0.0.1, 29500)."),
    (NETWORK, "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"),
    (
        BACKEND,
        f"{NCCL}166, remote process exited or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call",
    ),
    (BACKEND, "NCCL communicator was aborted on rank 1."),
    (BACKEND, "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=8"),
]
OWN_ERRORS = [
    ("RuntimeError", "Detected mismatch between collectives on ranks. Rank 1 is running collective: ALLREDUCE"),
    ("RuntimeError", "[enforce fail at gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 12 vs 8"),
    ("RuntimeError", "Expected to have finished reduction in the prior iteration before starting a new one."),
    ("RuntimeError", "No backend type associated with device type cpu"),
    ("ValueError", "Default process group has not been initialized, please make sure to call init_process_group."),
    ("ConnectionError", "Connection reset by peer"),
    ("TimeoutError", "timed out"),
    (BACKEND, f"{NCCL}268, unhandled cuda error, NCCL version 2.21.5\nLast error:\nCUDA error: out of memory"),
]


@pytest.mark.parametrize(("type_name", "message"), LOST_PEERS)
@pytest.mark.parametrize("filename", [IN_COLLECTIVE, IN_DDP, IN_BACKWARD])
def test_error_of_a_collective_about_a_lost_peer_is_a_consequence(type_name: str, message: str, filename: str) -> None:
    found = report(type_name, message, filename)
    assert lost_its_peer(found)
    assert is_victim(found)


@pytest.mark.parametrize(("type_name", "message"), OWN_ERRORS)
def test_other_errors_of_a_collective_are_the_ranks_own(type_name: str, message: str) -> None:
    assert not is_victim(report(type_name, message, IN_COLLECTIVE))


def test_the_same_words_outside_of_a_collective_are_the_ranks_own() -> None:
    assert not is_victim(report("RuntimeError", "DataLoader timed out after 5 seconds", IN_LOADER))
    assert not is_victim(report("RuntimeError", "Connection reset by peer"))


def test_error_of_a_checkpoint_that_another_rank_reports_is_a_consequence() -> None:
    type_name = "notebook_launcher.training.checkpoints.folders.CheckpointError"
    assert is_victim(report(type_name, "rank 1 could not write the checkpoint: OSError: no space left on device"))
    assert not is_victim(report(type_name, "model.safetensors is damaged"))


def make(kind: Any = torch.optim.SGD) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    return accelerator, *accelerator.prepare(model, kind(model.parameters(), lr=0.1))


def freeze_late() -> None:
    accelerator, model, _ = make()
    model.module[0].requires_grad_(False)
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 3)).sum())


def repeat_a_part() -> None:
    from torch.utils.checkpoint import checkpoint

    accelerator, model, _ = make()
    part = model.module[0]
    model.module.forward = lambda x: checkpoint(part, checkpoint(part, x, use_reentrant=True), use_reentrant=True)
    accelerator.backward(model(torch.ones(2, 3, requires_grad=True)).sum())


def penalise() -> None:
    accelerator, model, _ = make()
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    accelerator.backward(model(torch.ones(2, 3)).square().mean() + 0.1 * penalty)


def reshape() -> None:
    accelerator, model, optimizer = make(torch.optim.LBFGS)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).sum()
        accelerator.backward(loss)
        return loss

    optimizer.step(closure)


def factorise() -> None:
    accelerator, model, optimizer = make(torch.optim.Adafactor)
    accelerator.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()


class Encoder(torch.nn.Linear):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


def call_method() -> None:
    model: Any = torch.nn.parallel.DistributedDataParallel(Encoder(2, 2))
    model.encode(torch.ones(1, 2))


def average() -> None:
    _, model, _ = make()
    torch.optim.swa_utils.AveragedModel(model)


def name_without_import() -> None:
    skip_first_batches([], 1)  # type: ignore[name-defined] # noqa: F821


@pytest.mark.parametrize(
    ("train", "shard", "advice"),
    [
        (name_without_import, None, "Type `from notebook_launcher import skip_first_batches` (`import *` leaves out"),
        (call_method, None, "write accelerator.unwrap_model(model).encode. Gradients"),
        (freeze_late, None, "pass DistributedDataParallelKwargs(find_unused_parameters=True)"),
        (repeat_a_part, None, "pass DistributedDataParallelKwargs(static_graph=True)"),
        pytest.param(penalise, 2, "sum over parameter.full_tensor() on every rank", marks=shards_on_cpus),
        pytest.param(reshape, 2, "as LBFGS and Adafactor do", marks=shards_on_cpus),
        pytest.param(factorise, 2, "as LBFGS and Adafactor do", marks=shards_on_cpus),
        pytest.param(average, 2, "A sharded model cannot be copied", marks=shards_on_cpus),
    ],
)
def test_failure_adds_the_advice_that_torch_omits(train: Callable[[], None], shard: int | None, advice: str) -> None:
    with pytest.raises((RuntimeError, AssertionError, AttributeError, NameError)) as failure:
        notebook_launch(train, 2, shard=shard, output="none")
    shown: Any = vars(failure.value)["_render_traceback_"]
    assert advice in "\n".join(shown())


@pytest.mark.parametrize(
    "text",
    [
        "Attempted to flatten unevenly sharded dimension 0, which would require resharding the input.",  # torch 2.11
        "Sharding propagation failed for Op(op=aten.view.default, args_schema=Spec(S(0) on (3, 3)),",  # torch 2.9
    ],
)
def test_words_of_older_torch_get_the_advice_too(text: str) -> None:
    (advice,) = advice_on(text)
    assert "as LBFGS and Adafactor do" in advice
