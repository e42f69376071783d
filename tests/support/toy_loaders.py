"""Prepared loaders of every kind over a few numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from notebook_launcher.training.data.prepare import prepare_data_loader

LOADERS = {
    "map": {},
    "stream": {"put_on_device": True, "device": torch.device("cpu")},
    "stream, not dispatched": {"dispatch_batches": False},
    "dispatched": {"dispatch_batches": True},
}


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


def plain(data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, **options)


def make(kind: str, length: int = 10, **options: Any) -> Any:
    data: Any = Stream(length) if "stream" in kind else range(length)
    return prepare_data_loader(plain(data, batch_size=4, **options), **LOADERS[kind])  # type: ignore[arg-type]


class Rows:
    """A data set that is asked for whole batches."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, indices: list[int]) -> list[int]:
        return list(indices)
