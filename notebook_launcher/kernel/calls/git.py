"""The git commit of a folder, read without git, and the changes since, found by a git process during the run."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["GitChanges", "git_commit"]

WHILE_RUNNING = 30.0
"""Time limit of git in seconds, while the run goes on."""
AT_THE_END = 1.0
"""Seconds from its start for which the end of a run waits for git."""
HASH = re.compile(r"[0-9a-f]{40,64}")


class GitChanges:
    """The difference between the working tree of a repository and its commit; the constructor starts git.

    `poll` must be called until it returns that git has ended, so that no process is left behind.
    """

    def __init__(self, repository: str) -> None:
        self._started = time.monotonic()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when git is over
        self._process: subprocess.Popen[bytes] | None = None
        if git := shutil.which("git"):
            words = [git, "--no-optional-locks", "-C", repository, "diff", "--no-ext-diff", "--no-color", "HEAD"]
            ours = {"stdin": subprocess.DEVNULL, "stdout": self._output, "stderr": subprocess.DEVNULL}
            with contextlib.suppress(OSError):
                # A session of its own: an interrupt in a terminal is not for git.
                self._process = subprocess.Popen(words, start_new_session=True, **ours)  # type: ignore[call-overload]

    def poll(self, *, wait: bool) -> tuple[bool, str | None]:
        """Return True once git has ended, and the difference: None if git failed or took too long."""
        if self._process is None:
            self._output.close()
            return True, None
        age = time.monotonic() - self._started
        try:
            code = self._process.wait(max(0.0, AT_THE_END - age) if wait else 0)
        except subprocess.TimeoutExpired:
            if not wait and age < WHILE_RUNNING:
                return False, None
            self._process.kill()
            code = self._process.wait()
        with self._output as output:
            output.seek(0)
            return True, output.read().decode("utf-8", "replace") if code == 0 else None


def git_commit(folder: Path) -> dict[str, str]:
    """Return commit and branch of the repository around a folder; empty if there is none. Starts no process."""
    for parent in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            git = _git_folder(parent / ".git")
            if git is not None:
                return _head(git) | {"repository": str(parent)}
    return {}


def _git_folder(entry: Path) -> Path | None:
    if entry.is_file():  # A worktree or submodule: `gitdir: <path>`.
        return (entry.parent / entry.read_text("utf-8").partition(":")[2].strip()).resolve()
    return entry if entry.is_dir() else None


def _head(git: Path) -> dict[str, str]:
    text = (git / "HEAD").read_text("utf-8").strip()
    if not text.startswith("ref:"):
        return {"commit": text}
    ref = text.partition(":")[2].strip()
    branch = {"branch": ref.removeprefix("refs/heads/")}
    shared = git
    with contextlib.suppress(OSError):
        shared = (git / (git / "commondir").read_text("utf-8").strip()).resolve()
    for home in (git, shared):
        with contextlib.suppress(OSError):
            return {"commit": (home / ref).read_text("utf-8").strip(), **branch}
    with contextlib.suppress(OSError):
        for line in (shared / "packed-refs").read_text("utf-8").splitlines():
            commit, _, name = line.partition(" ")
            if name == ref and HASH.fullmatch(commit):
                return {"commit": commit, **branch}
    return branch
