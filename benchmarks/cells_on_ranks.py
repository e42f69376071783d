"""Measure what a cell on ranks costs: `python benchmarks/cells_on_ranks.py [cells]`.

A real kernel runs cells in turns: one of its own, one on 2 ranks. Then 500 cells on the ranks, with the descriptors,
the memory and the source lines that the kernel and the ranks have before and after.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.kernels import Kernel

START = """
import os
from notebook_launcher import Session
session = Session(2, devices="cpu")
session.activate()
def look():
    import gc, linecache, os, psutil
    gc.collect()
    process = psutil.Process()
    return process.memory_info().rss // 1000, process.num_fds(), len(linecache.cache)
"""


def main() -> None:
    """Measure and print."""
    num_cells = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    with Kernel() as kernel:
        kernel.execute(START + "session.run(look)")
        for _ in range(20):
            timed(kernel, "1 + 1"), timed(kernel, "%%ranks\n1 + 1")
        own, ranks = zip(*[(timed(kernel, "1 + 1"), timed(kernel, "%%ranks\n1 + 1")) for _ in range(100)], strict=True)
        cost = statistics.median(ranks) - statistics.median(own)
        say(f"a cell of the kernel: {statistics.median(own):.2f} ms, on 2 ranks: {statistics.median(ranks):.2f} ms")
        say(f"a cell on 2 ranks costs {cost:.2f} ms more (goal: 4 ms)")
        look = "look(), *session.run(look)"
        before = kernel.execute(look).result
        for number in range(num_cells):
            kernel.execute(f"%%ranks\ndef made(): return {number}\nmade()")
        say(f"memory in kB, descriptors and source lines of the kernel and both ranks, before: {before}")
        say(f"after {num_cells} cells: {kernel.execute(look).result}")


def timed(kernel: Kernel, code: str) -> float:
    """Return the milliseconds from sending a cell to its end."""
    began = time.perf_counter()
    kernel.execute(code)
    return 1000 * (time.perf_counter() - began)


def say(text: str) -> None:
    """Print a line of the result."""
    print(text)


if __name__ == "__main__":
    main()
