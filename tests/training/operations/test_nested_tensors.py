"""Nested tensors: what one process does to a batch."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import pytest
import torch

from notebook_launcher.training import operations
from tests.training.operations.calls import Record


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Derived:
    first: Any
    twice: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.twice = self.first * 2


class Movable:
    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def to(self, device: Any) -> Movable:
        return Movable(str(device))


CONTAINERS: list[Any] = [
    [1, 2],
    (1, 2),
    Pair(1, 2),
    {"a": 1, "b": 2},
    collections.OrderedDict(b=2, a=1),
    collections.defaultdict(int, a=1, b=2),
    collections.UserDict(a=1, b=2),
    types.MappingProxyType({"a": 1, "b": 2}),
    Record(1, 2),
]


def as_tensors(data: Any) -> Any:
    return operations.recursively_apply(torch.tensor, data, test_type=lambda leaf: isinstance(leaf, int))


@pytest.mark.parametrize("data", CONTAINERS, ids=lambda data: type(data).__name__)
def test_containers_keep_their_type(data):
    tensors = as_tensors(data)
    assert type(tensors) is type(data)
    assert operations.listify(tensors) == data
    assert next(operations.find_tensors(tensors)).shape == ()


def test_batch_encoding_keeps_what_else_it_holds():
    from transformers import BatchEncoding

    batch = BatchEncoding({"ids": torch.ones(2, 2)}, n_sequences=2)
    halves = operations.slice_tensors(batch, slice(0, 1))
    assert (type(halves), halves.n_sequences, halves["ids"].shape) == (BatchEncoding, 2, (1, 2))


def test_leaves_that_are_not_tensors_stay_or_are_refused():
    def double(tensor):
        return tensor * 2

    assert operations.recursively_apply(double, ["text", None]) == ["text", None]
    with pytest.raises(TypeError, match=r"double got 'text', of type str\. It takes tensors.*gather_object"):
        operations.recursively_apply(double, ["text"], error_on_other_type=True)


def test_send_to_device_moves_what_can_be_moved():
    data = {"x": torch.ones(2), "names": ["a"], "deep": (torch.ones(1), Record(torch.ones(1))), "own": Movable()}
    moved = operations.send_to_device(data, torch.device("meta"), non_blocking=True)
    assert [tensor.device.type for tensor in operations.find_tensors(moved)] == ["meta"] * 3
    assert moved["own"].device == "meta"
    assert moved["names"] == ["a"]
    derived = operations.send_to_device(Derived(torch.ones(2)), "meta")
    assert (derived.first.device.type, derived.twice.device.type) == ("meta", "meta"), "not by `__init__`"


@pytest.mark.parametrize("skip", ["x", ["x", "first"]])
def test_send_to_device_skips_keys(skip):
    data = {"x": torch.ones(2), "deep": [{"x": torch.ones(2), "y": torch.ones(2)}, Record(torch.ones(2))]}
    moved = operations.send_to_device(data, "meta", skip_keys=skip)
    kept = [tensor.device.type for tensor in operations.find_tensors(moved)]
    assert kept == ["cpu", "cpu", "meta", "meta" if skip == "x" else "cpu"]


@pytest.mark.parametrize("wrap", [list, tuple, lambda parts: Pair(*parts), lambda parts: Record(*parts)])
def test_concatenate_joins_by_position(wrap):
    first, second = wrap([torch.ones(2), torch.tensor(1)]), wrap([torch.ones(1), torch.tensor(2)])
    joined = operations.concatenate([first, second])
    assert type(joined) is type(first)
    assert operations.listify(joined) == wrap([[1.0, 1.0, 1.0], [1, 2]])


def test_concatenate_of_one_batch_keeps_anything():
    assert operations.concatenate([["text"]]) == ["text"]
    with pytest.raises(TypeError, match=r"2 batches that hold a str.*collate_fn"):
        operations.concatenate([["text"], ["text"]])


def test_convert_to_fp32_converts_16_bit_floats_and_lets_gradients_flow():
    half = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    data = operations.convert_to_fp32({"x": half, "y": torch.ones(1, dtype=torch.float64), "z": torch.ones(1).half()})
    assert [tensor.dtype for tensor in data.values()] == [torch.float32, torch.float64, torch.float32]
    data["x"].sum().backward()
    assert half.grad is not None
