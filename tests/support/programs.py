"""The command line as tests start it: `notebook-launcher` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.kernels import ROOT

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["command_line", "surroundings", "type_command"]


def command_line(*words: object) -> list[str]:
    """Return the command that runs the program with these words."""
    return [sys.executable, "-m", "notebook_launcher", *map(str, words)]


def surroundings(folder: Path) -> dict[str, str]:
    """Return the environment of a user without settings, whose home is `folder`."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HOME": str(folder / "hf"),
    }


def type_command(
    *words: object, cwd: Path, text: str = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the program with these words in a folder, and return its output and exit status; `text` is its input."""
    return subprocess.run(
        command_line(*words),
        cwd=cwd,
        env={**surroundings(cwd), **(env or {})},
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
