"""The number of a rank that does not exist is refused by one error, whatever the call."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from notebook_launcher import CallOrderError, ConfigError, NoSuchRankError
from notebook_launcher.errors import check_rank


@pytest.mark.parametrize("kind", [NoSuchRankError, ConfigError, CallOrderError, LookupError, ValueError, RuntimeError])
def test_every_type_that_calls_used_to_raise_still_catches_it(kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"^there is no rank 2: this run has 2 ranks, 0 to 1\.$"):
        check_rank(2, 2)


@pytest.mark.parametrize("rank", [-1, True, "0", None])
def test_what_is_no_number_of_a_rank_is_refused_as_typed(rank: Any) -> None:
    with pytest.raises(
        NoSuchRankError, match=rf"^ranks=x: there is no rank {rank!r}: this session has rank 0 alone\.$"
    ):
        check_rank(rank, 1, "session", typed="ranks=x")


def test_rank_that_exists_is_returned() -> None:
    assert check_rank(1, 2) == 1


def test_error_survives_pickling() -> None:
    assert str(pickle.loads(pickle.dumps(NoSuchRankError("there is no rank 2")))) == "there is no rank 2"
