"""The process of Ray Train as the measuring program sees it."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.process import FailedError
from support.ray_train import FIT_LIMIT

__all__ = ["RayTrain"]

END_LIMIT = 20.0


class RayTrain:
    """A process that is connected to a cluster, and trains by Ray Train when asked; raises `FailedError`."""

    def __init__(self, address: str) -> None:
        program = Path(__file__).with_name("ray_train.py")
        self._process = subprocess.Popen(
            [sys.executable, str(program), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            self._answer()
        except FailedError:
            self.close()
            raise

    def fit(self, *, reduces: bool = False) -> dict[str, float]:
        """Train once; return the seconds: `fit`, and `reduce` if asked for."""
        assert self._process.stdin is not None
        self._process.stdin.write("reduce\n" if reduces else "nothing\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], FIT_LIMIT)[0]:
            self._process.kill()
            raise FailedError(f"no answer within {FIT_LIMIT:g} s")
        if not (line := self._process.stdout.readline()):
            raise FailedError(f"its process ended with {self._process.wait()}")
        found = json.loads(line)
        if "failed" in found:
            raise FailedError(found["failed"])
        return dict(found)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
