"""Tensors, arrays and modules arrive as they left; large ones without a copy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import mmap
import os
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch
from torch._dynamo import config as dynamo_config
from torch._inductor import config as inductor_config
from torch.nn.attention import SDPBackend
from torch.nn.utils import parametrizations

from notebook_launcher import travel
from notebook_launcher.errors import ResourceError
from notebook_launcher.messaging.channel import AnonymousFile
from notebook_launcher.travel import parcel
from tests.support.interrupts import interrupt_at

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("no_descriptor_is_left_open")

LARGE = 4 << 20  # beyond what is copied on arrival


def there_and_back(value: Any) -> Any:
    call, _ = travel.unpack_call(travel.pack_call(travel.FunctionCall(print, (value,), {})).detach())
    assert call.fn is print
    return travel.unpack_value(travel.pack_value(call.args[0]))


TENSORS = {
    "empty": torch.empty(0),
    "empty-2d": torch.empty(3, 0, 2),
    "scalar": torch.tensor(3.5),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "bfloat16": torch.arange(5, dtype=torch.bfloat16),
    "float8": torch.arange(5, dtype=torch.float32).to(torch.float8_e4m3fn),
    "uint16": torch.arange(5, dtype=torch.int32).to(torch.uint16),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "offset": torch.arange(10.0)[3:7],
    "steps": torch.arange(10.0)[::3],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "channels-last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "requires-grad": torch.ones(3, requires_grad=True),
    "large": torch.arange(LARGE, dtype=torch.uint8),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_arrive_as_they_left(name: str) -> None:
    left = TENSORS[name]
    arrived = there_and_back(left)
    assert type(arrived) is type(left)
    for attribute in ("dtype", "shape", "requires_grad", "layout", "is_leaf"):
        assert getattr(arrived, attribute) == getattr(left, attribute)
    assert arrived.stride() == left.stride()
    assert arrived.storage_offset() == left.storage_offset()
    assert arrived.is_conj() == left.is_conj()
    assert torch.equal(arrived.to(torch.complex64), left.to(torch.complex64))


@pytest.mark.filterwarnings("ignore")
def test_sparse_quantized_and_nested_tensors_arrive() -> None:
    sparse = [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()]
    quantized = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.quint8)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for left, dense in (
        *((each, torch.Tensor.to_dense) for each in sparse),
        (quantized, torch.Tensor.dequantize),
        (nested, lambda each: torch.nested.to_padded_tensor(each, 0.0)),
    ):
        arrived = there_and_back(left)
        assert arrived.layout == left.layout
        assert torch.equal(dense(arrived), dense(left))


def test_meta_tensors_non_leaves_and_subclasses_arrive() -> None:
    meta = there_and_back(torch.empty(1 << 20, 1 << 20, device="meta"))
    assert (meta.shape, meta.device.type) == ((1 << 20, 1 << 20), "meta")
    leaf = there_and_back(torch.ones(3, requires_grad=True) * 2)
    assert (leaf.tolist(), leaf.requires_grad, leaf.is_leaf) == ([2, 2, 2], True, True)

    class Tagged(torch.Tensor):
        pass

    left = torch.ones(2).as_subclass(Tagged)
    left.tag = "x"  # type: ignore[attr-defined]
    arrived = there_and_back(left)
    assert (type(arrived).__name__, arrived.tag, arrived.tolist()) == ("Tagged", "x", [1, 1])


@pytest.mark.parametrize("length", [8, LARGE], ids=["copied", "mapped"])
def test_tensors_that_shared_memory_still_do(length: int) -> None:
    base = torch.zeros(length)
    arrived, view, again, storage = there_and_back([base, base[2:4], base, base.untyped_storage()])
    view.fill_(7)
    assert arrived[1:5].tolist() == [0, 7, 7, 0]
    assert again is arrived
    assert storage.data_ptr() == arrived.data_ptr()
    assert base.sum() == 0


def test_storage_seen_through_two_objects_travels_once() -> None:
    base = torch.zeros(LARGE)
    fd = travel.pack_value([base, base.view(torch.int32), base.detach()])
    assert base.nbytes < os.fstat(fd).st_size < 1.1 * base.nbytes
    travel.unpack_value(fd)


def test_module_and_its_optimizer_stay_tied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The first optimizer of a process imports what would set this for good.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    arrived, its_optimizer = there_and_back((model, optimizer))
    assert arrived[1].weight is arrived[0].weight
    assert its_optimizer.param_groups[0]["params"][0] is arrived[0].weight
    assert its_optimizer.state[arrived[0].weight]["step"] == 1
    assert torch.equal(arrived[0].weight, model[0].weight)
    assert isinstance(arrived[0].weight, torch.nn.Parameter)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("step", ["before", "after", "never"])
def test_scheduler_warns_at_its_first_step_only_where_the_optimizer_never_stepped(step: str) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma) for gamma in (0.5, 0.1)]
    if step == "before":
        optimizer.step()
    optimizer, schedulers = there_and_back((optimizer, schedulers))
    if step == "after":
        optimizer.step()
    warns = pytest.warns(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`")
    with warns if step == "never" else contextlib.nullcontext():
        for scheduler in schedulers:
            scheduler.step()
    assert schedulers[1].get_last_lr() == [pytest.approx(0.05)]


def test_hooks_of_an_optimizer_arrive_and_new_ones_do_not_replace_them(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    counts = [0, 0]

    def count(at: int) -> Any:
        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            optimizer.counts[at] += 1

        return hook

    optimizer.register_step_pre_hook(count(0))
    monkeypatch.setattr(torch.utils.hooks.RemovableHandle, "next_id", 0)  # as in a process that made none
    arrived = there_and_back(optimizer)
    arrived.register_step_pre_hook(count(1))
    arrived.counts = counts
    arrived.step()
    assert counts == [1, 1]


def test_plain_objects_arrive() -> None:
    assert there_and_back(functools.cache(functools.partial(pow, 2)))(3) == 8
    pandas = pytest.importorskip("pandas")
    left = pandas.DataFrame({"a": [1, 2], "b": ["x", "y"]})
    pandas.testing.assert_frame_equal(there_and_back(left), left)


ARRAYS: dict[str, Any] = {
    "c-order": np.arange(6.0).reshape(2, 3),
    "f-order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "strided": np.arange(10)[::3],
    "empty": np.empty((0, 3)),
    "scalar": np.float32(3.5),
    "strings": np.array(["a", "bc"]),
    "objects": np.array([None, {"a": 1}]),
    "records": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "dates": np.array(["2024-01-01"], dtype="M8[D]"),
    "large": np.arange(LARGE, dtype=np.uint8),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_arrive_as_they_left(name: str) -> None:
    left = ARRAYS[name]
    arrived = there_and_back(left)
    assert arrived.dtype == left.dtype
    np.testing.assert_array_equal(arrived, left)


@pytest.mark.parametrize("length", [8, LARGE], ids=["copied", "mapped"])
def test_arrived_data_is_writable_and_aligned(length: int) -> None:
    odd = np.ones(3, dtype=np.uint8)
    _, array, tensor = there_and_back([odd, np.zeros(length), torch.zeros(length)])
    array[:] = 1
    tensor += 1
    assert (array.sum(), tensor.sum()) == (length, length)
    assert array.ctypes.data % 64 == tensor.data_ptr() % 64 == 0


def test_what_a_library_has_one_of_travels_by_name() -> None:
    kept: list[Any] = [torch.backends.cudnn, torch.backends.cuda.matmul, torch.ops, torch.ops.aten]
    kept += [torch.ops.higher_order, torch.ops.aten.add, torch.ops.aten.add.Tensor, torch.ops.prims.abs]
    kept += [dynamo_config, inductor_config, SDPBackend, torch.backends.cuda.SDPAParams, torch._C._log_api_usage_once]
    kept += [random.shuffle, random.random, np.random.rand, sys.flags, sys.version_info, os.environ, sys.stdout]
    kept += [dataclasses.MISSING, sys.stderr]
    for left, arrived in zip(kept, there_and_back(kept), strict=True):
        assert arrived is left
    assert there_and_back([SDPBackend.MATH, torch.Tag.core]) == [SDPBackend.MATH, torch.Tag.core]


PARAMETRIZED: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "weight-norm": parametrizations.weight_norm,
    "old-spectral-norm": torch.nn.utils.spectral_norm,
    "both": lambda module: parametrizations.spectral_norm(parametrizations.weight_norm(module)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrized_modules_arrive_and_train(name: str) -> None:
    left: Any = torch.nn.Sequential(PARAMETRIZED[name](torch.nn.Linear(3, 3)))
    arrived, optimizer = there_and_back((left, torch.optim.SGD(left.parameters(), lr=0.1)))
    assert list(arrived.state_dict()) == list(left.state_dict())
    for model, its in ((left, torch.optim.SGD(left.parameters(), lr=0.1)), (arrived, optimizer)):
        model(torch.ones(1, 3)).square().sum().backward()
        its.step()
    assert torch.equal(arrived(torch.ones(1, 3)), left(torch.ones(1, 3)))
    assert type(arrived[0]).__name__ == type(left[0]).__name__


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_traced_and_exported_modules_arrive() -> None:
    model, batch = torch.nn.Linear(2, 2), torch.ones(1, 2)
    samples: list[Any] = [torch.jit.trace(model, batch), torch.jit.script(model), torch.jit.trace(torch.sin, batch)]
    for left in samples:
        assert torch.equal(there_and_back(left)(batch), left(batch))
    assert there_and_back(samples[0]).weight.requires_grad
    exported = torch.export.export(model, (batch,))
    assert torch.equal(there_and_back(exported).module()(batch), model(batch))


def test_compiled_functions_are_compiled_where_they_arrive() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def loss(a: Any, b: Any) -> Any:
        return (a - b).square().mean()

    class Trainer:
        @torch.compile(backend="eager")
        def step(self, x: Any) -> Any:
            return x + 1

    def train() -> tuple[float, float, int]:
        value = loss(torch.ones(2), torch.zeros(2)).item()
        return value, Trainer().step(torch.ones(1)).item(), len(graphs)

    call, _ = travel.unpack_call(travel.pack_call(travel.FunctionCall(train, (), {})).detach())
    assert call.fn() == (1.0, 2.0, 1)
    assert graphs == []


def test_arrival_takes_no_memory_until_something_is_written() -> None:
    size = 256 << 20
    fd = travel.pack_value(torch.ones(size, dtype=torch.uint8))
    private = psutil.Process().memory_full_info().uss
    resident = psutil.Process().memory_info().rss
    tensor = travel.unpack_value(fd)
    assert psutil.Process().memory_info().rss - resident < size / 50
    assert int(tensor[:: mmap.PAGESIZE].sum()) == size // mmap.PAGESIZE  # every page is read
    assert psutil.Process().memory_full_info().uss - private < size * 1.1  # the one copy, ours alone now


def test_readers_share_one_copy_and_do_not_see_each_others_writes() -> None:
    fd = travel.pack_call(travel.FunctionCall(print, (torch.zeros(LARGE),), {})).detach()
    first, second = (travel.unpack_call(os.dup(fd))[0].args[0] for _ in range(2))
    child = os.fork()
    if child == 0:
        third = travel.unpack_call(fd)[0].args[0]
        third.numpy()[:] = 3
        os._exit(int(third.numpy().sum() != 3 * LARGE))
    os.close(fd)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    first.fill_(1)
    assert (first.sum(), second.sum()) == (LARGE, 0)


@pytest.mark.parametrize("value", [bytearray(LARGE), np.zeros(LARGE)], ids=["in-band", "out-of-band"])
def test_full_memory_is_an_error_before_it_is_full(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcel, "UNCHECKED_SIZE", 1 << 20)
    monkeypatch.setattr(parcel, "available_memory", lambda: 1_000_000)
    with pytest.raises(ResourceError, match=r"the captured data need .* MB of shared memory, 1 MB are avail"):
        travel.pack_call(travel.FunctionCall(print, (value,), {}))
    with pytest.raises(ResourceError, match=r"the return value needs .* MB of shared memory"):
        travel.pack_value(value)


def test_large_capture_is_announced_before_anything_starts_and_named_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, small, said = np.zeros(120_000_000, dtype=np.uint8), np.zeros(10), []
    monkeypatch.setattr(travel, "ANNOUNCED_SIZE", 100_000_000)
    for value in (small, table):
        call = travel.FunctionCall(lambda value=value: value, (), {})
        travel.pack_call(call, start=lambda: said.append("start"), tell=said.append).close()
    first, line, last = said
    assert first == last == "start"
    assert line.startswith("120 MB of the notebook's data travel to the ranks; the largest: `value`, a numpy.ndarray o")
    assert "which takes 60 ms or more" in line
    monkeypatch.setattr(parcel, "available_memory", lambda: 0)
    with pytest.raises(ResourceError, match=r"the largest: `table`, a numpy.ndarray of 120 MB \(captured by"):
        travel.pack_call(travel.FunctionCall(lambda: (small, table), (), {}))


def test_systems_own_refusal_is_a_resource_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(AnonymousFile):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            full = os.open("/dev/full", os.O_RDWR)
            os.dup2(full, self.fileno(), inheritable=False)
            os.close(full)

    monkeypatch.setattr(parcel, "AnonymousFile", Full)
    with pytest.raises(ResourceError, match="the return value needs"):
        travel.pack_value([1, 2])


def test_interrupt_at_any_bytecode_of_packing_leaves_no_descriptor() -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def pack() -> None:
        packed.append(travel.pack_call(travel.FunctionCall(print, (), {})))

    packed: list[AnonymousFile] = []
    number, before = 0, descriptors()
    # The modules that hold a descriptor, or call what does. An interrupt of those that they call reaches them there.
    modules = ("messaging.", "travel", "travel.parcel", "travel.pickling")
    while interrupt_at(number, pack, tuple(f"notebook_launcher.{name}" for name in modules)):
        assert descriptors() == before, number
        number += 1
    assert number > 100
    packed.pop().close()


def test_descriptor_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="does not hold a parcel"):
        travel.unpack_call(os.memfd_create("other"))
