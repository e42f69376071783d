"""The number of a rank that does not exist is refused by one error, whatever the call."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from notebook_launcher import CallOrderError, ConfigError, NoSuchRankError
from notebook_launcher.errors import check_rank


@pytest.mark.parametrize("kind", [NoSuchRankError, ConfigError, CallOrderError, LookupError, ValueError, RuntimeError])
def test_every_type_that_calls_used_to_raise_still_catches_it_also_after_pickling(kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"^there is no rank 2: this run has 2 ranks, 0 to 1\.$") as caught:
        check_rank(2, 2)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("rank", [-1, True, "0", None])
def test_what_is_no_number_of_a_rank_is_refused_as_typed(rank: Any) -> None:
    assert check_rank(0, 1) == 0
    refused = rf"^ranks=x: there is no rank {rank!r}: this session has rank 0 alone\.$"
    with pytest.raises(NoSuchRankError, match=refused):
        check_rank(rank, 1, "session", typed="ranks=x")
