"""Nested tensors: what one process does to a batch, and what ranks do together."""

from __future__ import annotations

import collections
import dataclasses
import os
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from notebook_launcher.training import operations
from tests.support.toy_training import session_fixture

if TYPE_CHECKING:
    from notebook_launcher import Session


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    first: Any
    second: Any = None


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


pair = session_fixture(2)


trio = session_fixture(3)


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest, pair: Session, trio: Session) -> Session:
    return pair if request.param == 2 else trio


def as_tensors(data: Any) -> Any:
    return operations.recursively_apply(torch.tensor, data, test_type=lambda leaf: isinstance(leaf, int))


# One process


@pytest.mark.parametrize("data", CONTAINERS, ids=lambda data: type(data).__name__)
def test_containers_keep_their_type(data):
    tensors = as_tensors(data)
    assert type(tensors) is type(data)
    assert operations.listify(tensors) == data
    assert next(operations.find_tensors(tensors)).shape == ()


def test_default_dict_keeps_its_factory():
    assert as_tensors(collections.defaultdict(list, a=1))["b"] == []


def test_batch_encoding_keeps_what_else_it_holds():
    from transformers import BatchEncoding

    batch = BatchEncoding({"ids": torch.ones(2, 2)}, n_sequences=2)
    halves = operations.slice_tensors(batch, slice(0, 1))
    assert (type(halves), halves.n_sequences, halves["ids"].shape) == (BatchEncoding, 2, (1, 2))


def test_fields_that_init_does_not_take_are_replaced_too():
    moved = operations.send_to_device(Derived(torch.ones(2)), "meta")
    assert (moved.first.device.type, moved.twice.device.type) == ("meta", "meta")


def test_torch_return_types_are_kept():
    values = operations.slice_tensors(torch.ones(3, 2).max(dim=1), slice(0, 2))
    assert type(values).__name__ == "max"
    assert values.indices.shape == (2,)


def test_honor_type_takes_a_generator():
    assert operations.honor_type(Pair(0, 0), (n for n in (1, 2))) == Pair(1, 2)
    assert operations.honor_type([], (n for n in (1, 2))) == [1, 2]


def test_a_number_is_refused_with_the_tensor_to_write():
    with pytest.raises(TypeError, match=r"got 3, of type int\..*write torch.tensor\(3\)"):
        operations.recursively_apply(lambda tensor: tensor, 3, error_on_other_type=True)


def test_leaves_that_are_not_tensors_stay_or_are_refused():
    def double(tensor):
        return tensor * 2

    assert operations.recursively_apply(double, ["text", None]) == ["text", None]
    with pytest.raises(TypeError, match=r"double got 'text', of type str\. It takes tensors.*gather_object"):
        operations.recursively_apply(double, ["text"], error_on_other_type=True)


def test_more_arguments_reach_the_function():
    assert operations.recursively_apply(torch.add, [torch.tensor(1)], 2, alpha=3) == [torch.tensor(7)]


def test_send_to_device_moves_what_can_be_moved():
    data = {"x": torch.ones(2), "names": ["a"], "deep": (torch.ones(1), Record(torch.ones(1))), "own": Movable()}
    moved = operations.send_to_device(data, torch.device("meta"), non_blocking=True)
    assert [tensor.device.type for tensor in operations.find_tensors(moved)] == ["meta"] * 3
    assert moved["own"].device == "meta"
    assert moved["names"] == ["a"]


@pytest.mark.parametrize("skip", ["x", ["x", "first"]])
def test_send_to_device_skips_keys(skip):
    data = {"x": torch.ones(2), "deep": [{"x": torch.ones(2), "y": torch.ones(2)}, Record(torch.ones(2))]}
    moved = operations.send_to_device(data, "meta", skip_keys=skip)
    kept = [tensor.device.type for tensor in operations.find_tensors(moved)]
    assert kept == ["cpu", "cpu", "meta", "meta" if skip == "x" else "cpu"]


def test_send_to_device_skips_keys_of_a_mapping_that_moves_itself():
    from transformers import BatchEncoding

    batch = BatchEncoding({"x": torch.ones(2), "y": torch.ones(2)})
    moved = operations.send_to_device(batch, "meta", skip_keys="x")
    assert (moved["x"].device.type, moved["y"].device.type) == ("cpu", "meta")


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (torch.ones(3, 2), 3),
        ({"loss": torch.tensor(1.0), "names": ["a"], "x": [torch.ones(4)]}, 4),
        (Record(None, torch.ones(5)), 5),
        ([], None),
        (torch.tensor(1), None),
        ("text", None),
    ],
)
def test_find_batch_size(data, size):
    assert operations.find_batch_size(data) == size


def test_device_of_the_first_tensor_is_found():
    assert operations.find_device([1, {"x": torch.ones(1, device="meta")}]) == torch.device("meta")
    assert operations.find_device([1]) is None


def test_slice_tensors_leaves_the_rest_alone():
    data = {"x": torch.arange(4), "loss": torch.tensor(2.0), "names": ["a", "b"]}
    cut = operations.slice_tensors(data, slice(1, 3), process_index=0, num_processes=2)
    assert operations.listify(cut) == {"x": [1, 2], "loss": 2.0, "names": ["a", "b"]}


