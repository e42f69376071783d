"""An interpreter for the programs of a file whose saves are killed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.killing import interpreter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., dict[str, Any]]]:
    """Call a program with texts, in an interpreter for all programs of the file, and return its result."""
    with interpreter() as call:
        yield call
