"""The code on a page of Markdown, run as a reader would: block by block, in the cells of one real kernel.

A comment before a block says what is special about it:

    <!-- raises: ConfigError -->     the cell ends with this error
    <!-- answers: 3, continue -->    what to type where it asks, one after the other
    <!-- interrupted -->             the interrupt button is pressed as soon as a rank has printed a line
    <!-- needs: trl -->             run where this module can be imported; the page then has a kernel of its own
    <!-- not run: why -->

A ```text block right after it is what the cell shows: each of its lines must be there. Seconds and megabytes may
differ, and `…` stands for anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import TYPE_CHECKING

import psutil

from tests.support.kernels import Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.kernels import Outcome

BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<shown>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
MEASURED = {re.compile(r"[\d.,]+ (?:s|ms|µs)\b"): "# s", re.compile(r"[\d.,]+ (?:kB|MB|GB)\b"): "# MB"}


@dataclasses.dataclass(frozen=True)
class Block:
    """One block of code."""

    code: str
    mark: str
    value: str
    """Text after the mark's colon."""
    shown: tuple[str, ...]
    """Lines that it puts out."""


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page that are run."""
    for found in BLOCK.finditer(page):
        mark, _, value = (found["mark"] or "").partition(":")
        shown = tuple(line for line in (found["shown"] or "").splitlines() if line.strip())
        if mark != "not run":
            yield Block(found["code"], mark, value.strip(), shown)


@contextlib.contextmanager
def reader(cwd: Path) -> Iterator[Kernel]:
    """A kernel to read a page in; afterwards its fork server is gone, which may be in the middle of an import."""
    with Kernel(cwd=cwd) as kernel:
        yield kernel
        below = psutil.Process(kernel.pid).children(recursive=True)
    psutil.wait_procs(below, timeout=20)


def run(block: Block, kernel: Kernel) -> None:
    """Run one block and check what it shows."""
    outcome = _execute(block, kernel)
    expected = {"raises": block.value, "interrupted": "KeyboardInterrupt"}.get(block.mark)
    if expected is None:
        assert outcome.error is None, f"{block.code}\n{outcome.traceback}"
    else:
        assert (outcome.error or "").startswith(expected), f"{block.code}\n{outcome}"
    text = "\n".join([outcome.stdout, outcome.stderr, outcome.result or "", outcome.traceback])
    lines = [_without_measurements(line) for line in COLOUR.sub("", text).splitlines()]
    for line in block.shown:
        assert all(_is_in(expected, lines) for expected in ([line] if _is_in(line, lines) else _of_each_rank(line))), (
            f"{line!r} is not in\n{text}"
        )


def _is_in(line: str, lines: list[str]) -> bool:
    pattern = ".*".join(map(re.escape, _without_measurements(line).split("…")))
    return any(re.fullmatch(pattern, written) for written in lines)


def _of_each_rank(line: str) -> list[str]:
    """Return a line of several ranks as a line of each: on a busy machine one may write much later than another."""
    folded = re.fullmatch(r"\[ranks ([\d,]+)\] (.*)", line)
    return [line] if folded is None else [f"[rank {rank}] {folded[2]}" for rank in folded[1].split(",")]


def _execute(block: Block, kernel: Kernel) -> Outcome:
    if block.mark == "answers":
        answers = iter(block.value.split(", "))
        return kernel.execute(block.code, answer_input=lambda _prompt, _password: next(answers))
    if block.mark == "interrupted":
        cell = kernel.start(block.code)
        kernel.wait(cell, until=lambda outcome: "[rank" in outcome.stdout)
        kernel.interrupt()
        return kernel.wait(cell)
    return kernel.execute(block.code)


def _without_measurements(line: str) -> str:
    for measured, stands_for in MEASURED.items():
        line = measured.sub(stands_for, line)
    return line.strip()
