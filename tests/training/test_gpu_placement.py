"""Tensors on the CPU in a run whose group takes those of GPUs alone, as NCCL's does.

The tensors are fake: they have devices, shapes and no numbers. So this shows where they go, and nothing about NCCL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from notebook_launcher import Accelerator
from notebook_launcher.training.accumulation.members import LeafTensor, reduce_leaves
from notebook_launcher.training.operations import broadcast, checking, gather, reduce

if TYPE_CHECKING:
    from collections.abc import Iterator


class Done(dist.Work):
    """Work that is done."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class GpuGroup(dist.ProcessGroup):
    """A group of two ranks that refuses tensors as NCCL does, and changes none."""

    def __init__(self) -> None:
        super().__init__(0, 2)  # type: ignore[call-arg]
        self.calls: list[str] = []

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "gpunccl"

    def _take(self, call: str, tensors: Any) -> Done:
        for tensor in tensors:
            if tensor.device.type != "cuda" or not tensor.is_contiguous():
                raise ValueError("Tensors must be CUDA and dense")
        self.calls.append(call)
        return Done()

    def allreduce(self, tensors: Any, _options: Any = None) -> Any:  # type: ignore[override]
        return self._take("allreduce", tensors)

    def broadcast(self, tensors: Any, _options: Any = None) -> Any:  # type: ignore[override]
        return self._take("broadcast", tensors)

    def allgather(self, outputs: Any, inputs: Any, _options: Any = None) -> Any:
        return self._take("allgather", [*inputs, *(one for output in outputs for one in output)])

    def _allgather_base(self, output: Any, mine: Any, _options: Any = None) -> Any:
        return self._take("allgather", [output, mine])

    all_gather_single: Any = _allgather_base  # Its name since torch 2.13.


@pytest.fixture
def gpu_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuGroup]:
    group = GpuGroup()
    if "gpunccl" not in dist.Backend.backend_list:
        dist.Backend.register_backend("gpunccl", lambda *_: group, devices=["cuda"])
    else:
        plugin = dist.Backend._plugins["GPUNCCL"]
        monkeypatch.setitem(dist.Backend._plugins, "GPUNCCL", plugin._replace(creator_fn=lambda *_: group))
    dist.init_process_group("gpunccl", rank=0, world_size=2, store=FakeStore())
    # Both would look for a driver; the second is asked for the sake of 8-bit floats.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with FakeTensorMode():
        yield group
    dist.destroy_process_group()


def leaf_with_gradient(device: str, dtype: torch.dtype) -> LeafTensor:
    tensor = torch.zeros(3, device=device, dtype=dtype, requires_grad=True)
    tensor.grad = torch.ones(3, device=device, dtype=dtype)
    return LeafTensor(tensor)


@pytest.mark.skipif(
    torch.version.cuda is None or not hasattr(torch.cpu.Stream, "record_event"),
    reason="a torch built without CUDA, or 2.6 with it, cannot copy between fake devices",
)
def test_gradients_of_leaf_tensors_are_reduced_on_the_gpu_and_stay_where_they_were(gpu_group: GpuGroup) -> None:
    with pytest.raises(ValueError, match="must be CUDA"):
        dist.all_reduce(torch.zeros(1))
    devices = ["cpu", "cuda", "cpu"]
    dtypes = (torch.float32, torch.float32, torch.float64)
    leaves = [leaf_with_gradient(*pair) for pair in zip(devices, dtypes, strict=True)]
    assert reduce_leaves(leaves)
    assert gpu_group.calls == ["allreduce"] * 3
    assert [leaf.tensor.grad.device.type for leaf in leaves if leaf.tensor.grad is not None] == devices


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_operations_leave_tensors_on_their_device(
    gpu_group: GpuGroup, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Fake tensors hold no numbers that could be read.
    monkeypatch.setattr(checking, "gather_numbers", lambda numbers: [list(numbers)] * 2)
    for dtype in (torch.float32, torch.bool, torch.complex64, torch.bfloat16):
        tensor = torch.zeros(3, dtype=dtype, device=device)
        assert broadcast(tensor).device.type == device
        assert gather(tensor).device.type == device
    assert reduce(torch.zeros(3, device=device)).device.type == device
    assert {"broadcast", "allgather", "allreduce"} <= set(gpu_group.calls)


def test_leaf_on_the_cpu_is_prepared_over_the_gpu(gpu_group: GpuGroup) -> None:
    accelerator = Accelerator(cpu=True, check_ranks=False)
    leaf = accelerator.prepare(torch.zeros(3, requires_grad=True))
    assert leaf.device.type == "cpu"
    assert gpu_group.calls == ["broadcast"]
