"""Operations on values that differ between ranks: matched by name, gathered at any length, or refused on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from notebook_launcher.training import operations
from notebook_launcher.training.data.metrics import gather_for_metrics
from tests.training.operations.calls import Record, on_all, this_rank

if TYPE_CHECKING:
    from collections.abc import Callable


def in_turn(rank: int, **values: Any) -> dict[str, Any]:
    """A dictionary that odd ranks fill from its end."""
    return dict(list(values.items())[:: -1 if rank % 2 else 1])


def full(rows: int, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((rows, 2), value, dtype=dtype)


MATCHED: dict[str, tuple[Callable[[int], Any], Any]] = {
    "order of a dictionary": (
        lambda rank: operations.gather(in_turn(rank, loss=torch.tensor(rank), accuracy=torch.tensor(7))),
        {"loss": [0, 1], "accuracy": [7, 7]},
    ),
    "reduced": (
        lambda rank: operations.reduce(in_turn(rank, cats=torch.tensor(rank), dogs=torch.tensor(10)), "sum"),
        {"cats": 1, "dogs": 20},
    ),
    "broadcast": (
        lambda rank: operations.broadcast(in_turn(rank, cats=torch.tensor(rank), dogs=torch.tensor(10)), 1),
        {"cats": 1, "dogs": 10},
    ),
    "padded": (
        lambda rank: operations.gather(
            operations.pad_across_processes(in_turn(rank, x=torch.ones(1, 1 + rank), y=torch.ones(1, 3 - rank)), 1)
        ),
        {"x": [[1, 0], [1, 1]], "y": [[1, 1, 1], [1, 1, 0]]},
    ),
    "lengths of two": (
        lambda rank: operations.gather((torch.full((3 - 2 * rank,), 0.9), torch.full((1 + 2 * rank,), 0.1))),
        ([pytest.approx(0.9)] * 4, [pytest.approx(0.1)] * 4),
    ),
    "bytes that no float32 starts at": (
        lambda rank: operations.gather([torch.ones(1 + 2 * rank, dtype=torch.bool), full(1 + rank, rank)]),
        [[True] * 4, [[0, 0], [1, 1], [1, 1]]],
    ),
    "long": (
        lambda rank: operations.gather(torch.full((300_000 * (1 + rank),), rank)).bincount(),
        [300_000, 600_000],
    ),
    "more tensors than numbers in a message": (
        lambda rank: operations.gather([torch.full((at * rank,), at) for at in range(20)])[19],
        [19] * 19,
    ),
    "keys without a repr of their own": (
        lambda rank: list(operations.gather({object(): torch.tensor(rank)}.copy()).values()),
        [[0, 1]],
    ),
    "lists beside tensors, in another order": (
        lambda rank: gather_for_metrics(in_turn(rank, x=torch.ones(rank, 1), names=["a"] * rank, n=rank), None),
        {"x": [[1]], "names": ["a"], "n": [0, 1]},
    ),
    "no objects on a rank": (
        lambda rank: gather_for_metrics((["a", "b"][: 2 * rank], [None, "c"][rank:]), None),
        (["a", "b"], [None, "c", "c"]),
    ),
}


def test_values_are_matched_by_name_and_gathered_at_any_length(ranks):
    calls = {name: call for name, (call, _) in MATCHED.items()}
    results = on_all(ranks, lambda: {name: operations.listify(call(this_rank())) for name, call in calls.items()})
    assert results == {name: expected for name, (_, expected) in MATCHED.items()}


REFUSED: dict[str, tuple[Callable[[int], Any], list[str]]] = {
    "names": (
        lambda rank: operations.gather({"loss": torch.ones(1), ("cats", "dogs")[rank]: torch.ones(2, 3)}),
        [
            "DistributedOperationException: gather needs values that fit together on all ranks, and these differ:",
            "  value['cats']: float32 [2, 3] on rank 0, nothing on rank 1",
            "  value['dogs']: nothing on rank 0, float32 [2, 3] on rank 1",
            "All ranks must pass the same names",
        ],
    ),
    "dtypes": (
        lambda rank: operations.gather([Record(torch.ones(2, dtype=(torch.float32, torch.float16)[rank]))]),
        ["  value[0].first: float32 [2] on rank 0, float16 [2] on rank 1", "Give all ranks one dtype"],
    ),
    "other lengths": (
        lambda rank: operations.gather(torch.ones(2, 3 + rank)),
        ["  value: float32 [2, 3] on rank 0, float32 [2, 4] on rank 1", "pad_across_processes(tensor, dim=1)"],
    ),
    "lengths of what is reduced": (
        lambda rank: operations.reduce(torch.ones(1 + rank)),
        ["  value: float32 [1] on rank 0, float32 [2] on rank 1", "Shapes must be equal on all ranks."],
    ),
    "an empty container": (
        lambda rank: operations.gather({"x": [torch.ones(1)] * rank}),
        ["  value['x']: [] on rank 0, nothing on rank 1", "  value['x'][0]: nothing on rank 0, float32 [1] on rank 1"],
    ),
    "a sparse tensor": (
        lambda rank: operations.gather((torch.eye(2), torch.eye(2).to_sparse())[rank]),
        ["  value: float32 [2, 2] on rank 0, sparse_coo float32 [2, 2] on rank 1"],
    ),
    "sparse tensors": (
        lambda _rank: operations.reduce([torch.eye(2).to_sparse()]),
        ["TypeError: reduce got sparse_coo float32 [2, 2], a sparse tensor. Pass tensor.to_dense() instead."],
    ),
    "operations": (
        lambda rank: (operations.gather, operations.reduce)[rank](torch.ones(1)),
        ["The ranks called different operations: gather on rank 0, reduce(reduction='mean') on rank 1."],
    ),
    "reductions": (
        lambda rank: operations.reduce(torch.ones(1), ("sum", "max")[rank]),
        ["reduce(reduction='sum') on rank 0, reduce(reduction='max') on rank 1"],
    ),
    "lists of objects": (
        lambda rank: operations.broadcast_object_list([None] * (1 + rank)),
        ["  object_list: 1 items on rank 0, 2 items on rank 1"],
    ),
    "an object that cannot be sent": (
        lambda rank: operations.gather_object([(lambda: 0) if rank else 0]),
        ["TypeError: gather_object cannot send what it got: Can't", "on rank 1."],
    ),
    "objects beside tensors": (
        lambda rank: gather_for_metrics({"x": ([torch.ones(1)], ["a"])[rank]}, None),
        ["  value['x']: nothing on rank 0, ['a'] on rank 1"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_do_not_fit_are_an_error_on_all_ranks(ranks, name):
    call, words = REFUSED[name]
    error = ranks.error(2, lambda: call(this_rank()))
    assert [each for each in words if each not in error] == [], error


def test_an_error_groups_ranks_and_shortens_lists(ranks):
    def gather():
        return operations.gather({str(at): torch.ones(1 + at, 2 if this_rank() == 1 else 3) for at in range(7)})

    lines = ranks.error(3, gather).splitlines()
    assert lines[1] == "  value['0']: float32 [1, 3] on ranks 0, 2, float32 [1, 2] on rank 1"
    assert lines[6] == "  and 2 more"
