"""Results that a launch returns."""

from __future__ import annotations

import pickle
import re
import traceback

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist

from notebook_launcher import MissingResultError, ReturnValueError, notebook_launch
from notebook_launcher.kernel.failures.culprit import Failure
from notebook_launcher.kernel.results import RankSummary, Results

FAILURE = Failure(rank=1, kind="exception", time=0.0, summary="ValueError: boom")


def partial() -> Results:
    return Results({0: "a", 2: "c"}, num_processes=4, failures=[FAILURE], seed=5, seconds=0.5, restarts=1)


def results_of(*values: object) -> Results:
    return Results(dict(enumerate(values)), num_processes=len(values))


def test_results_are_a_read_only_sequence_in_rank_order() -> None:
    results = Results({1: "b", 0: "a"}, num_processes=2)
    assert list(results) == ["a", "b"]
    assert results[-1] == results.rank(1) == "b"
    assert results[:1] == ["a"]
    assert "b" in results
    with pytest.raises(IndexError, match=r"results\[2\]: the ranks are 0 to 1\."):
        results[2]
    with pytest.raises(TypeError, match=r"results\['a'\]: an index is the number of a rank, 0 to 1, or a slice"):
        results["a"]  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        results[0] = 1  # type: ignore[index]


def test_missing_value_raises_an_error_with_the_reason() -> None:
    assert partial().returned == {0: "a", 2: "c"}
    with pytest.raises(MissingResultError, match=r"rank 1 returned nothing: ValueError: boom"):
        partial()[1]
    with pytest.raises(MissingResultError, match=r"rank 3 returned nothing: it was stopped"):
        partial()[3]


def test_repr_of_results_shows_each_ranks_value() -> None:
    results = Results({0: torch.zeros(3, 4), 1: list(range(100))}, num_processes=2, seconds=0.034, seed=5)
    assert repr(results) == (
        "Results of 2 ranks\n  0: Tensor, shape (3, 4), torch.float32\n  1: [0, 1, 2, 3, 4, 5, ...]"
    )
    assert "rank 1 returned nothing: ValueError: boom" in repr(partial())
    assert "restarted 1 time" in repr(partial())


def test_html_of_results_is_escaped() -> None:
    html = results_of("<script>")._repr_html_() or ""
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_results_that_are_all_none_take_one_line() -> None:
    rows = [RankSummary(rank=rank, state="returned", seconds=1.0, peak_memory=None) for rank in range(4)]
    results = Results(dict.fromkeys(range(4)), num_processes=4, ranks=rows)
    assert repr(results) == "Results of 4 ranks: all returned None"
    assert results._repr_html_() is None
    assert repr(results_of(None)) == "Results of 1 rank: None"
    assert "rank 1 returned nothing" in repr(Results({0: None}, num_processes=2))


def test_mean_keeps_the_structure_of_the_values() -> None:
    assert results_of(1, 2).mean() == 1.5
    nested = results_of({"a": 1.0, "b": [True, 2]}, {"a": 3.0, "b": [False, 4]}).mean()
    assert nested == {"a": 2.0, "b": [0.5, 3.0]}
    assert results_of(torch.tensor([1, 2]), torch.tensor([2, 4])).mean().tolist() == [1.5, 3.0]


DIFFER = "result has different types on the ranks: "
NOT_COMBINED: list[tuple[str, list[object], type[Exception], str]] = [
    ("mean", [{"name": "a"}, {"name": "b"}], TypeError, "result['name'] has no mean: str on ranks 0, 1 ("),
    ("mean", [{"a": 1}, {"b": 1}], ValueError, "different keys on the ranks: ['a'] on rank 0; ['b'] on rank 1. Ret"),
    ("mean", [[1], [1, 2]], ValueError, "different lengths on the ranks: 1 on rank 0; 2 on rank 1"),
    ("mean", [{"x": 1}, 1], TypeError, f"{DIFFER}dict on rank 0; int on rank 1. Ret"),
    ("mean", [1, {"x": 1}], TypeError, f"{DIFFER}int on rank 0; dict on rank 1."),
    ("mean", [[1, 2], 5], TypeError, f"{DIFFER}list on rank 0; int on rank 1."),
    ("mean", [[1], (1,), [2]], TypeError, f"{DIFFER}list on ranks 0, 2; tuple on rank 1."),
    ("mean", [{"a": {"b": [1]}}, {"a": {"b": 2}}], TypeError, "result['a']['b'] has different types on the ranks"),
    ("mean", [[torch.ones(2)], [None]], TypeError, "result[0] has no mean: Tensor(2,) on rank 0; NoneType on ran"),
    ("concat", [5, {"x": 1}], TypeError, f"{DIFFER}int on rank 0; dict on rank 1. R"),
    ("concat", [{"x": [1]}, {"x": 2}], TypeError, "result['x'] has different types on the ranks: list on rank 0; in"),
    ("concat", [5, np.ones(2)], TypeError, "result cannot be joined: its types differ: int on rank 0; ndarray(2,) o"),
    ("concat", [torch.ones(2), np.ones(2)], TypeError, "its types differ: Tensor(2,) on rank 0; ndarray(2,) on ra"),
    ("concat", [torch.tensor(1), 5], TypeError, "result cannot be joined: Tensor() on rank 0; int on rank 1 ("),
    ("concat", [torch.ones(2, 3), torch.ones(2, 4)], ValueError, "Tensor(2, 3) on rank 0; Tensor(2, 4) on rank 1"),
    ("concat", [np.ones((2, 3)), np.ones((2, 4))], ValueError, " dimension alone, or take the values one by one"),
    ("concat", [{"x": torch.ones(1)}, {"x": torch.ones(1, 2)}], ValueError, "result['x'] cannot be joined: Tensor("),
    ("concat", [{"x": 1}, {"y": 1}], ValueError, "result has different keys on the ranks: ['x'] on rank 0; ['y'] o"),
]


