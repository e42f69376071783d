"""Batches that rank 0 reads and deals out: what each rank gets, of whatever type."""

from __future__ import annotations

import collections
import dataclasses
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from notebook_launcher.training.data import Round, gather_for_metrics, prepare_data_loader, skip_first_batches
from notebook_launcher.training.data.dispatching import Portions
from notebook_launcher.training.data.rows import count_rows, join_batches, take_rows
from tests.support.toy_training import sessions_fixture

ranks = sessions_fixture(2)


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    names: list[str]


class Opaque:
    """Tensors in a type of the user's, which can be moved."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def to(self, device: Any) -> Opaque:
        return Opaque(self.values.to(device))


class Given(IterableDataset[Any]):
    """Batches, ready made, on rank 0 alone."""

    def __init__(self, batches: list[Any], touched: list[int] | None = None) -> None:
        self.batches = batches

    def __iter__(self):
        assert not dist.is_initialized() or dist.get_rank() == 0
        return iter(self.batches)


def deal(sizes: list[int], **options: Any) -> list[tuple[list[list[int]], Round]]:
    """Deal out batches of these sizes, counted on."""
    batches, count = [], 0
    for size in sizes:
        batches.append((torch.arange(count, count + size), count + size))
        count += size
    portions = Portions(**options)
    return [([part.tolist() for part in parts], drawn) for parts, drawn, _ in portions.deal(batches)]


@pytest.mark.parametrize(
    ("sizes", "options", "last"),
    [
        ([4, 4, 4, 2], {}, ([[8, 9, 10], [11, 12, 13]], Round((3, 3), (3, 3), (3, 3)))),
        ([4, 4, 3], {}, ([[8, 9], [10, 0]], Round((2, 2), (2, 1), (2, 2)))),
        ([4, 4, 3], {"even": False}, ([[8, 9, 10], [8, 9, 10]], Round((3, 3), (3, 0), (3, 0)))),
        ([4, 4, 3], {"even": False, "uneven": "stop"}, ([[0, 1, 2, 3], [4, 5, 6, 7]], Round((4, 4), (4, 4), (4, 4)))),
        ([4, 4, 3], {"drop_last": True}, ([[0, 1, 2, 3], [4, 5, 6, 7]], Round((4, 4), (4, 4), (4, 4)))),
        ([1], {}, ([[0], [0]], Round((1, 1), (1, 0), (1, 1)))),
        ([4, 3], {"split": True}, ([[4, 5], [6, 0]], Round((2, 2), (2, 1), (2, 2)))),
        ([4, 3], {"split": True, "even": False}, ([[4, 5], [6]], Round((2, 1), (2, 1), (2, 1)))),
        ([4, 1], {"split": True, "even": False}, ([[4], [4]], Round((1, 1), (1, 0), (1, 0)))),
        ([4, 1], {"split": True, "even": False, "uneven": "stop"}, ([[0, 1], [2, 3]], Round((2, 2), (2, 2), (2, 2)))),
    ],
)
def test_last_round_is_completed_by_policy(sizes, options, last):
    assert deal(sizes, num_processes=2, **options)[-1] == last


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("num_processes", [2, 3])
def test_short_batches_in_the_middle_lose_nothing(num_processes, split):
    # Workers that come to an end of their own leave such; Accelerate drops samples there.
    for even in (False, True):
        rounds = deal([4, 1, 3, 3, 2, 3, 3], num_processes=num_processes, split=split, even=even)
        real = [
            sample
            for parts, drawn in rounds
            for part, count in zip(parts, drawn.real, strict=True)
            for sample in part[:count]
        ]
        assert real == list(range(19))
        for parts, drawn in rounds:
            assert tuple(map(len, parts)) == drawn.rows


def test_batches_that_cannot_be_joined_are_dealt_out_whole():
    batches = [(torch.zeros(3, width), 3 * width) for width in (3, 4, 5)]
    rounds = [(parts, drawn) for parts, drawn, _ in Portions(num_processes=2).deal(batches)]
    assert [[tuple(part.shape) for part in parts] for parts, _ in rounds] == [[(3, 3), (3, 4)], [(3, 5), (3, 5)]]
    assert rounds[1][1] == Round((3, 3), (3, 0), (3, 3))
    texts: list[tuple[Any, int]] = [(Opaque(torch.zeros(2)), 2)] * 3
    assert len(list(Portions(num_processes=2).deal(texts))) == 2


def test_rows_of_every_kind_are_cut_and_joined():
    batch = {"x": torch.arange(4), "names": ["a", "b", "c", "d"], "scale": torch.tensor(2.0), "task": "sum", "n": None}
    assert count_rows(batch) == 4
    assert count_rows([["a", "b"], "c"]) == 2
    assert count_rows("a") == 1
    part = take_rows(batch, 1, 3, 4)
    assert part["x"].tolist() == [1, 2]
    assert {key: part[key] for key in ("names", "task", "n")} == {"names": ["b", "c"], "task": "sum", "n": None}
    joined = join_batches([part, batch])
    assert joined["x"].tolist() == [1, 2, 0, 1, 2, 3]
    assert (joined["names"], joined["task"]) == ([*"bcabcd"], "sum")
    record = join_batches([Record(torch.zeros(1), ["a"]), Record(torch.ones(2), ["b", "c"])])
    assert (record.x.tolist(), record.names) == ([0, 1, 1], [*"abc"])


def test_values_that_cannot_be_cut_or_joined_are_named():
    with pytest.raises(TypeError, match=r"holds a Opaque, which cannot be cut.*slice_fn_for_dispatch="):
        take_rows(Opaque(torch.zeros(4)), 0, 2, 4)
    with pytest.raises(TypeError, match=r"batches that hold an Opaque cannot be joined .* dispatch_batches=False"):
        join_batches([Opaque(torch.zeros(4))] * 2)


Point = collections.namedtuple("Point", "x y")  # noqa: PYI024 - the type that must be kept


def batches_of_all_kinds() -> list[Any]:
    base = torch.arange(8)
    return [
        base,
        Point(base[::2], [base.bfloat16(), "text"]),
        collections.UserDict(ids=base.view(2, 4).T, mask=base > 3, meta={"epoch": 1}),
        Record(base.to(torch.complex64), ["a"] * 8),
        Opaque(base),
        [base[:0], torch.tensor(3), None, 2.5],
        torch.nn.Parameter(base.float()),
        ["only", "texts"],
    ]


def look_alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (Opaque, Record)):
        return type(one) is type(other) and look_alike(vars(one), vars(other))
    if isinstance(one, (dict, collections.UserDict)):
        return type(one) is type(other) and all(look_alike(one[key], other[key]) for key in {*one, *other})
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and all(map(look_alike, one, other))
    return bool(one == other)


def test_types_and_values_arrive_as_they_were(ranks):
    def receive() -> list[bool]:
        given = [batch for batch in batches_of_all_kinds() for _ in range(2)] if dist.get_rank() == 0 else []
        loader = prepare_data_loader(DataLoader(Given(given), batch_size=None), dispatch_batches=True)
        return [look_alike(batch, wanted) for batch, wanted in zip(loader, batches_of_all_kinds(), strict=True)]

    assert ranks.run(2, receive) == [[True] * 8] * 2


def test_every_rank_gets_its_slice(ranks):
    def receive() -> list[Any]:
        batch = {"x": torch.arange(5), "names": [*"abcde"], "task": "sum"}
        loader = prepare_data_loader(
            DataLoader(Given([batch]), batch_size=None), dispatch_batches=True, even_batches=False
        )
        whole = next(iter(loader))
        loader = prepare_data_loader(
            DataLoader(Given([batch] * 2), batch_size=None), dispatch_batches=True, slice_fn_for_dispatch=cut
        )
        return [whole["x"].tolist(), next(iter(loader))["names"]]

    def cut(batch: Any, bounds: slice, process_index: int, num_processes: int) -> Any:
        return {"names": f"{batch['names'][bounds]} for {process_index} of {num_processes}"}

    assert ranks.run(2, receive) == [
        [[0, 1, 2, 3, 4], f"{[*'abcde']} for 0 of 2"],
        [[0, 1, 2, 3, 4], f"{[*'abcde']} for 1 of 2"],
    ]


def test_parts_go_in_batches_which_share_the_connections_of_the_group(ranks):
    """With NCCL a send or a receive by itself makes a communicator for its pair of ranks."""

    def count() -> list[set[str]]:
        sent = []
        batch_isend_irecv = dist.batch_isend_irecv

        def note(operations: list[Any]) -> Any:
            sent.append({operation.op.__name__ for operation in operations})
            return batch_isend_irecv(operations)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "batch_isend_irecv", note)
            for name in ("send", "recv"):
                patch.setattr(dist, name, None)
            batches = [torch.arange(4.0)] * 2
            list(prepare_data_loader(DataLoader(Given(batches), batch_size=None), dispatch_batches=True))
        return sent

    assert ranks.run(2, count) == [[{"isend"}] * 2, [{"irecv"}] * 2]


class Broken(Given):
    def __init__(self, good: int, error: Exception) -> None:
        self.good, self.error = good, error

    def __iter__(self):
        yield from range(self.good)
        raise self.error


class UnpicklableError(Exception):
    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


@pytest.mark.parametrize("good", [0, 4, 5])
def test_exception_in_the_data_set_reaches_every_rank(ranks, good):
    def fail() -> int:
        loader = prepare_data_loader(DataLoader(Broken(good, ZeroDivisionError("by zero"))), dispatch_batches=True)
        seen = 0
        with pytest.raises(ZeroDivisionError, match="by zero"):
            for _ in loader:
                seen += 1
        assert loader.active_loaders.loaders == []
        return seen

    assert ranks.run(2, fail) == [good // 2] * 2


def test_unpicklable_exceptions_and_batches_reach_every_rank_as_errors(ranks):
    def fail(batches: Any) -> str:
        loader = prepare_data_loader(DataLoader(batches, batch_size=None), dispatch_batches=True)
        with pytest.raises(Exception, match="lock") as caught:
            list(loader)
        return type(caught.value).__name__

    assert ranks.run(2, lambda: fail(Broken(0, UnpicklableError()))) == ["UnpicklableError", "RuntimeError"]
    assert ranks.run(2, lambda: fail(Given([threading.Lock()] * 2))) == ["TypeError"] * 2


def test_rounds_are_skipped_on_all_ranks(ranks):
    def rest() -> list[Any]:
        seen = []
        for data in (Given(list(range(20))), torch.arange(20)):
            loader = prepare_data_loader(DataLoader(data, batch_size=3), dispatch_batches=True)  # type: ignore[arg-type]
            skipped = skip_first_batches(loader, 2)
            seen.append([sample for batch in skipped for sample in gather_for_metrics(batch, skipped).tolist()])
        return seen

    assert ranks.run(2, rest) == [[list(range(12, 20))] * 2] * 2


def test_leaving_a_loop_on_all_ranks_leaves_them_in_step(ranks):
    def leave() -> list[Any]:
        loader = prepare_data_loader(DataLoader(Given(list(range(20))), batch_size=3), dispatch_batches=True)
        first = next(iter(loader)).tolist()
        return [first, [batch.tolist() for batch in loader][0]]  # noqa: RUF015 - the whole loop

    assert ranks.run(2, leave) == [[[0, 1, 2]] * 2, [[3, 4, 5]] * 2]
