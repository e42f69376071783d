"""A run with every kind of file in its folder, recorded once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.security.recorded import record_run

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def recorded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a detached run that is over; tests work on copies."""
    return record_run(tmp_path_factory.mktemp("recorded"))
