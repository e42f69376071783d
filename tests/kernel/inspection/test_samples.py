"""The ranks' time by sampled stacks."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest

from notebook_launcher import launch
from notebook_launcher.drawing.reported import flame_svg
from notebook_launcher.errors import CallOrderError
from notebook_launcher.kernel.inspection.stacks import Samples, split_dumps

if TYPE_CHECKING:
    from pathlib import Path

    from notebook_launcher import Run


def spin() -> int:
    end = time.monotonic() + 60
    turns = 0
    while time.monotonic() < end:
        turns += 1
    return turns


def uneven() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        spin()
    dist.barrier()


def sampled_at_work(run: Run) -> Samples:
    """Return samples of a time at which rank 0 waited in the barrier, and rank 1 worked, on a busy machine too."""
    while True:
        samples = run.sample(0.2)
        drawn = flame_svg(samples[:1]), flame_svg(samples[1:])
        is_at_work = all(rank.num_samples > 2 and rank.wait_share == 0 for rank in samples[1:])
        if "barrier: " in drawn[0] and "spin, line" in drawn[1] and samples[0].wait_share == 1 and is_at_work:
            return samples


def test_samples_separate_work_from_waits(tmp_path: Path) -> None:
    run = launch(uneven, 2, output="none", monitor=False)
    samples = sampled_at_work(run)
    run.stop()
    waiting, working = samples
    assert str(waiting) != str(working)
    assert ", 100 % of them waits for other ranks\n" in str(samples)
    assert re.search(rf"rank 1: \d+ samples\n  [\d.]+ % {re.escape(__file__)}, line 2\d", str(samples))
    samples.save(tmp_path / "flame.svg")
    drawn = (tmp_path / "flame.svg").read_text()
    assert drawn == samples.to_svg()
    assert "uneven, line" in drawn
    assert "barrier: " in drawn
    assert "<img" in samples._repr_html_()
    with pytest.raises(CallOrderError, match="the run is over"):
        run.sample(1)


DUMP = """Thread 0x2 (most recent call first):
  File "worker.py", line 3 in work

Current thread 0x1 (most recent call first):
  File "train.py", line {line} in step
  File "train.py", line 9 in train
"""


def test_dumps_of_one_file_are_split() -> None:
    dumps = [DUMP.format(line=line) for line in (4, 5, 5)]
    assert [dump.split() for dump in split_dumps("".join(dumps))] == [dump.split() for dump in dumps]
    assert list(split_dumps("no dump")) == []
    (flame,) = Samples.parse({3: "".join(dumps)})
    assert (flame.rank, flame.num_samples) == (3, 3)
    (train,) = flame.frames
    assert [(frame.name, frame.count) for frame in train.children] == [("step, line 5", 2), ("step, line 4", 1)]
