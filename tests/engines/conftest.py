"""Two network namespaces for the tests of engines that need a network between nodes."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.namespaces import Cable

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    try:
        made = Cable()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', error)!r}")
    yield made
    made.remove()
