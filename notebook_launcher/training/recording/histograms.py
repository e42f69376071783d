"""Histograms of tensors, for `report`."""

from __future__ import annotations

from typing import Any

import torch

from notebook_launcher.pictures import Histogram


def histogram(values: Any, bins: int = 64) -> Histogram:
    """Return the histogram of a tensor's values, which `report(weights=histogram(tensor))` shows in the monitor.

    The histogram is computed where the tensor is, and only the counts leave the device.

    Args:
        values: A tensor, an array, or a list of numbers.
        bins: Number of bins from the lowest to the highest finite value.

    Raises:
        ValueError: `bins` is not from 1 to 1000.
    """
    if not 1 <= bins <= 1000:
        raise ValueError(f"histogram(bins={bins!r}): the number of bins can be 1 to 1000.")
    flat = torch.as_tensor(values).detach().reshape(-1).float()
    finite = flat[flat.isfinite()]
    if not len(finite):
        return Histogram(0.0, 0.0, (0,) * bins, len(flat))
    low, high = finite.min().item(), finite.max().item()
    counts = torch.histc(finite, bins, low, high) if high > low else torch.zeros(bins)
    whole = [int(count) for count in counts.tolist()]
    if high == low:
        whole[bins // 2] = len(finite)
    return Histogram(low, high, tuple(whole), len(flat) - len(finite))
