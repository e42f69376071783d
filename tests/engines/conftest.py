"""Programs that stand in for those of a cluster."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def write_program(path: Path, text: str) -> None:
    """Write a shell script that can be run."""
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first on PATH, for programs that run on this machine what they are to run on another."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


@pytest.fixture
def allocation(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation of Slurm's with two nodes."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    write_program(programs / "scontrol", "echo n1; echo n2")
