"""The command line as tests start it: `notebook-launcher` in a process of its own."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from tests.support.kernels import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def _command_line(*words: object) -> list[str]:
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
        _command_line(*words),
        cwd=cwd,
        env={**surroundings(cwd), **(env or {})},
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def type_in_terminal(*words: object, cwd: Path, env: dict[str, str]) -> tuple[int, int]:
    """Run the program with these words in a terminal of its own; return its process id and the terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        command = _command_line(*words)
        os.execve(command[0], command, {**surroundings(cwd), **env})
    return pid, terminal


def read_until(terminal: int, words: bytes) -> bytes:
    """Return what a terminal shows until it shows these words."""
    shown, deadline = b"", time.monotonic() + 60
    while words not in shown:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, shown
        try:
            shown += os.read(terminal, 65536)
        except OSError as error:
            msg = f"the program has ended: {shown.decode()}"
            raise AssertionError(msg) from error
    return shown


def read_to_end(terminal: int) -> bytes:
    """Return what a terminal shows from now on until its program ends."""
    shown = b""
    with contextlib.suppress(OSError):  # Linux reports the end of a terminal as an error.
        while new := os.read(terminal, 65536):
            shown += new
    return shown


def end(pid: int, terminal: int) -> int:
    """Read a terminal to its end, so that the program is not blocked; return the program's exit status."""
    read_to_end(terminal)
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
