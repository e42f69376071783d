"""Times at which the recorder of a run writes its files."""

from __future__ import annotations

import collections
import time
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher import launch
from notebook_launcher.history.recorder import FIRST_AFTER, MAX_SHARE, Recorder
from tests.support.toy_runs import speak

if TYPE_CHECKING:
    from pathlib import Path

    from notebook_launcher.kernel.run.handle import Run


@pytest.fixture(scope="module")
def run() -> Run:
    run = launch(speak, 1, output="none", runs_folder=None)
    run.result(60)
    return run


class SlowReader:
    """A run of which one part takes some time to read, as with a thousand ranks."""

    def __init__(self, run: Run, slow: str, seconds: float) -> None:
        self.num_reads: collections.Counter[str] = collections.Counter()
        self._run, self._slow, self._seconds = run, slow, seconds

    def __getattr__(self, name: str) -> Any:
        self.num_reads[name] += 1
        if name == self._slow:
            time.sleep(self._seconds)
        return getattr(self._run, name)


@pytest.mark.parametrize(
    ("part", "seconds", "num_writes"), [("snapshot", 0.0, 2), ("snapshot", 0.3, 1), ("metrics_since", 0.3, 1)]
)
def test_slow_writes_become_rare(run: Run, part: str, seconds: float, num_writes: int, tmp_path: Path) -> None:
    reader = SlowReader(run, part, seconds)
    recorder = Recorder(reader, tmp_path, time.monotonic() - FIRST_AFTER, say=print)
    for passed in (0.0, 0.8 * 0.3 / MAX_SHARE):
        recorder.note()
        recorder.tick(time.monotonic() + passed)
    assert reader.num_reads[part] == num_writes
