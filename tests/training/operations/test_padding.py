"""Tensors that are made equally long on all ranks, and batches that are made divisible by their number."""

from __future__ import annotations

import pytest
import torch

from notebook_launcher.training import operations
from tests.training.operations.calls import this_rank


@pytest.mark.parametrize(("size", "num_processes", "padded"), [(6, 4, 8), (4, 2, 4), (1, 3, 3)])
def test_pad_input_tensors_repeats_the_last_sample(size, num_processes, padded):
    data = {"x": torch.arange(size), "none": None}
    assert operations.pad_input_tensors(data, size, num_processes)["x"].tolist() == [
        min(at, size - 1) for at in range(padded)
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"pad_index": -1}, [[0, -1, -1], [1, 1, -1], [2, 2, 2]]),
        ({"pad_first": True}, [[0, 0, 0], [0, 1, 1], [2, 2, 2]]),
        ({"dim": -1, "pad_index": torch.tensor([9])}, [[0, 9, 9], [1, 1, 9], [2, 2, 2]]),
        ({"dim": 1}, [[0], [1, 1], [2, 2, 2]]),
    ],
)
def test_pad_across_processes_makes_all_as_long_as_the_longest(trio, options, expected):
    def pad():
        mine = torch.full((this_rank() + 1,), this_rank())
        return operations.pad_across_processes({"x": mine, "none": None}, **options)["x"].tolist()

    assert list(trio.run(pad)) == expected
