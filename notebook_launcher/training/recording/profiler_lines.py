"""Keeps torch's own two lines about the start and the end of a profile off the standard error of a rank."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["without_profiler_lines"]

LINE = re.compile(rb"^USDT:[^\n]*\] profiler_(?:start|stop)[^\n]*\n", re.MULTILINE)


@contextlib.contextmanager
def without_profiler_lines() -> Iterator[None]:
    """Hold back standard error in this block, and pass it on without these lines.

    Kineto writes them to the descriptor, at a level that KINETO_LOG_LEVEL does not reach.
    """
    try:
        stderr, held = os.dup(2), os.memfd_create("stderr")
    except OSError:  # No descriptors are left: the lines are the smaller evil.
        yield
        return
    os.dup2(held, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        _pass_on(held)
        os.close(stderr)
        os.close(held)


def _pass_on(held: int) -> None:
    os.lseek(held, 0, os.SEEK_SET)
    with open(held, "rb", closefd=False) as file:
        rest = memoryview(LINE.sub(b"", file.read()))
    while rest:
        rest = rest[os.write(2, rest) :]
