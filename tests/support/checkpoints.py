"""For tests of checkpoints: the weights of two models compared, the files of a folder, and a disk that is full."""

from __future__ import annotations

import contextlib
import resource
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def small_files(limit: int = 4096) -> Iterator[None]:
    """Let no file grow beyond so many bytes, as on a full disk; pytest's own output may be a file that is larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Return True if two models have equal weights."""
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def files(folder: Path) -> set[str]:
    """Return the paths of all files in a folder, relative to it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
