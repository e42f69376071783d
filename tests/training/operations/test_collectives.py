"""Collectives on nested tensors and objects: what ranks do together."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from notebook_launcher.training import operations
from notebook_launcher.training.operations.checking import collective_device, sending_device
from tests.training.operations.calls import Record, on_all, this_rank

if TYPE_CHECKING:
    from collections.abc import Callable


def test_operations_of_a_single_process_return_their_input():
    data = {"x": torch.tensor(1.0)}
    assert operations.gather(data) is data
    assert operations.broadcast(data) is data
    assert operations.pad_across_processes(data) is data
    assert operations.gather_object("text") == "text"
    assert operations.broadcast_object_list([1]) == [1]
    assert operations.reduce(data, "mean", scale=0.5)["x"] == 0.5
    assert operations.reduce(data)["x"] is not data["x"]


def test_gather_concatenates_in_rank_order(ranks):
    def gather():
        rank = this_rank()
        data = {"x": torch.full((2, 3), rank), "deep": (Record(torch.ones(1, 1) * rank, None), [])}
        gathered = operations.gather(data)
        return gathered["x"], gathered["deep"][0].first, gathered["deep"][0].second

    rows, column, nothing = on_all(ranks, gather, 3)
    everyone = torch.arange(3)
    assert torch.equal(rows, everyone.repeat_interleave(2)[:, None].repeat(1, 3))
    assert torch.equal(column, everyone[:, None].float())
    assert nothing is None


DTYPES = ["bool", "uint8", "int16", "int64", "float16", "bfloat16", "float64", "complex64", "float8_e4m3fn"]


def of_dtype(name: str, rank: int) -> torch.Tensor:
    return torch.tensor([rank > 1, 1, 0]).to(getattr(torch, name))


AWKWARD: dict[str, Callable[[int], torch.Tensor]] = {
    **{name: functools.partial(of_dtype, name) for name in DTYPES},
    "no dimensions": lambda rank: torch.tensor(float(rank)),
    "transposed": lambda rank: torch.arange(6.0).view(2, 3).t() + rank,
    "strided": lambda rank: torch.arange(6.0)[::2] + rank,
    "expanded": lambda rank: torch.tensor([float(rank)]).expand(3),
    "conjugate": lambda rank: torch.tensor([1j * rank]).conj(),
    "gradient": lambda rank: torch.ones(2, requires_grad=True) * rank,
    "empty": lambda _rank: torch.zeros(0, 3),
    "channels last": lambda rank: torch.full((1, 3, 2, 2), rank).to(memory_format=torch.channels_last),
    "large": lambda rank: torch.full((2**18 + 1,), float(rank)),
}


def test_gather_takes_awkward_tensors_of_every_dtype_alone_and_at_once(ranks):
    def gather():
        mine = {name: make(this_rank()) for name, make in AWKWARD.items()}
        at_once = operations.gather({name: tensor for name, tensor in mine.items() if name != "large"})
        wrong = []
        for name, make in AWKWARD.items():
            wanted = [row for rank in range(3) for row in torch.atleast_1d(make(rank).detach()).tolist()]
            for found in (operations.gather(mine[name]), at_once.get(name)):
                if found is not None and (found.tolist(), found.dtype) != (wanted, mine[name].dtype):
                    wrong.append((name, found))
                assert found is None or not found.requires_grad
        return wrong

    assert on_all(ranks, gather, 3) == []


def test_gather_object_gives_one_flat_list(ranks):
    gathered = on_all(ranks, lambda: operations.gather_object([{"rank": this_rank()}] * this_rank()), 3)
    assert gathered == [{"rank": rank} for rank in range(3) for _ in range(rank)]


def test_broadcast_overwrites_the_tensors_it_was_given(ranks):
    def broadcast():
        rank = this_rank()
        rows, flags = torch.full((3, 2), rank).t(), torch.tensor([rank == 1])
        weight = torch.nn.Parameter(torch.full((2,), float(rank)))
        one = torch.tensor([rank]).expand(3)
        result = operations.broadcast([rows, flags, weight, one], from_process=1)
        same = [new is old for new, old in zip(result, (rows, flags, weight, one), strict=True)]
        return same, [tensor.detach() for tensor in result]

    same, (rows, flags, weight, one) = on_all(ranks, broadcast, 3)
    assert same == [True, True, True, False]
    assert torch.equal(rows, torch.ones(2, 3, dtype=torch.int64))
    assert (flags.tolist(), weight.tolist(), one.tolist()) == ([True], [1.0, 1.0], [1, 1, 1])


REDUCED = [
    ("sum", "float32", lambda size: size * (size - 1) / 2, "float32"),
    ("mean", "float32", lambda size: (size - 1) / 2, "float32"),
    ("max", "float32", lambda size: size - 1.0, "float32"),
    ("sum", "bfloat16", lambda size: size * (size - 1) / 2, "bfloat16"),
    ("mean", "float16", lambda size: (size - 1) / 2, "float16"),
    ("sum", "bool", lambda size: size - 1, "int64"),
    ("max", "bool", lambda _size: True, "bool"),
    ("sum", "int16", lambda size: size * (size - 1) // 2, "int64"),
    ("mean", "int64", lambda size: (size - 1) / 2, "float32"),
    ("max", "int32", lambda size: size - 1, "int32"),
    ("sum", "complex64", lambda size: complex(size * (size - 1) / 2), "complex64"),
]


def test_reduce_returns_sum_mean_or_max(ranks):
    def reduce():
        results = []
        for reduction, dtype, _, _ in REDUCED:
            mine = torch.tensor([this_rank()]).to(getattr(torch, dtype))
            before = mine.clone()
            reduced = operations.reduce({"x": mine}, reduction)["x"]
            assert torch.equal(mine, before)
            results.append((reduction, dtype, reduced.item(), str(reduced.dtype).removeprefix("torch.")))
        return results

    assert on_all(ranks, reduce, 3) == [
        (reduction, dtype, value(3), result) for reduction, dtype, value, result in REDUCED
    ]


def test_reduce_alone_gives_the_dtypes_of_several_ranks():
    for reduction, dtype, value, result in REDUCED:
        reduced = operations.reduce(torch.tensor([value(1)]).to(getattr(torch, dtype)), reduction)
        assert str(reduced.dtype) == f"torch.{result}"


def test_reduce_scales_detaches_keeps_half_floats_finite_and_knows_no_largest_complex_number(ranks):
    def reduce():
        with pytest.raises(TypeError, match=r"got complex numbers, as value\['x'\], of which none is the largest"):
            operations.reduce({"x": torch.ones(2, dtype=torch.complex64)}, "max")
        weight = torch.ones(2, requires_grad=True)
        large = operations.reduce(torch.tensor([6e4]).half())
        return operations.reduce(weight, "sum", scale=0.25), operations.reduce(weight, "none", 3.0).requires_grad, large

    for num in (1, 2):
        scaled, needs_gradient, large = on_all(ranks, reduce, num)
        assert (scaled.tolist(), scaled.requires_grad, needs_gradient) == ([0.25 * num] * 2, False, False)
        assert large.tolist() == [6e4]


# Tensors that are made equally long on all ranks, and batches that are made divisible by their number.


@pytest.mark.parametrize(("size", "num_processes", "padded"), [(6, 4, 8), (4, 2, 4), (1, 3, 3)])
def test_pad_input_tensors_repeats_the_last_sample(size, num_processes, padded):
    found = operations.pad_input_tensors({"x": torch.arange(size), "none": None}, size, num_processes)
    assert found["x"].tolist() == [min(at, size - 1) for at in range(padded)]


@pytest.mark.parametrize(("options", "expected"), [
    ({"pad_index": -1}, [[0, -1, -1], [1, 1, -1], [2, 2, 2]]),
    ({"pad_first": True}, [[0, 0, 0], [0, 1, 1], [2, 2, 2]]),
    ({"dim": -1, "pad_index": torch.tensor([9])}, [[0, 9, 9], [1, 1, 9], [2, 2, 2]]),
    ({"dim": 1}, [[0], [1, 1], [2, 2, 2]]),
])  # fmt: skip
def test_pad_across_processes_makes_all_as_long_as_the_longest(ranks, options, expected):
    def pad():
        mine = torch.full((this_rank() + 1,), this_rank())
        return operations.pad_across_processes({"x": mine, "none": None}, **options)["x"].tolist()

    assert ranks.run(3, pad) == expected


# The devices on which a group takes tensors, which sends and collectives share but for gloo on GPUs.


@pytest.mark.parametrize(("group", "device", "sends_from", "reduces_on"), [
    ("cpu:gloo,cuda:gloo", "cpu", "cpu", "cpu"), ("cpu:gloo,cuda:gloo", "cuda:1", "cpu", "cuda:1"),
    ("cuda:nccl", "cpu", "cuda:1", "cuda:1"), ("cuda:nccl", "cuda:1", "cuda:1", "cuda:1"),
    ("cpu:gloo,cuda:nccl", "cpu", "cpu", "cpu"), ("cpu:gloo,cuda:nccl", "cuda:1", "cuda:1", "cuda:1"),
])  # fmt: skip
def test_group_sends_and_reduces_where_its_backends_can(monkeypatch, group, device, sends_from, reduces_on):
    monkeypatch.setattr(dist, "get_backend_config", lambda: group)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    given = torch.device(device)
    assert [sending_device(given), collective_device(given)] == [torch.device(sends_from), torch.device(reduces_on)]
