"""Errors by which a rank loses a peer, told apart from a rank's own errors, in the words of gloo, NCCL and torch."""

from __future__ import annotations

import pytest

from notebook_launcher.kernel.failures.culprit import is_victim, lost_its_peer
from notebook_launcher.messaging.messages import ExceptionReport, Frame

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
LOST_PEERS = [
    ("RuntimeError", f"{GLOO}pair.cc:547] Connection closed by peer [127.0.0.1]:28912"),
    ("RuntimeError", f"{GLOO}pair.cc:538] Read error [127.0.0.1]:2891: Connection reset by peer"),
    ("RuntimeError", f"{GLOO}pair.cc:457] writev [127.0.0.1]:2891: Broken pipe"),
    ("RuntimeError", f"{GLOO}unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"),
    ("RuntimeError", f"{GLOO}pair.cc:167] timed out connecting: SO_ERROR: Connection refused, remote=[127.0.0.1]:2891"),
    ("RuntimeError", "Rank 1 failed to pass monitoredBarrier in 30000 ms"),
    (
        "RuntimeError",
        (
            "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 30000 ms\n Original exception:\n"
            f"{GLOO}pair.cc:547] Connection closed by peer [127.0.0.1]:28912"
        ),
    ),
    (STORE, "wait timeout after 300000ms, keys: /default_pg/0//cpu//0/1"),
    (STORE, "Timed out after 61 seconds waiting for clients. 1/2 clients joined."),
    (NETWORK, "The client socket has timed out after 60000ms while trying to connect to (127.0.0.1, 29500)."),
    (NETWORK, "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"),
    (
        BACKEND,
        (
            "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:166, remote process exited or there was a "
            "network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a "
            "remote process exiting prematurely."
        ),
    ),
    (BACKEND, "NCCL communicator was aborted on rank 1."),
    (
        BACKEND,
        (
            "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=8, "
            "NumelOut=8, Timeout(ms)=600000) ran for 600010 milliseconds before timing out."
        ),
    ),
]
OWN_ERRORS = [
    ("RuntimeError", "Detected mismatch between collectives on ranks. Rank 1 is running collective: ALLREDUCE"),
    ("RuntimeError", "[enforce fail at gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 12 vs 8"),
    ("RuntimeError", "Expected to have finished reduction in the prior iteration before starting a new one."),
    ("RuntimeError", "No backend type associated with device type cpu"),
    ("ValueError", "Default process group has not been initialized, please make sure to call init_process_group."),
    ("ConnectionError", "Connection reset by peer"),
    ("TimeoutError", "timed out"),
    (
        BACKEND,
        (
            "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled cuda error, NCCL version "
            "2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCUDA error: out of memory"
        ),
    ),
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


@pytest.mark.parametrize(
    ("message", "filenames"),
    [
        ("DataLoader timed out after 5 seconds", (IN_LOADER,)),
        ("Connection reset by peer", ()),
    ],
)
def test_the_same_words_outside_of_a_collective_are_the_ranks_own(message: str, filenames: tuple[str, ...]) -> None:
    assert not is_victim(report("RuntimeError", message, *filenames))


def test_error_of_a_checkpoint_that_another_rank_reports_is_a_consequence() -> None:
    type_name = "notebook_launcher.training.checkpoints.folders.CheckpointError"
    assert is_victim(report(type_name, "rank 1 could not write the checkpoint: OSError: no space left on device"))
    assert not is_victim(report(type_name, "model.safetensors is damaged"))
