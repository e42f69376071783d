"""Check of the number of a rank that a user names."""

from __future__ import annotations

from notebook_launcher.errors import NoSuchRankError
from notebook_launcher.tracebacks import for_caller
from notebook_launcher.wording.text import no_such_rank

__all__ = ["check_rank"]


def check_rank(rank: int, num: int, whose: str = "run", *, typed: str = "") -> int:
    """Return a rank; raise `NoSuchRankError` if it is not one of them.

    Args:
        rank: The rank as the user named it.
        num: Number of ranks.
        whose: Word for what has the ranks: run or session.
        typed: The argument as typed, with which the message begins: `ranks=[0, 7]`.
    """
    if isinstance(rank, bool) or rank not in range(num):
        words = f"{typed}: {no_such_rank(rank, num, whose)}." if typed else f"{no_such_rank(rank, num, whose)}."
        raise for_caller(NoSuchRankError(words))
    return rank
