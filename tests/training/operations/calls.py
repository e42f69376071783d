"""Calls of operations on all ranks, and a record that a batch may hold."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from notebook_launcher.training import operations

if TYPE_CHECKING:
    from tests.support.toy_training import Sessions


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    first: Any
    second: Any = None


def this_rank() -> int:
    return int(os.environ["RANK"])


def on_all(ranks: Sessions, function: Any, num: int = 2) -> Any:
    """Run on all ranks and return what all of them returned."""
    first, *others = ranks.run(num, function)
    assert [operations.listify(other) for other in others] == [operations.listify(first)] * len(others)
    return first
