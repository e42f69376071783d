"""Results that a launch returns."""

from __future__ import annotations

import pytest
import torch

from notebook_launcher import MissingResultError, notebook_launch, report
from notebook_launcher.kernel.results import RankSummary, Results
from notebook_launcher.messages import Failure

FAILURE = Failure(rank=1, kind="exception", time=0.0, summary="ValueError: boom")


def partial() -> Results:
    return Results({0: "a", 2: "c"}, num_processes=4, failures=[FAILURE], seed=5, seconds=0.5, restarts=1)


def test_results_are_a_read_only_sequence_in_rank_order() -> None:
    results = Results({1: "b", 0: "a"}, num_processes=2)
    assert list(results) == ["a", "b"]
    assert results[-1] == results.rank(1) == "b"
    assert results[:1] == ["a"]
    assert "b" in results
    with pytest.raises(IndexError):
        results[2]
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
