"""What every test gets: the leak police."""

from __future__ import annotations

from tests.police import leave_nothing_behind, marked_session

__all__ = ["leave_nothing_behind", "marked_session"]
