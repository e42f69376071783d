"""Debug mode of collectives: tensors that do not fit together are listed, process by process."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from notebook_launcher.training import operations
from tests.training.operations.calls import error_on_all, on_all, this_rank


def in_debug_mode(function: Any) -> Any:
    def run():
        os.environ["ACCELERATE_DEBUG_MODE"] = "1"
        try:
            return function(this_rank())
        finally:
            del os.environ["ACCELERATE_DEBUG_MODE"]

    return run


MISFITS = {
    "gather": lambda rank: operations.gather({"x": torch.ones(2 + rank, 3)}),
    "reduce": lambda rank: operations.reduce(torch.ones(2).to(torch.int64 if rank else torch.float32)),
    "broadcast": lambda rank: operations.broadcast([torch.ones(1)] * (1 + rank)),
    "pad_across_processes": lambda rank: operations.pad_across_processes(torch.ones([2] * (1 + rank))),
}


@pytest.mark.parametrize("name", MISFITS)
def test_debug_mode_lists_the_value_of_each_process(pair, name):
    error = error_on_all(pair, in_debug_mode(MISFITS[name]))
    assert error.startswith(f"DistributedOperationException: {name} needs tensors that agree on all processes")
    first, second = error.splitlines()[1:3]
    assert first.startswith("  process 0: ")
    assert second.startswith("  process 1: ")
    assert first[13:] != second[13:]


def test_debug_mode_lets_what_fits_pass(pair):
    def work(rank):
        padded = operations.pad_across_processes(torch.ones(1 + rank))
        return operations.gather(padded).tolist()

    assert on_all(pair, in_debug_mode(work)) == [1.0, 0.0, 1.0, 1.0]
