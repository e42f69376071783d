"""What ranks and training mend in torch: lines for its own developers in the output, and a name that it changed."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Iterator

PROFILER = re.compile(rb"^USDT:[^\n]*\] profiler_(?:start|stop)[^\n]*\n", re.MULTILINE)
GLOO = re.compile(rb"^\[Gloo\] Rank \d+ is connected to \d+ peer ranks\.[^\n]*\n", re.MULTILINE)
FIRST_WITH_GLOO, FIRST_WITHOUT = (2, 7), (2, 11)
"""The first versions of torch in which gloo writes such a line for each group of each rank, and no longer does."""


def set_group_timeout(timeout: dt.timedelta) -> None:
    """Set the longest wait of the default group's collectives; raise AttributeError if this torch cannot do so."""
    from torch.distributed import distributed_c10d as c10d

    # torch 2.15 has a public name for it, and warns of the old one.
    set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout  # noqa: SLF001
    set_timeout(timeout)


@contextlib.contextmanager
def without_profiler_lines() -> Iterator[None]:
    """Hold back standard error in this block, and pass it on without a profiler's two lines on its start and end.

    Kineto writes them to the descriptor, at a level that KINETO_LOG_LEVEL does not reach.
    """
    with _without(PROFILER, 2):
        yield


@contextlib.contextmanager
def without_gloo_lines() -> Iterator[None]:
    """Hold back standard output in this block, and pass it on without gloo's lines on the connections of a group."""
    import torch

    if not FIRST_WITH_GLOO <= tuple(map(int, torch.__version__.split(".")[:2])) < FIRST_WITHOUT:
        yield
        return
    with _without(GLOO, 1):
        yield


@contextlib.contextmanager
def _without(line: re.Pattern[bytes], fd: int) -> Iterator[None]:
    try:
        stream, held = os.dup(fd), os.memfd_create("held output")
    except OSError:  # No descriptors are left: the lines are the smaller evil.
        yield
        return
    os.dup2(held, fd)
    try:
        yield
    finally:
        os.dup2(stream, fd)
        os.lseek(held, 0, os.SEEK_SET)
        with open(held, "rb") as file, open(stream, "wb") as output:
            output.write(line.sub(b"", file.read()))
