"""Ranks that files share, and the place of the files of torch's compiler; a small training, and a checkpoint of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.toy_checkpoints import Training
from tests.support.toy_training import room_ranks, sessions_fixture

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["room_ranks"]

ranks = sessions_fixture(2, 3)


@pytest.fixture(scope="module")
def compiler_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set the variable that names the folder of torch's compiler, which imports of the compiler would set and leave.

    Optimizers, profilers and Accelerate import the compiler.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiler")))
        yield


@pytest.fixture
def training() -> Training:
    return Training(1)


@pytest.fixture
def saved(tmp_path: Path, training: Training) -> Path:
    """A checkpoint in the middle of a window."""
    training.train(4)
    folder: Path = training.accelerator.save_state(tmp_path / "checkpoint")
    return folder
