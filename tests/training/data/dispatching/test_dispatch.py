"""Batches that rank 0 reads and deals out: what each rank gets, of whatever type."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from notebook_launcher import Accelerator
from notebook_launcher.training.data.dispatching import Portions
from notebook_launcher.training.data.metrics import gather_for_metrics
from notebook_launcher.training.data.prepare import prepare_data_loader, skip_first_batches
from notebook_launcher.training.data.rows import (
    CountedBatch,
    CountingCollate,
    Round,
    counted,
    join_batches,
    take_rows,
)
from tests.support.toy_loaders import Opaque

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.support.toy_training import Sessions


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    names: list[str]


class Given(IterableDataset[Any]):
    """Batches, ready made, on rank 0 alone."""

    def __init__(self, batches: list[Any]) -> None:
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
    assert [counted(each).rows for each in (batch, [["a", "b"], "c"], "a")] == [4, 2, 1]
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


def test_exceptions_in_the_data_set_and_unpicklable_batches_reach_every_rank(ranks):
    def fail(data: Any, **options: Any) -> tuple[int, str]:
        loader = prepare_data_loader(DataLoader(data, **options), dispatch_batches=True)
        seen = 0
        with pytest.raises(Exception, match=r"by zero|lock") as caught:
            for _ in loader:
                seen += 1
        assert loader.active_loaders.loaders == []
        return seen, type(caught.value).__name__

    def fail_each() -> list[tuple[int, str]]:
        broken = [Broken(good, ZeroDivisionError("by zero")) for good in (0, 4, 5)]
        found = [fail(data) for data in (*broken, Broken(0, UnpicklableError()))]
        return [*found, fail(Given([threading.Lock()] * 2), batch_size=None)]

    zero = [(seen, "ZeroDivisionError") for seen in (0, 2, 2)]
    names = ["UnpicklableError", "RuntimeError"]
    assert ranks.run(2, fail_each) == [[*zero, (0, name), (0, "TypeError")] for name in names]


def test_skipping_rounds_and_leaving_a_loop_leave_all_ranks_in_step(ranks):
    def rest() -> list[Any]:
        seen: list[Any] = []
        for data in (Given(list(range(20))), torch.arange(20)):
            loader = prepare_data_loader(DataLoader(data, batch_size=3), dispatch_batches=True)  # type: ignore[arg-type]
            skipped = skip_first_batches(loader, 2)
            seen.append([sample for batch in skipped for sample in gather_for_metrics(batch, skipped).tolist()])
            loader.set_epoch(0)
            left = next(iter(loader)).tolist()
            seen.append((left, [batch.tolist() for batch in loader][0]))  # noqa: RUF015 - the whole loop
        return seen

    found = ranks.run(2, rest)
    for rank, first in enumerate(([0, 1, 2], [3, 4, 5])):
        assert found[rank] == [list(range(12, 20)), (first, first)] * 2


# --------------------------------------------------------------------------------------------------------------------
# Batches of any form: their samples are counted before `collate_fn` joins them.


NUM_SAMPLES = 7


def sample(number: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return an image of its own size, and boxes."""
    return torch.full((1 + number % 3, 2), float(number)), {"boxes": torch.zeros(1 + number % 2, 4)}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from map(sample, range(NUM_SAMPLES))


def detection(samples: Sequence[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


def arrays(samples: Sequence[Any]) -> Any:
    return np.array([image.mean().item() for image, _ in samples])


def packed(samples: Sequence[Any]) -> Any:
    return {
        "values": torch.cat([image for image, _ in samples]),
        "sizes": torch.tensor([len(sample[0]) for sample in samples]),
    }


def numbers_of(batch: Any) -> list[float]:
    """Return the numbers of a batch's samples, whatever its form."""
    if isinstance(batch, np.ndarray):
        return [float(number) for number in batch]
    if isinstance(batch, dict):
        return [part.mean().item() for part in torch.split(batch["values"], batch["sizes"].tolist())]
    if isinstance(batch, tuple):
        return [image.mean().item() for image in batch[0]]
    return [image.mean().item() for image, _ in batch]


def train(loader: DataLoader[Any], options: dict[str, Any]) -> tuple[list[float], list[list[float]]]:
    """Return the gradient of each update, the mean over the round's numbers, and this rank's numbers."""
    accelerator = Accelerator(cpu=True, **options)
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), loader)
    gradients, had = [], []
    for batch in loader:
        had.append(numbers_of(batch))
        accelerator.backward(model(torch.tensor(had[-1])[:, None]).mean())
        gradients.append(next(model.parameters()).grad.item())
        optimizer.zero_grad()
    return gradients, had


@pytest.mark.parametrize("collate", [detection, list, arrays, packed])
def test_batches_of_any_form_weigh_their_samples(ranks: Sessions, collate: Callable[..., Any]) -> None:
    def run() -> list[tuple[list[float], list[list[float]]]]:
        samples: Any = list(Stream())
        in_worker = DataLoader(samples, batch_size=2, collate_fn=collate, num_workers=1)
        found = [
            train(DataLoader(Stream(), batch_size=2, collate_fn=collate), {"even_batches": False}),
            train(in_worker, {"even_batches": False, "dispatch_batches": True}),
        ]
        if collate in (arrays, packed):  # They cannot be cut, so a short round repeats a whole one.
            found.append(train(DataLoader(Stream(), batch_size=3, collate_fn=collate), {}))
        return found

    for rank, (found, dispatched, *evened) in enumerate(ranks.run(2, run)):
        assert found == dispatched == (pytest.approx([1.5, 5.0]), [[[0, 1], [4, 5]], [[2, 3], [6]]][rank])
        for gradients, had in evened:
            assert (gradients, had) == (pytest.approx([2.5, 6.0]), [[[0, 1, 2], [6]], [[3, 4, 5], [6]]][rank])