@pytest.mark.parametrize(("method", "values", "kind", "words"), NOT_COMBINED)
def test_values_that_cannot_be_combined_are_named(
    method: str, values: list[object], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        getattr(results_of(*values), method)()


def test_concat_joins_in_rank_order() -> None:
    assert Results({1: [3], 0: [1, 2]}, num_processes=2).concat() == [1, 2, 3]
    assert results_of(torch.ones(2), torch.zeros(1)).concat().tolist() == [1, 1, 0]
    assert results_of(torch.tensor(1), torch.tensor(2)).concat().tolist() == [1, 2]
    assert results_of(np.ones(1), np.zeros(1)).concat().tolist() == [1, 0]
    assert results_of({"x": (1,)}, {"x": (2,)}).concat() == {"x": (1, 2)}
    assert results_of(5, 6).concat() == [5, 6]
    assert results_of({"x": {"y": [1]}}, {"x": {"y": [2]}}).concat() == {"x": {"y": [1, 2]}}
    with pytest.raises(TypeError, match="types on the ranks: list on rank 2; int on rank 3"):
        Results({2: [5], 3: 6}, num_processes=4, called_ranks=(2, 3)).concat()


def test_table_has_a_row_for_each_rank() -> None:
    rows = [RankSummary(rank=r, state="returned", seconds=1, peak_memory=None, metrics={"loss": r}) for r in (0, 1)]
    table = Results({0: {"n": 3}, 1: {"n": 4}}, num_processes=2, ranks=rows).to_pandas()
    assert table.to_dict() == {"n": {0: 3, 1: 4}, "loss": {0: 0, 1: 1}}
    assert table.index.name == "rank"
    assert results_of(7).to_pandas().to_dict() == {"value": {0: 7}}
    own = results_of(*(pd.DataFrame({"a": [r, r]}) for r in (0, 1))).to_pandas()
    assert own.loc[1, "a"].tolist() == [1, 1]


class Picky:
    """A value that ranks can send and the notebook cannot rebuild."""

    def __init__(self) -> None:
        self.heavy = bytearray(1000)

    def __setstate__(self, state: dict[str, object]) -> None:
        message = "not in this process"
        raise LookupError(message)


def return_picky(rank_without: int) -> object:
    return Picky() if dist.get_rank() != rank_without else 5


def test_results_that_an_older_version_has_kept_are_read() -> None:
    new = partial()
    old = Results.__new__(Results)
    old.__setstate__({f"_{name.lstrip('_')}": value for name, value in new.__getstate__().items()})
    assert repr(old) == repr(new)
    assert (old.failures, old.seed, old.seconds, old.restarts) == ((FAILURE,), 5, 0.5, 1)


def test_value_that_cannot_be_rebuilt_keeps_the_exception_and_its_line() -> None:
    results = notebook_launch(return_picky, 2, args=(0,), output="none")
    words = (
        "rank 1: the return value cannot be rebuilt in the notebook: LookupError: not in this process. "
        "Return plain data, or import the class in the notebook."
    )
    with pytest.raises(ReturnValueError, match=re.escape(words)) as refusal:
        results[1]
    cause = refusal.value.__cause__
    assert isinstance(cause, LookupError)
    frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
    assert frames[-1].f_code is Picky.__setstate__.__code__
    assert frames[-1].f_locals == {}  # The value's memory is free.
    again = pickle.loads(pickle.dumps(results))
    assert again.unsent == results.unsent == {1: words.removeprefix("rank 1: ")}
    with pytest.raises(ReturnValueError, match=words) as refusal:
        again[1]
    assert refusal.value.__cause__ is None


def test_many_ranks_share_rows_or_are_counted():
    alike = Results(dict.fromkeys(range(64), 1.5) | {7: 2}, num_processes=64)
    assert repr(alike).splitlines() == ["Results of 64 ranks", "  0-6, 8-63: 1.5", "  7: 2"]
    different = results_of(*range(64))
    lines = repr(different).splitlines()
    assert (len(lines), lines[16], lines[17]) == (18, "  15: 15", "  ...: 48 more ranks: results[rank]")
    assert (different._repr_html_() or "").count("<tr>") == 18
