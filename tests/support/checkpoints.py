"""Comparisons for tests of checkpoints: the weights of two models, and the files of a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pathlib import Path


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Return True if two models have equal weights."""
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def files(folder: Path) -> set[str]:
    """Return the paths of all files in a folder, relative to it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
