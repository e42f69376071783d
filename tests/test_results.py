"""What a launch returns."""

from __future__ import annotations

import pytest
import torch

from notebook_launcher import MissingResultError
from notebook_launcher.kernel.results import RankSummary, Results
from notebook_launcher.messages import Failure

FAILURE = Failure(rank=1, kind="exception", time=0.0, summary="ValueError: boom")


def partial() -> Results:
    return Results({0: "a", 2: "c"}, num_processes=4, failures=[FAILURE], seed=5, seconds=0.5, restarts=1)


def test_it_is_a_read_only_sequence_in_rank_order() -> None:
    results = Results({1: "b", 0: "a"}, num_processes=2)
    assert list(results) == ["a", "b"]
    assert results[-1] == results.rank(1) == "b"
    assert results[:1] == ["a"]
    assert "b" in results
    with pytest.raises(IndexError):
        results[2]
    with pytest.raises(TypeError):
        results[0] = 1  # type: ignore[index]


def test_a_missing_value_says_why() -> None:
    assert partial().returned == {0: "a", 2: "c"}
    with pytest.raises(MissingResultError, match=r"rank 1 returned nothing: ValueError: boom"):
        partial()[1]
    with pytest.raises(MissingResultError, match=r"rank 3 returned nothing: it was stopped"):
        partial()[3]


def test_repr() -> None:
    results = Results({0: torch.zeros(3, 4), 1: list(range(100))}, num_processes=2, seconds=0.034, seed=5)
    assert repr(results) == (
        "Results of 2 ranks, 0.03 s, seed 5\n  0: Tensor, shape (3, 4), torch.float32\n  1: [0, 1, 2, 3, 4, 5, ...]"
    )
    assert "rank 1 returned nothing: ValueError: boom" in repr(partial())
    assert "restarted 1 time" in repr(partial())


def test_html_is_escaped() -> None:
    row = RankSummary(rank=0, state="returned", seconds=1.0, peak_memory=2_000_000)
    html = Results({0: "<script>"}, num_processes=1, ranks=[row])._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "2.0 MB" in html
