"""Cells that launch on two nodes: what they show, and what they ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.kernels import Kernel

KERNEL_CODE = """
import os
from notebook_launcher import Commands, notebook_launch
engine = Commands([[], ["env"]])

def rank():
    return int(os.environ["RANK"])

class Batch:
    def __init__(self, size):
        self.size = size

def ask():
    return input("how many? ") if rank() == 3 else None

def fail():
    import torch.distributed as dist
    if rank() == 3:
        raise ValueError("boom")  # in the cell
    dist.barrier()

engine.look()
"""


@pytest.fixture(scope="module", autouse=True)
def nodes(module_kernel: Kernel) -> Iterator[None]:
    yield
    assert module_kernel.execute("engine.close()").error is None


def test_cell_shows_lines_of_all_nodes_values_of_its_classes_and_its_line_that_failed(
    module_kernel: Kernel,
) -> None:
    outcome = module_kernel.execute(
        "found = notebook_launch(lambda: print('here', rank()) or Batch(rank()), 3, engine=engine)\n"
        "print([isinstance(one, Batch) and one.size for one in found])"
    )
    assert outcome.error is None, outcome.traceback
    assert "3 CPU ranks, gloo" in outcome.stdout
    assert "on 2 nodes (" in outcome.stdout
    # Both nodes have this machine's name, so their numbers tell them apart.
    assert all(f"[rank {rank} on node {rank // 2}] here {rank}\n" in outcome.stdout for rank in range(3))
    assert outcome.stdout.endswith("[0, 1, 2]\n")
    failed = module_kernel.execute("notebook_launch(fail, 4, engine=engine)")
    assert failed.error == "ValueError: boom"
    assert 'raise ValueError("boom")  # in the cell' in failed.traceback


def test_rank_of_another_node_asks_in_the_cell(module_kernel: Kernel) -> None:
    cell = module_kernel.start("print(notebook_launch(ask, 4, engine=engine, output='none')[3])", allow_stdin=True)
    outcome = module_kernel.wait(cell, answer_input=lambda _prompt, _password: "seven")
    assert outcome.error is None, outcome.traceback
    assert outcome.stdout == "seven\n"


def test_interrupt_button_ends_the_run_on_all_nodes_and_no_agent(module_kernel: Kernel) -> None:
    children = "sorted(child.pid for child in __import__('psutil').Process().children())"
    before = module_kernel.execute(children).result
    code = "def wait(): print('up', flush=True); __import__('time').sleep(60)\nnotebook_launch(wait, 4, engine=engine)"
    cell = module_kernel.start(code)
    module_kernel.wait(cell, until=lambda outcome: outcome.done or "up" in outcome.stdout)
    module_kernel.interrupt()
    assert module_kernel.wait(cell).error == "KeyboardInterrupt: wait was stopped"
    assert module_kernel.execute(children).result == before
