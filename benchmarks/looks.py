"""Measure what it costs the kernel to know what cells have changed: `python benchmarks/looks.py`.

In a real kernel with large libraries: what runs after each cell, and what a launch does before its ranks, after cells
without news and after cells that may have changed something. All is processor time of the kernel's thread, the median.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.kernels import Kernel

START = """
import os, statistics, sys, time
import matplotlib.pyplot, pandas, sklearn.linear_model, torch, transformers
from transformers import BertModel
from notebook_launcher import notebook_launch
from notebook_launcher.engines.fork_server_handle import fork_server
from notebook_launcher.travel import replacements
from notebook_launcher.travel.registrations import find_registrations
from notebook_launcher.travel.settings import read_settings
def double(x): return 2 * x
class Net(torch.nn.Module): pass
table = pandas.DataFrame({"a": [1, 2]})
notebook_launch(lambda: 1, 2, output="none")
server, replaced = fork_server(), replacements.replaced_attributes_of(os.getpid())
class Result:
    class info: raw_cell = "x = 1"
def ms(function, times=1):
    took = []
    for _ in range(times):
        began = time.thread_time()
        function()
        took.append(time.thread_time() - began)
    print(f"{1000 * statistics.median(took):.2f}")
"""
ALWAYS = {
    "after a cell (goal: 0.1 ms)": "ms(lambda: server._after_cell(Result), 100)",
    "a launch: replaced attributes, no cell since": "ms(replaced.look, 100)",
    "a launch: settings of libraries": "ms(lambda: read_settings(replaced.called), 100)",
    "a scan of all modules": "ms(replacements._scan, 3)",
    "a search for registrations": "ms(lambda: find_registrations([double]), 3)",
}
CELLS = ("x = 1", "table.apply(double)", "table.apply(lambda x: x)", "matplotlib.rcParams['lines.linewidth'] = 3",
         "torch.nn.functional.gelu = double", "kept = [Net]; print(Net)")  # fmt: skip


def main() -> None:
    """Measure and print."""
    with Kernel() as kernel:
        run(kernel, START)
        print(run(kernel, "print(len(sys.modules), 'modules')"))
        for what, code in ALWAYS.items():
            print(f"{what}: {run(kernel, code)} ms")
        for cell in CELLS:
            run(kernel, "replaced.look()")
            run(kernel, cell)
            print(f"a launch's look after `{cell}`: {run(kernel, 'ms(replaced.look)')} ms")


def run(kernel: Kernel, code: str) -> str:
    """Return what a cell prints."""
    outcome = kernel.execute(code)
    assert outcome.error is None, outcome.traceback
    return outcome.stdout.strip()


if __name__ == "__main__":
    main()
