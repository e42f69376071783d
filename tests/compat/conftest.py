"""The ranks that tests of both libraries share, and the shared state of this process, which each leaves empty."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from notebook_launcher import compat
from tests.support.toy_training import room_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["room_ranks"]


@pytest.fixture(autouse=True)
def no_shared_state() -> Iterator[None]:
    yield
    compat.AcceleratorState._reset_state(True)
    compat.GradientState._reset_state()
