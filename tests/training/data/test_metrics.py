"""Exact evaluation: what all ranks computed, each sample once, in the order of the data."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from notebook_launcher.training.data.metrics import gather_for_metrics
from notebook_launcher.training.data.prepare import prepare_data_loader, skip_first_batches
from notebook_launcher.training.operations import DistributedOperationException
from tests.support.toy_training import recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.support.toy_training import Sessions


def evaluate(length: int, compute: Callable[[torch.Tensor], Any], **options: Any) -> list[Any]:
    """Gather what `compute` makes of every batch, of three samples each."""
    skip, as_objects = options.pop("skip", 0), options.pop("use_gather_object", False)
    data: Any = range(length)
    users = DataLoader(data, batch_size=options.pop("batch_size", 3), drop_last=options.pop("drop_last", False))
    loader = skip_first_batches(prepare_data_loader(users, **options), skip)
    return [gather_for_metrics(compute(batch), loader, use_gather_object=as_objects) for batch in loader]


def case(length: int, compute: Callable[[torch.Tensor], Any], **options: Any) -> Callable[[], list[Any]]:
    return lambda: evaluate(length, compute, **options)


def on_all(sessions: Sessions, number: int, *cases: Callable[[], list[Any]]) -> list[list[Any]]:
    """Return the results of each case, which all ranks must have."""
    everybody = sessions.run(number, lambda: [each() for each in cases])
    assert repr(everybody[0]) == repr(everybody[-1])
    return everybody[0]  # type: ignore[no-any-return]


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return [item for items in lists for item in items]


@pytest.mark.parametrize(("num_processes", "options"), [(2, {}), (3, {"even_batches": False})])
def test_gather_for_metrics_drops_repeated_samples_of_nested_results(ranks, num_processes, options):
    def compute(batch: torch.Tensor) -> Any:
        return {"logits": torch.stack([batch, batch * 2], dim=1), "ids": (batch, None)}

    lengths = (1, 2, 7, 12, 13)
    results = on_all(ranks, num_processes, *(case(length, compute, **options) for length in lengths))
    for length, found in zip(lengths, results, strict=True):
        assert torch.cat([part["ids"][0] for part in found]).tolist() == list(range(length))
        assert torch.cat([part["logits"] for part in found])[:, 1].tolist() == [2 * number for number in range(length)]
        assert all(part["ids"][1] is None for part in found)


@pytest.mark.parametrize("options", [{"drop_last": True}, {"skip": 1}, {"split_batches": True, "batch_size": 6}])
def test_gather_for_metrics_is_exact_after_skips_and_copies(ranks, options):
    (found,) = on_all(ranks, 2, case(17, lambda batch: batch, **options))
    assert torch.cat(found).tolist() == list(
        range(6, 17) if "skip" in options else range(12 if "drop_last" in options else 17)
    )


def test_lists_of_objects_become_one_also_beside_tensors(ranks):
    texts, as_objects, beside = on_all(
        ranks,
        2,
        case(10, lambda batch: [f"text {number}" for number in batch.tolist()], even_batches=False),
        case(10, list, use_gather_object=True),
        case(7, lambda batch: {"ids": batch, "names": [str(number) for number in batch.tolist()]}),
    )
    assert flat(texts) == [f"text {number}" for number in range(10)]
    assert [int(item) for item in flat(as_objects)] == list(range(10))
    assert torch.cat([part["ids"] for part in beside]).tolist() == list(range(7))
    assert flat(part["names"] for part in beside) == [str(number) for number in range(7)]


STRUCTURES: dict[str, Callable[[list[int]], Any]] = {
    "lists": lambda ids: (list(map(str, ids)), list(ids)),
    "a list and a tensor": lambda ids: ([str(number) for number in ids], torch.tensor(ids)),
    "nested": lambda ids: (list(ids), {"names": (list(map(str, ids)), [None] * len(ids))}),
    "a tuple of objects": lambda ids: tuple(map(str, ids)),
    "a list for each sample": lambda ids: tuple([number] * number for number in ids),
    "lists of lists": lambda ids: [[number] * number for number in ids],
    "boxes of each sample": lambda ids: [{"boxes": torch.full((number % 3, 4), number)} for number in ids],
    "an array": lambda ids: np.array(ids)[:, None] + [0, 100],
    "arrays": lambda ids: (np.array(ids), list(ids)),
}


def test_results_have_the_same_structure_on_any_number_of_ranks(ranks):
    def compute(length: int, even_batches: bool) -> list[list[Any]]:  # a parameter
        def nest(batch: torch.Tensor) -> list[Any]:
            return [make(batch.tolist()) for make in STRUCTURES.values()]

        data: Any = range(length)
        loader = prepare_data_loader(DataLoader(data, batch_size=2), even_batches=even_batches)
        return [[gather_for_metrics(part, loader) for part in nest(batch)] for batch in loader]

    alone = [make(list(range(4))) for make in STRUCTURES.values()]
    assert [repr(part) for part in ranks.run(2, compute, 4, True)[1][0]] == list(map(repr, alone))
    alone = [make([4]) for make in STRUCTURES.values()]
    for even_batches in (True, False):
        assert [repr(part) for part in ranks.run(2, compute, 5, even_batches)[1][1]] == list(map(repr, alone))


PARTS: list[Callable[[list[int]], Any]] = [
    lambda ids: [list(map(str, ids)), list(ids)],
    lambda ids: [list(map(str, ids)), torch.tensor(ids), np.array(ids)],
    lambda ids: {"both": [list(map(str, ids)), [{"id": number} for number in ids]]},
]


@pytest.mark.parametrize(("make", "length"), list(zip(PARTS, (9, 10, 10), strict=True)))
def test_a_list_of_parts_is_no_list_of_samples(ranks, make, length):
    # The last rounds have 1 and 2 samples on a rank: as many as there are parts, or fewer.
    (found,) = on_all(ranks, 2, case(length, lambda batch: make(batch.tolist()), batch_size=4))
    ends = [*range(8, length, 8), length]
    assert repr(found) == repr([make(list(range(8 * at, end))) for at, end in enumerate(ends)])


def test_a_list_of_parts_that_may_be_samples_is_joined_with_a_warning(ranks):
    for found, warned in ranks.run(2, lambda: recorded(evaluate, 2, lambda batch: [batch.tolist()] * 2, batch_size=1)):
        assert found == [[[0], [0], [1], [1]]]
        assert re.search(r"got a list of 2 lists with an item for each sample.*pass a tuple or a dict", warned[0])


def test_a_list_of_mappings_is_read_by_its_length_alone(ranks):
    def columns(batch: torch.Tensor) -> Any:
        return {"layers": [{"x": batch, "loss": batch.sum()}] * 2}

    # As long as rank 1's batch, and not as long as rank 0's.
    (found,) = on_all(ranks, 2, case(5, columns, even_batches=False))
    assert [(layer["x"].tolist(), layer["loss"].tolist()) for layer in found[-1]["layers"]] == [
        ([0, 1, 2, 3, 4], [3, 7])
    ] * 2

    def boxes(batch: torch.Tensor) -> Any:
        return [{"box": torch.full((2,), int(number))} for number in batch]

    for found, warned in ranks.run(2, lambda: recorded(evaluate, 4, boxes, batch_size=2)):
        assert [item["box"].tolist() for part in found for item in part] == [[0, 0], [1, 1], [2, 2], [3, 3]]
        assert re.search(r"2 mappings, as many as each rank has samples, and joins them as one for each", warned[0])


def test_a_text_of_the_batch_stays_if_all_ranks_have_the_same(ranks):
    def compute(batch: torch.Tensor) -> Any:
        return {"x": batch, "name": "test", "more": ({"a", "b"}, batch)}

    ((found,), texts) = on_all(ranks, 3, case(7, compute), case(9, lambda _: "all"))
    assert (found["name"], found["more"][0], texts) == ("test", {"a", "b"}, ["all"])

    def differ() -> None:
        text = r"as value\['name'\], '0' on rank 0, '1' on rank 1: an object that is in no list .* Put it into a list"
        with pytest.raises(DistributedOperationException, match=text):
            gather_for_metrics({"x": torch.ones(1), "name": str(dist.get_rank())}, None)

    ranks.run(2, differ)


def extremes(batch: torch.Tensor) -> torch.Tensor:
    return torch.stack([batch.min(), batch.max()])


def test_values_of_the_batch_are_gathered_whole(ranks):
    # Accelerate cuts such tensors to the number of samples that remain.
    uneven = {"even_batches": False}
    found = on_all(
        ranks,
        2,
        case(7, lambda batch: batch.float().mean()),
        case(7, lambda batch: batch.sum().item(), **uneven),
        case(8, extremes, **uneven),
        # Two numbers of each batch, of which one rank has two samples.
        *(case(length, extremes, batch_size=size, **uneven) for length, size in ((4, 3), (5, 3), (3, 2))),
        case(4, lambda batch: batch.new_zeros(0, 2), **uneven),
    )
    losses, sums, *pairs, (empty,) = found
    assert [part.tolist() for part in losses] == [[1.0, 4.0], [pytest.approx(7 / 3)]]
    assert sums == [[3, 12], [6]]
    wanted = [[[0, 2, 3, 5], [6, 7]], [[0, 2, 3, 3]], [[0, 2, 3, 4]], [[0, 1, 2, 2]]]
    assert [[part.tolist() for part in parts] for parts in pairs] == wanted
    assert empty.shape == (0, 2)


def test_without_a_loop_and_with_a_loader_of_ones_own_nothing_is_left_out(ranks):
    def gather() -> Any:
        data: Any = range(3)
        loader = prepare_data_loader(DataLoader(data, batch_size=2))
        after = gather_for_metrics(torch.cat(list(loader)), loader).tolist()
        own = prepare_data_loader(DataLoader(data, batch_size=3), num_processes=1)
        mine = [gather_for_metrics(batch, own).tolist() for batch in own]
        return gather_for_metrics(torch.tensor([dist.get_rank()]), None).tolist(), after, *mine

    assert ranks.run(2, gather) == [([0, 1], [0, 1, 2, 0], [0, 1, 2] * 2)] * 2


def twice(batch: torch.Tensor, as_objects: bool) -> Any:  # a parameter
    rows = batch.repeat_interleave(2)
    return rows.tolist() if as_objects else rows


@pytest.mark.parametrize("as_objects", [False, True])
def test_several_rows_for_a_sample_that_is_repeated_warn(ranks, as_objects):
    def double(batch: torch.Tensor) -> Any:
        return twice(batch, as_objects)

    for found, (warned,) in ranks.run(2, lambda: recorded(evaluate, 5, double, use_gather_object=as_objects)):
        assert [int(each) for part in found for each in part] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 0, 0]
        assert re.search(r"got 2 rows for each sample\. 1 sample of this round is there twice, so that every", warned)


@pytest.mark.parametrize(("as_objects", "options"), [(False, {"even_batches": False}), (True, {"drop_last": True})])
def test_several_rows_for_each_sample_are_gathered(ranks, as_objects, options):
    double = case(7, lambda batch: twice(batch, as_objects), use_gather_object=as_objects, **options)
    (found,) = on_all(ranks, 2, double)
    length = 6 if "drop_last" in options else 7
    assert [int(each) for part in found for each in part] == [row for row in range(length) for _ in range(2)]


@pytest.mark.parametrize(("sizes", "as_objects"), [([3, 5, 1, 4], False), ([3, 5, 1], True), ([2], False)])
def test_ready_batches_of_different_lengths_are_gathered(ranks, sizes, as_objects):
    def gather_all() -> list[int]:
        ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
        data: Any = [torch.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        loader = prepare_data_loader(DataLoader(data, batch_size=None))
        batches = ((batch.tolist() if as_objects else batch) for batch in loader)
        parts = [gather_for_metrics(batch, loader, use_gather_object=as_objects) for batch in batches]
        return [int(each) for part in parts for each in part]

    assert ranks.run(2, gather_all) == [list(range(sum(sizes)))] * 2
