"""Data of the loaders that several files of tests prepare."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

if TYPE_CHECKING:
    import torch


class Stream(IterableDataset[int]):
    """Numbers; from the second epoch on shuffled `by epoch`, or with Python's generator (`drawn`), if asked.

    Workers have every n-th.
    """

    def __init__(self, length: int, order: str = "counted") -> None:
        self.length, self.order, self.epoch = length, order, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        numbers = list(range(self.length))
        if self.order == "drawn":
            random.shuffle(numbers)
        elif self.order == "by epoch" and self.epoch:
            random.Random(self.epoch).shuffle(numbers)
        worker = get_worker_info()
        return iter(numbers if worker is None else numbers[worker.id :: worker.num_workers])


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.length


class Opaque:
    """Tensors in a type of the user's, which can be moved."""

    def __init__(self, values: torch.Tensor, *, moved: bool = False) -> None:
        self.values, self.moved = values, moved

    def to(self, device: Any) -> Opaque:
        return Opaque(self.values.to(device), moved=True)
