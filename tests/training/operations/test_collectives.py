"""Collectives on nested tensors and objects: what ranks do together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from notebook_launcher.training import operations
from notebook_launcher.training.operations.checking import collective_device, sending_device
from tests.training.operations.calls import Record, on_all, this_rank


def test_operations_of_a_single_process_return_their_input():
    data = {"x": torch.tensor(1.0)}
    assert operations.gather(data) is data
    assert operations.broadcast(data) is data
    assert operations.pad_across_processes(data) is data
    assert operations.gather_object("text") == "text"
    assert operations.broadcast_object_list([1]) == [1]
    assert operations.reduce(data, "mean", scale=0.5)["x"] == 0.5
    assert operations.reduce(data)["x"] is not data["x"]


def test_gather_concatenates_in_rank_order(trio):
    def gather():
        rank = this_rank()
        data = {"x": torch.full((2, 3), rank), "deep": (Record(torch.ones(1, 1) * rank, None), [])}
        gathered = operations.gather(data)
        return gathered["x"], gathered["deep"][0].first, gathered["deep"][0].second

    rows, column, nothing = on_all(trio, gather)
    everyone = torch.arange(3)
    assert torch.equal(rows, everyone.repeat_interleave(2)[:, None].repeat(1, 3))
    assert torch.equal(column, everyone[:, None].float())
    assert nothing is None


def test_complex_numbers_have_no_maximum_on_any_number_of_ranks(pair):
    def reduce() -> None:
        with pytest.raises(TypeError, match=r"got complex numbers, as value\['x'\], of which none is the largest"):
            operations.reduce({"x": torch.ones(2, dtype=torch.complex64)}, "max")

    reduce()
    on_all(pair, reduce)


DTYPES = ["bool", "uint8", "int16", "int64", "float16", "bfloat16", "float64", "complex64", "float8_e4m3fn"]


def test_gather_takes_every_dtype_at_once(pair):
    def gather():
        return operations.gather([torch.tensor([this_rank(), 1, 0]).to(getattr(torch, name)) for name in DTYPES])

    for name, tensor in zip(DTYPES, on_all(pair, gather), strict=True):
        expected = torch.tensor([0, 1, 0, 1, 1, 0]).to(getattr(torch, name))
        assert tensor.dtype == expected.dtype
        assert tensor.tolist() == expected.tolist()


AWKWARD = {
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


def test_gather_takes_awkward_tensors(trio):
    def gather(size):
        gathered = {name: operations.gather([make(this_rank()), torch.ones(1)])[0] for name, make in AWKWARD.items()}
        assert not any(tensor.requires_grad for tensor in gathered.values())
        wanted = {name: [torch.atleast_1d(make(r).detach()) for r in range(size)] for name, make in AWKWARD.items()}
        return [name for name in AWKWARD if not torch.equal(gathered[name], torch.cat(wanted[name]))]

    assert on_all(trio, gather, 3) == []


def test_gather_object_gives_one_flat_list(trio):
    gathered = on_all(trio, lambda: operations.gather_object([{"rank": this_rank()}] * this_rank()))
    assert gathered == [{"rank": rank} for rank in range(3) for _ in range(rank)]


def test_broadcast_overwrites_the_tensors_it_was_given(trio):
    def broadcast():
        rank = this_rank()
        rows, flags = torch.full((3, 2), rank).t(), torch.tensor([rank == 1])
        weight = torch.nn.Parameter(torch.full((2,), float(rank)))
        one = torch.tensor([rank]).expand(3)
        result = operations.broadcast([rows, flags, weight, one], from_process=1)
        same = [new is old for new, old in zip(result, (rows, flags, weight, one), strict=True)]
        return same, [tensor.detach() for tensor in result]

    same, (rows, flags, weight, one) = on_all(trio, broadcast)
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


def test_reduce_returns_sum_mean_or_max(trio):
    def reduce():
        results = []
        for reduction, dtype, _, _ in REDUCED:
            mine = torch.tensor([this_rank()]).to(getattr(torch, dtype))
            before = mine.clone()
            reduced = operations.reduce({"x": mine}, reduction)["x"]
            assert torch.equal(mine, before)
            results.append((reduction, dtype, reduced.item(), str(reduced.dtype).removeprefix("torch.")))
        return results

    size = 3
    expected = [(reduction, dtype, value(size), result) for reduction, dtype, value, result in REDUCED]
    assert on_all(trio, reduce) == expected


@pytest.mark.parametrize(("reduction", "dtype", "value", "result"), REDUCED)
def test_reduce_alone_gives_the_dtypes_of_several_ranks(reduction, dtype, value, result):
    reduced = operations.reduce(torch.tensor([value(1)]).to(getattr(torch, dtype)), reduction)
    assert str(reduced.dtype) == f"torch.{result}"


def test_mean_of_large_half_floats_is_finite(pair):
    assert on_all(pair, lambda: operations.reduce(torch.tensor([6e4]).half())).tolist() == [6e4]


def test_reduce_scales_and_detaches(pair):
    def reduce():
        weight = torch.ones(2, requires_grad=True)
        return operations.reduce(weight, "sum", scale=0.25), operations.reduce(weight, "none", 3.0).requires_grad

    scaled, needs_gradient = on_all(pair, reduce)
    assert (scaled.tolist(), scaled.requires_grad, needs_gradient) == ([0.5, 0.5], False, False)


# Tensors that are made equally long on all ranks, and batches that are made divisible by their number.


@pytest.mark.parametrize(("size", "num_processes", "padded"), [(6, 4, 8), (4, 2, 4), (1, 3, 3)])
def test_pad_input_tensors_repeats_the_last_sample(size, num_processes, padded):
    data = {"x": torch.arange(size), "none": None}
    assert operations.pad_input_tensors(data, size, num_processes)["x"].tolist() == [
        min(at, size - 1) for at in range(padded)
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"pad_index": -1}, [[0, -1, -1], [1, 1, -1], [2, 2, 2]]),
        ({"pad_first": True}, [[0, 0, 0], [0, 1, 1], [2, 2, 2]]),
        ({"dim": -1, "pad_index": torch.tensor([9])}, [[0, 9, 9], [1, 1, 9], [2, 2, 2]]),
        ({"dim": 1}, [[0], [1, 1], [2, 2, 2]]),
    ],
)
def test_pad_across_processes_makes_all_as_long_as_the_longest(trio, options, expected):
    def pad():
        mine = torch.full((this_rank() + 1,), this_rank())
        return operations.pad_across_processes({"x": mine, "none": None}, **options)["x"].tolist()

    assert list(trio.run(pad)) == expected


# The devices on which a group takes tensors, which sends and collectives share but for gloo on GPUs.


@pytest.mark.parametrize(
    ("group", "device", "sends_from", "reduces_on"),
    [
        ("cpu:gloo,cuda:gloo", "cpu", "cpu", "cpu"),
        ("cpu:gloo,cuda:gloo", "cuda:1", "cpu", "cuda:1"),
        ("cuda:nccl", "cpu", "cuda:1", "cuda:1"),
        ("cuda:nccl", "cuda:1", "cuda:1", "cuda:1"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda:1", "cuda:1", "cuda:1"),
    ],
)
def test_group_sends_and_reduces_where_its_backends_can(monkeypatch, group, device, sends_from, reduces_on):
    monkeypatch.setattr(dist, "get_backend_config", lambda: group)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    given = torch.device(device)
    assert [sending_device(given), collective_device(given)] == [torch.device(sends_from), torch.device(reduces_on)]
