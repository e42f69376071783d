"""Memory of a sharded model on the CPU: large tensors that are freed leave no holes.

A sharded model allocates and frees whole parameters and gradients in each micro-batch. glibc serves blocks of up to
32 MB from its heap once such blocks were freed, and the shards that live on between them keep the heap from shrinking.
A transformer of 512 MB, shared out by 4 ranks, had 520 MB in tensors of a rank and grew to 1,220 MB of memory within 4
updates. With blocks of 8 MB and more outside the heap it stays at 860 MB. The price is that their pages are new at each
use: 9 to 13 % more processor time with micro-batches of 32 or 128 tokens, 4 to 6 % where large tensors lie in huge
pages (`processes/huge_pages.py`, which saves 7 to 9 %). With 1 MB the memory was 790 MB and the price 13 to 20 %; with
14 MB nothing was gained.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

__all__ = ["keep_out_of_heap"]

M_MMAP_THRESHOLD = -3
"""The number of this parameter in glibc's <malloc.h>."""
SMALLEST = 8 * 2**20
"""Bytes of the smallest block outside the heap."""
SET_BY_USER = (("MALLOC_MMAP_THRESHOLD_", ""), ("GLIBC_TUNABLES", "mmap_threshold"))
"""Variables by which the user chooses, and what their text then contains."""


def keep_out_of_heap(tensors: Iterable[torch.Tensor]) -> bool:
    """Let blocks of 8 MB and more go back to the system when they are freed, from now on in this process.

    Args:
        tensors: The parameters before they are sharded.

    Returns:
        False without effect: none of the parameters is so large, the user has set the size in the environment, or the
        C library is not glibc.
    """
    if all(tensor.nbytes < SMALLEST for tensor in tensors):
        return False
    if any(name in os.environ and part in os.environ[name] for name, part in SET_BY_USER):
        return False
    set_parameter = getattr(ctypes.CDLL(None), "mallopt", None)
    return set_parameter is not None and bool(set_parameter(M_MMAP_THRESHOLD, SMALLEST))
