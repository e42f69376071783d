"""Sessions of two and three ranks for the tests of operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.toy_training import session_fixture

if TYPE_CHECKING:
    from notebook_launcher import Session

pair = session_fixture(2)
trio = session_fixture(3)


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest, pair: Session, trio: Session) -> Session:
    return pair if request.param == 2 else trio
