"""A rank that the out-of-memory killer takes, in a real control group with a real limit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.warm_kernels import unchanged, warm_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT = 200 << 20


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with a memory limit, which a process may enter."""
    root = Path("/sys/fs/cgroup")
    version_1 = (root / "memory").is_dir()
    group = (root / "memory" if version_1 else root) / "notebook-launcher-test"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(LIMIT))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    group.rmdir()


def test_out_of_memory_kill_is_recognised(group: Path) -> None:
    with warm_kernel() as kernel, unchanged(kernel):
        outcome = kernel.execute(
            "def hungry():\n"
            "    import numpy, torch.distributed as dist\n"
            "    if os.environ['RANK'] == '1':\n"
            f"        open({os.fspath(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
            "        keep = [numpy.ones(1 << 24) for _ in range(100)]\n"
            "    dist.barrier()\n"
            "notebook_launch(hungry, 2)"
        )
    assert (outcome.error or "").startswith(
        "RankFailedError: rank 1 of 2 was killed by SIGKILL(-9), out of memory: it had"
    )
