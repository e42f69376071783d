"""Cells that launch on two nodes: what they show, what they ask, and how they are interrupted."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.kernels import Kernel, Outcome

KERNEL_CODE = """
import os, time
from notebook_launcher import Accelerator, Commands, Session, launch, notebook_launch
engine = Commands([[], ["env"]])

def rank():
    return int(os.environ["RANK"])

class Batch:
    def __init__(self, size):
        self.size = size

def train():
    import torch
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    torch.nn.init.zeros_(accelerator.unwrap_model(model).weight)
    data = list(torch.arange(12.0).reshape(6, 2, 1))
    # Three micro-batches for each rank: the last window is cut short.
    for x in accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=1)):
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - x).square().mean() / 100)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model).weight.item()

def ask():
    return input("how many? ") if rank() == 3 else None

def fail():
    import torch.distributed as dist
    if rank() == 3:
        raise ValueError("boom")  # in the cell
    dist.barrier()

def wait():
    import torch.distributed as dist
    dist.barrier()
    print("up", flush=True)
    if rank():
        dist.barrier()
    time.sleep(60)

engine.look()
"""


@pytest.fixture(scope="module", autouse=True)
def nodes(module_kernel: Kernel) -> Iterator[None]:
    yield
    assert module_kernel.execute("engine.close()").error is None


def test_accumulation_over_nodes_gives_the_numbers_of_one_machine(module_kernel: Kernel) -> None:
    outcome = module_kernel.execute(
        "found = notebook_launch(train, 2, engine=engine, output='none')\n"
        "local = notebook_launch(train, 2, output='none')\n"
        "print(list(found) == list(local), len(set(found)), found[0] != 0)"
    )
    assert outcome.error is None, outcome.traceback
    assert outcome.stdout == "True 1 True\n"


def test_cell_shows_lines_of_all_nodes_with_their_rank_and_node(module_kernel: Kernel) -> None:
    outcome = module_kernel.execute("notebook_launch(lambda: print('here', rank()), 3, engine=engine);")
    assert outcome.error is None, outcome.traceback
    assert "3 CPU ranks, gloo" in outcome.stdout
    assert "on 2 nodes (" in outcome.stdout
    # Both nodes have this machine's name, so their numbers tell them apart.
    assert all(f"[rank {rank} on node {rank // 2}] here {rank}\n" in outcome.stdout for rank in range(3))


def test_values_of_the_notebooks_classes_return_as_such(module_kernel: Kernel) -> None:
    outcome = module_kernel.execute(
        "found = notebook_launch(lambda: Batch(rank()), 2, engine=engine, output='none')\n"
        "print([isinstance(one, Batch) and one.size for one in found])"
    )
    assert outcome.stdout == "[0, 1]\n", outcome.traceback


def test_rank_of_another_node_asks_in_the_cell(module_kernel: Kernel) -> None:
    cell = module_kernel.start("print(notebook_launch(ask, 4, engine=engine, output='none')[3])", allow_stdin=True)
    outcome = module_kernel.wait(cell, answer_input=lambda _prompt, _password: "seven")
    assert outcome.error is None, outcome.traceback
    assert outcome.stdout == "seven\n"


def test_error_shows_the_line_of_the_cell(module_kernel: Kernel) -> None:
    outcome = module_kernel.execute("notebook_launch(fail, 4, engine=engine)")
    assert outcome.error == "ValueError: boom"
    assert 'raise ValueError("boom")  # in the cell' in outcome.traceback


def is_up(outcome: Outcome) -> bool:
    return outcome.done or "up" in outcome.stdout


def test_interrupt_button_ends_the_run_on_all_nodes(module_kernel: Kernel) -> None:
    cell = module_kernel.start("notebook_launch(wait, 4, engine=engine)")
    module_kernel.wait(cell, until=is_up)
    began = time.monotonic()
    module_kernel.interrupt()
    outcome = module_kernel.wait(cell)
    assert outcome.error == "KeyboardInterrupt: wait was stopped"
    assert time.monotonic() - began < 10
