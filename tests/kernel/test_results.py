"""Results that a launch returns."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from notebook_launcher import MissingResultError, ReturnValueError, notebook_launch, report
from notebook_launcher.kernel.failures.failure import Failure
from notebook_launcher.kernel.results import RankSummary, Results

FAILURE = Failure(rank=1, kind="exception", time=0.0, summary="ValueError: boom")


def partial() -> Results:
    return Results({0: "a", 2: "c"}, num_processes=4, failures=[FAILURE], seed=5, seconds=0.5, restarts=1)


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
    html = Results({0: "<script>"}, num_processes=1)._repr_html_() or ""
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_results_that_are_all_none_take_one_line() -> None:
    rows = [RankSummary(rank=rank, state="returned", seconds=1.0, peak_memory=None) for rank in range(4)]
    results = Results(dict.fromkeys(range(4)), num_processes=4, ranks=rows)
    assert repr(results) == "Results of 4 ranks: all returned None"
    assert results._repr_html_() is None
    assert repr(Results({0: None}, num_processes=1)) == "Results of 1 rank: None"
    assert "rank 1 returned nothing" in repr(Results({0: None}, num_processes=2))


def test_results_show_the_last_metrics() -> None:
    metrics = {"loss": 0.123456, "<b>rate</b>": float("nan"), "c": 1.0, "d": 2.0, "e": 3.0}
    rows = [
        RankSummary(rank=0, state="returned", seconds=1.0, peak_memory=None, metrics=metrics),
        RankSummary(rank=1, state="returned", seconds=1.0, peak_memory=None),
    ]
    results = Results({0: 7, 1: 8}, num_processes=2, ranks=rows)
    assert repr(results).splitlines()[1:] == ["  0: 7  (loss 0.1235, <b>rate</b> NaN, c 1, d 2, 1 more)", "  1: 8"]
    html = results._repr_html_() or ""
    assert "<th>last metrics</th>" in html
    assert "<td>loss 0.1235, &lt;b&gt;rate&lt;/b&gt; NaN, c 1, d 2, 1 more</td>" in html


def test_run_gives_its_results_the_last_metrics_of_each_rank() -> None:
    def measure() -> None:
        for step in range(3):
            report(loss=step / 2)

    results = notebook_launch(measure, 2, output="none")
    assert [rank.metrics for rank in results.ranks] == [{"loss": 1.0}] * 2


def test_mean_keeps_the_structure_of_the_values() -> None:
    assert Results({0: 1, 1: 2}, num_processes=2).mean() == 1.5
    nested = Results({0: {"a": 1.0, "b": [True, 2]}, 1: {"a": 3.0, "b": [False, 4]}}, num_processes=2).mean()
    assert nested == {"a": 2.0, "b": [0.5, 3.0]}
    tensors = Results({0: torch.tensor([1, 2]), 1: torch.tensor([2, 4])}, num_processes=2)
    assert tensors.mean().tolist() == [1.5, 3.0]


def test_mean_of_some_ranks_is_theirs_alone() -> None:
    assert Results({0: 1, 2: 4}, num_processes=3, members=(0, 2)).mean() == 2.5
    with pytest.raises(MissingResultError, match="rank 1 returned nothing: only ranks 0, 2 ran this"):
        Results({0: 1, 2: 4}, num_processes=3, members=(0, 2))[1]


def test_values_without_a_mean_are_named() -> None:
    with pytest.raises(TypeError, match=r"result\['name'\] has no mean: the ranks returned str"):
        Results({0: {"name": "a"}, 1: {"name": "b"}}, num_processes=2).mean()
    with pytest.raises(ValueError, match="different keys on the ranks"):
        Results({0: {"a": 1}, 1: {"b": 1}}, num_processes=2).mean()
    with pytest.raises(ValueError, match="different lengths on the ranks"):
        Results({0: [1], 1: [1, 2]}, num_processes=2).mean()


def test_concat_joins_in_rank_order() -> None:
    assert Results({1: [3], 0: [1, 2]}, num_processes=2).concat() == [1, 2, 3]
    assert Results({0: torch.ones(2), 1: torch.zeros(1)}, num_processes=2).concat().tolist() == [1, 1, 0]
    assert Results({0: torch.tensor(1), 1: torch.tensor(2)}, num_processes=2).concat().tolist() == [1, 2]
    assert Results({0: np.ones(1), 1: np.zeros(1)}, num_processes=2).concat().tolist() == [1, 0]
    assert Results({0: {"x": (1,)}, 1: {"x": (2,)}}, num_processes=2).concat() == {"x": (1, 2)}
    assert Results({0: 5, 1: 6}, num_processes=2).concat() == [5, 6]
    with pytest.raises(TypeError, match="cannot be joined"):
        Results({0: [5], 1: 6}, num_processes=2).concat()


def test_table_has_a_row_for_each_rank() -> None:
    rows = [RankSummary(rank=r, state="returned", seconds=1, peak_memory=None, metrics={"loss": r}) for r in (0, 1)]
    table = Results({0: {"n": 3}, 1: {"n": 4}}, num_processes=2, ranks=rows).to_pandas()
    assert table.to_dict() == {"n": {0: 3, 1: 4}, "loss": {0: 0, 1: 1}}
    assert table.index.name == "rank"
    assert Results({0: 7}, num_processes=2).to_pandas().to_dict() == {"value": {0: 7}}
    own = Results({r: pd.DataFrame({"a": [r, r]}) for r in (0, 1)}, num_processes=2).to_pandas()
    assert own.loc[1, "a"].tolist() == [1, 1]


def test_value_that_could_not_travel_is_refused_with_the_reason() -> None:
    results = Results({0: 1}, num_processes=2, unsent={1: "it is a lock"})
    with pytest.raises(ReturnValueError, match="rank 1: it is a lock"):
        results[1]
    with pytest.raises(ReturnValueError, match="it is a lock"):
        results.mean()
    assert results.unsent == {1: "it is a lock"}
