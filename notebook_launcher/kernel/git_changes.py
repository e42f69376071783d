"""Changes of a working tree since its git commit, found by a git process during the run."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time

__all__ = ["GitChanges"]

WHILE_RUNNING = 30.0
"""Time limit of git in seconds, while the run goes on."""
AT_THE_END = 1.0
"""Seconds from its start for which the end of a run waits for git."""


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
