"""Collectives on nested tensors and objects: what ranks do together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from notebook_launcher.training import operations
from tests.training.operations.calls import Record, error_on_all, on_all, this_rank


def test_operations_of_a_single_process_return_their_input():
    data = {"x": torch.tensor(1.0)}
    assert operations.gather(data) is data
    assert operations.broadcast(data) is data
    assert operations.pad_across_processes(data) is data
    assert operations.gather_object("text") == "text"
    assert operations.broadcast_object_list([1]) == [1]
    assert operations.reduce(data, "mean", scale=0.5)["x"] == 0.5
    assert operations.reduce(data)["x"] is not data["x"]


def test_unknown_reduction_names_the_known_ones():
    with pytest.raises(ValueError, match=r"reduction='avg' is unknown. It can be 'sum', 'mean', 'max', 'none'"):
        operations.reduce(torch.ones(1), "avg")


def test_gather_concatenates_in_rank_order(ranks):
    def gather():
        rank = this_rank()
        data = {"x": torch.full((2, 3), rank), "deep": (Record(torch.ones(1, 1) * rank, None), [])}
        gathered = operations.gather(data)
        return gathered["x"], gathered["deep"][0].first, gathered["deep"][0].second

    rows, column, nothing = on_all(ranks, gather)
    everyone = torch.arange(ranks.num_processes)
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


def test_gather_takes_awkward_tensors(ranks):
    def gather(size):
        gathered = {name: operations.gather([make(this_rank()), torch.ones(1)])[0] for name, make in AWKWARD.items()}
        assert not any(tensor.requires_grad for tensor in gathered.values())
        wanted = {name: [torch.atleast_1d(make(r).detach()) for r in range(size)] for name, make in AWKWARD.items()}
        return [name for name in AWKWARD if not torch.equal(gathered[name], torch.cat(wanted[name]))]

    assert on_all(ranks, gather, ranks.num_processes) == []


def test_gather_of_nothing_is_nothing(pair):
    assert on_all(pair, lambda: operations.gather({"x": None, "y": []})) == {"x": None, "y": []}


def test_gather_refuses_what_is_no_tensor(pair):
    error = error_on_all(pair, lambda: operations.gather([torch.ones(1), "text"]))
    assert error.startswith("TypeError: gather got 'text', of type str. It takes tensors")


def test_collectives_return_what_accelerate_returns(pair):
    def compare():
        from accelerate import PartialState
        from accelerate.utils import operations as theirs

        PartialState(cpu=True)
        data: Any = {"x": torch.rand(2, 3), "y": (torch.rand(1), torch.tensor(this_rank()))}
        uneven = [torch.rand(2 + this_rank(), 2)]
        numbers = [1, 2][: 1 + this_rank()]
        return [
            [
                library.gather(data),
                library.gather_object(numbers),
                library.reduce(data["x"], "sum"),
                library.reduce(data["x"]),
                library.reduce(data["x"], "max"),
                library.broadcast(data["x"].clone(), 1),
                library.pad_across_processes(uneven, pad_index=7),
                library.pad_across_processes(uneven, pad_first=True),
                library.broadcast_object_list([this_rank(), 5], from_process=1),
            ]
            for library in (operations, theirs)
        ]

    for ours, theirs in pair.run(compare):
        torch.testing.assert_close(ours, theirs)


def test_gather_object_gives_one_flat_list(ranks):
    gathered = on_all(ranks, lambda: operations.gather_object([{"rank": this_rank()}] * this_rank()))
    assert gathered == [{"rank": rank} for rank in range(ranks.num_processes) for _ in range(rank)]


def test_gather_object_refuses_what_is_no_list(pair):
    error = error_on_all(pair, lambda: operations.gather_object(5))
    assert error == (
        "TypeError: gather_object cannot send what it got: 5 is no list, and gather_object joins lists. Put it into "
        "one: gather_object([...]) on ranks 0, 1."
    )


def test_broadcast_object_list_works_in_place(ranks):
    def broadcast():
        objects = [this_rank(), None]
        same = operations.broadcast_object_list(objects, from_process=1) is objects
        return same, objects

    assert on_all(ranks, broadcast) == (True, [1, None])


def test_broadcast_from_a_process_that_does_not_exist_is_refused(ranks):
    def broadcast():
        refused = []
        for call in (operations.broadcast, operations.broadcast_object_list):
            for source in sources:
                with pytest.raises(ValueError, match="from_process=") as caught:
                    call([torch.zeros(1)], from_process=source)
                refused.append(str(caught.value))
        return refused

    size = ranks.num_processes
    sources: list[Any] = [size, -1, "0"]
    largest = f"from_process={size} is too large; it must be {size - 1} or less."
    assert on_all(ranks, broadcast)[:3] == [
        largest,
        "from_process=-1 is too small; it must be 0 or more.",
        "from_process='0' is a str; it must be a whole number.",
    ]


def test_broadcast_overwrites_the_tensors_it_was_given(ranks):
    def broadcast():
        rank = this_rank()
        rows, flags = torch.full((3, 2), rank).t(), torch.tensor([rank == 1])
        weight = torch.nn.Parameter(torch.full((2,), float(rank)))
        one = torch.tensor([rank]).expand(3)
        result = operations.broadcast([rows, flags, weight, one], from_process=1)
        same = [new is old for new, old in zip(result, (rows, flags, weight, one), strict=True)]
        return same, [tensor.detach() for tensor in result]

    same, (rows, flags, weight, one) = on_all(ranks, broadcast)
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

    size = ranks.num_processes
    expected = [(reduction, dtype, value(size), result) for reduction, dtype, value, result in REDUCED]
    assert on_all(ranks, reduce) == expected


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


def test_reduce_none_keeps_each_rank_s_own(ranks):
    results = ranks.run(lambda: operations.reduce(torch.tensor([this_rank()]), "none").item())
    assert list(results) == list(range(ranks.num_processes))
