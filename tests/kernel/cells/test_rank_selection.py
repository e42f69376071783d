"""Ranks as people name them."""

from __future__ import annotations

import pytest

from notebook_launcher import ConfigError, NoSuchRankError
from notebook_launcher.kernel.cells.session_cells import selected_ranks


@pytest.mark.parametrize(
    ("named", "ranks"),
    [
        (None, None),
        ("all", None),
        ("0-3", None),
        (2, (2,)),
        ("2", (2,)),
        ("2,0", (0, 2)),
        ("1-3", (1, 2, 3)),
        ("0, 2-3", (0, 2, 3)),
        ([3, 1, 1], (1, 3)),
        (range(2), (0, 1)),
    ],
)
def test_ranks_are_found_in_every_form(named: object, ranks: tuple[int, ...] | None) -> None:
    assert selected_ranks(named, 4) == ranks


@pytest.mark.parametrize("named", [4, "0,4", [-1, 4]])
def test_rank_that_does_not_exist_is_refused_with_those_that_do(named: object) -> None:
    with pytest.raises(NoSuchRankError, match=r"there is no rank (4|-1): this session has 4 ranks, 0 to 3\."):
        selected_ranks(named, 4)


def test_range_that_runs_backwards_is_refused_with_the_one_that_is_meant() -> None:
    with pytest.raises(ConfigError, match=r"ranks='0,3-1': 3-1 is empty\. Did you mean 1-3\?"):
        selected_ranks("0,3-1", 4)


@pytest.mark.parametrize("named", ["some", "1-", 1.5, [True], "1;2", []])
def test_unclear_ranks_are_refused_with_examples(named: object) -> None:
    with pytest.raises(ConfigError, match=r"names no ranks\. Write a rank \(2\)"):
        selected_ranks(named, 4)