@pytest.mark.parametrize("wrap", [list, tuple, lambda parts: Pair(*parts), lambda parts: Record(*parts)])
def test_concatenate_joins_by_position(wrap):
    first, second = wrap([torch.ones(2), torch.tensor(1)]), wrap([torch.ones(1), torch.tensor(2)])
    joined = operations.concatenate([first, second])
    assert type(joined) is type(first)
    assert operations.listify(joined) == wrap([[1.0, 1.0, 1.0], [1, 2]])


def test_concatenate_joins_mappings_along_any_dimension():
    joined = operations.concatenate([{"x": torch.ones(1, 2)}, {"x": torch.ones(1, 3)}], dim=1)
    assert joined["x"].shape == (1, 5)


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


def test_structure_is_enough_to_make_tensors_of_the_same_shape():
    data = {"x": torch.ones(2, 3), "y": [torch.ones(1, dtype=torch.int8), "text"]}
    made = operations.initialize_tensors(operations.get_data_structure(data))
    assert [(tensor.shape, tensor.dtype) for tensor in operations.find_tensors(made)] == [
        ((2, 3), torch.float32),
        ((1,), torch.int8),
    ]
    assert made["y"][1] == "text"


@pytest.mark.parametrize(("size", "num_processes", "padded"), [(3, 4, 4), (6, 4, 8), (4, 2, 4), (5, 2, 6), (1, 3, 3)])
def test_pad_input_tensors_repeats_the_last_sample(size, num_processes, padded):
    data = {"x": torch.arange(size), "none": None}
    assert operations.pad_input_tensors(data, size, num_processes)["x"].tolist() == [
        min(at, size - 1) for at in range(padded)
    ]


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


# Ranks


def this_rank() -> int:
    return int(os.environ["RANK"])


def on_all(session: Session, function: Any, *args: Any) -> Any:
    """Run on all ranks and return what all of them returned."""
    first, *others = session.run(function, args=args)
    assert [operations.listify(other) for other in others] == [operations.listify(first)] * len(others)
    return first


def error_on_all(session: Session, function: Any) -> str:
    """Return the error that all ranks raise; they keep their group, since the run itself succeeds."""

    def run():
        try:
            return f"nothing failed: {function()!r}"
        except (TypeError, ValueError, operations.DistributedOperationException) as error:
            return f"{type(error).__name__}: {error}"

    return str(on_all(session, run))


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
    assert error == "TypeError: gather_object got 5, but joins lists. Put it into a list: gather_object([...])."


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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[0, 0, 0], [1, 1, 0], [2, 2, 2]]),
        ({"pad_index": -1}, [[0, -1, -1], [1, 1, -1], [2, 2, 2]]),
        ({"pad_first": True}, [[0, 0, 0], [0, 1, 1], [2, 2, 2]]),
        ({"dim": -1, "pad_index": torch.tensor([9])}, [[0, 9, 9], [1, 1, 9], [2, 2, 2]]),
        ({"dim": 1}, [[0], [1, 1], [2, 2, 2]]),
    ],
)
def test_pad_across_processes(trio, options, expected):
    def pad():
        mine = torch.full((this_rank() + 1,), this_rank())
        return operations.pad_across_processes({"x": mine, "none": None}, **options)["x"].tolist()

    assert list(trio.run(pad)) == expected


def test_pad_across_processes_pads_several_tensors_along_one_dimension(pair):
    def pad():
        n = this_rank() + 1
        padded = operations.pad_across_processes(
            [torch.ones(2, n, dtype=torch.bool), torch.tensor(1), torch.ones(n, 2)], 1
        )
        return [tensor.tolist() for tensor in padded]

    first, second = pair.run(pad)
    assert first == [[[True, False]] * 2, 1, [[1, 1]]]
    assert second == [[[True, True]] * 2, 1, [[1, 1], [1, 1]]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_pad_across_processes_refuses_nested_tensors(pair):
    def pad():
        operations.pad_across_processes(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]))

    assert error_on_all(pair, pad).startswith("ValueError: pad_across_processes got a nested tensor of 2 parts")


def in_debug_mode(function: Any) -> Any:
    def run():
        os.environ["ACCELERATE_DEBUG_MODE"] = "1"
        try:
            return function(this_rank())
        finally:
            del os.environ["ACCELERATE_DEBUG_MODE"]

    return run


MISFITS = {
    "gather": lambda rank: operations.gather({"x": torch.ones(2 + rank, 3)}),
    "reduce": lambda rank: operations.reduce(torch.ones(2).to(torch.int64 if rank else torch.float32)),
    "broadcast": lambda rank: operations.broadcast([torch.ones(1)] * (1 + rank)),
    "pad_across_processes": lambda rank: operations.pad_across_processes(torch.ones([2] * (1 + rank))),
}


@pytest.mark.parametrize("name", MISFITS)
def test_debug_mode_lists_the_value_of_each_process(pair, name):
    error = error_on_all(pair, in_debug_mode(MISFITS[name]))
    assert error.startswith(f"DistributedOperationException: {name} needs tensors that agree on all processes")
    first, second = error.splitlines()[1:3]
    assert first.startswith("  process 0: ")
    assert second.startswith("  process 1: ")
    assert first[13:] != second[13:]


def test_debug_mode_lets_what_fits_pass(pair):
    def work(rank):
        padded = operations.pad_across_processes(torch.ones(1 + rank))
        return operations.gather(padded).tolist()

    assert on_all(pair, in_debug_mode(work)) == [1.0, 0.0, 1.0, 1.0]
