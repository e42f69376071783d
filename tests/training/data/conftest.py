"""The ranks that tests of loaders and metrics share."""

from __future__ import annotations

from tests.support.toy_training import room_ranks

__all__ = ["room_ranks"]
