"""Sessions of two and three ranks for the tests of operations."""

from __future__ import annotations

from tests.support.toy_training import session_fixture

pair = session_fixture(2)
trio = session_fixture(3)