@dataclasses.dataclass
class Named:
    number: int


MADE: dict[str, Callable[[list[int]], Any]] = {
    "dictionaries": lambda ids: [{"id": number} for number in ids],
    "dictionaries of columns": lambda ids: [{"boxes": torch.full((6, 4), number)} for number in ids],
    "tuples": lambda ids: [(number, "n") for number in ids],
    "lists": lambda ids: [[number] * number for number in ids],
    "lists as long as the batch": lambda ids: [[number] * 6 for number in ids],
    "numbers": lambda ids: tuple(torch.tensor(number) for number in ids),
    "tensors of other lengths": lambda ids: [torch.arange(number) for number in ids],
    "objects": lambda ids: [frozenset([number]) for number in ids],
    "records": lambda ids: [Named(number) for number in ids],
    "objects, and none": lambda ids: [None if number % 2 else {"id": number} for number in ids],
    "nested": lambda ids: {"boxes": [torch.zeros(number, 4) for number in ids], "names": [[str(n)] for n in ids]},
    "beside parts of the batch": lambda ids: (torch.tensor(ids), {"task": "sum"}, [{"id": number} for number in ids]),
}


def with_column(make: Callable[[list[int]], Any], ids: list[int]) -> Any:
    return {"x": torch.tensor(ids), "rest": make(ids)}


@pytest.mark.parametrize("name", MADE)
def test_lists_with_an_item_for_each_sample_are_shared_out_with_it(name: str) -> None:
    collate = CountingCollate(lambda ids: with_column(MADE[name], list(ids)))
    shared: Any = (([6, 6, 4], {"split": True}), ([6, 6, 4], {"split": True, "even": False}), ([3, 3, 2], {}))
    for (sizes, options), num_processes in itertools.product(shared, (2, 3)):
        ends = list(itertools.accumulate(sizes))
        batches = [(collate(range(end - size, end)), end) for end, size in zip(ends, sizes, strict=True)]
        for parts, drawn, _ in Portions(num_processes=num_processes, **options).deal(batches):
            assert tuple(len(part["x"]) for part in parts) == drawn.rows
            for part in parts:
                assert repr(part) == repr(with_column(MADE[name], part["x"].tolist()))


def test_numbers_of_a_batch_stay_with_its_samples() -> None:
    collate = CountingCollate(lambda ids: {"x": torch.tensor(ids), "sum": sum(ids), "most": torch.tensor(max(ids))})
    batches = [(collate([0, 1, 2]), 3), (collate([3, 4, 5]), 6), (collate([6, 7, 8]), 9), (collate([9]), 10)]
    *_, (parts, drawn, _) = Portions(num_processes=2).deal(batches)
    assert [(part["x"].tolist(), part["sum"], part["most"]) for part in parts] == [([6, 7, 8], 21, 8), ([9], 9, 9)]
    assert drawn == Round((3, 1), (3, 1), (3, 1))


APART: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "samples as they are": (list, [(torch.zeros(2), {"id": at}) for at in range(2)]),
    "images beside boxes": (detection, [(torch.zeros(2, 2), {"boxes": torch.zeros(2, 4)}) for _ in range(2)]),
    "images in a dictionary": (lambda given: {"images": list(given)}, [torch.full((2,), at) for at in range(2)]),
    "three images of three channels": (lambda given: [image for image, _ in given], [(torch.zeros(3), 0)] * 3),
}


def test_a_list_of_what_samples_hold_has_an_item_for_each() -> None:
    found = {name: CountingCollate(collate)(samples) for name, (collate, samples) in APART.items()}
    assert {name: sorted(batch.lists) for name, batch in found.items()} == {
        "samples as they are": ["batch"],
        "images beside boxes": ["batch[0]", "batch[1]"],
        "images in a dictionary": ["batch['images']"],
        # One object three times: whose it is cannot be known, and so it is taken for three parts of the batch.
        "three images of three channels": [],
    }
    assert [batch.can_be_cut for batch in found.values()] == [True, True, True, False]


def test_two_tensors_in_a_batch_of_two_are_parts_of_it_or_may_be_either() -> None:
    def views(samples: Sequence[Any]) -> Any:
        return torch.stack(list(samples)), torch.zeros(len(samples))

    outermost = CountingCollate(views)([torch.zeros(3)] * 2)
    assert (outermost.lists, outermost.can_be_cut) == (frozenset(), True)
    inner = CountingCollate(lambda samples: {"views": list(views(samples))})
    assert inner([torch.zeros(3)] * 3).can_be_cut
    assert not inner([torch.zeros(3)] * 2).can_be_cut


@pytest.mark.parametrize(
    ("even", "words"),
    [
        (False, r"A batch of 3 samples cannot be cut .*collate_fn made a list of which not every"),
        (True, r"last batch cannot be cut evenly .*: a list has no rows .*dispatch_batches=False"),
    ],
)
def test_batch_that_must_be_cut_and_cannot_be_is_named(even: bool, words: str) -> None:  # a parameter
    batches = [(CountedBatch(["a", "b", "c"], 3, can_be_cut=False), 3)]
    with pytest.raises(TypeError, match=words):
        list(Portions(num_processes=2, split=True, even=even).deal(batches))
