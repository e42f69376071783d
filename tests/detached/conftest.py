"""A file for which ranks wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Ranks of these tests go on once this file is there."""
    return tmp_path / "gate"
