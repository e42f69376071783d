"""The git commit of a folder, read without git, and the changes since, found by a git process during the run."""

from __future__ import annotations

import contextlib
import errno
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
MAX_REFS = 100_000_000
"""Characters of a file of git's that are read."""


class GitChanges:
    """The difference between the working tree of a repository and its commit; the constructor starts git.

    `poll` must be called until it returns that git has ended, so that no process is left behind.
    """

    def __init__(self, repository: str) -> None:
        self._started = time.monotonic()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when git is over
        self._process: subprocess.Popen[bytes] | None = None
        if git := shutil.which("git"):
            # A repository that was copied may name programs to run: as file system monitor, and to show a kind of file.
            words = [git, "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", repository]
            words += ["diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD"]
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
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            git = _git_folder(parent / ".git")
            if git is not None:
                return _head(git) | {"repository": str(parent)}
    return {}


def _git_folder(entry: Path) -> Path | None:
    if entry.is_file():  # A worktree or submodule: `gitdir: <path>`.
        return (entry.parent / _text_of(entry).partition(":")[2].strip()).resolve()
    return entry if entry.is_dir() else None


def _head(git: Path) -> dict[str, str]:
    text = _text_of(git / "HEAD").strip()
    if not text.startswith("ref:"):
        return {"commit": text} if HASH.fullmatch(text) else {}
    ref = text.partition(":")[2].strip()
    branch = {"branch": ref.removeprefix("refs/heads/")}
    shared = git
    with contextlib.suppress(OSError):
        shared = (git / _text_of(git / "commondir").strip()).resolve()
    for home in (git, shared):
        with contextlib.suppress(OSError):
            if HASH.fullmatch(commit := _text_of(home / ref).strip()):
                return {"commit": commit, **branch}
    with contextlib.suppress(OSError):
        for line in _text_of(shared / "packed-refs").splitlines():
            commit, _, name = line.partition(" ")
            if name == ref and HASH.fullmatch(commit):
                return {"commit": commit, **branch}
    return branch


def _text_of(path: Path) -> str:
    """Return the text of an ordinary file; of another user's /tmp/.git it may be a pipe, and name any file."""
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "no ordinary file", str(path))
    with path.open(encoding="utf-8") as file:
        return file.read(MAX_REFS)
