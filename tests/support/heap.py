"""Figures of the memory that glibc's allocator holds for this process."""

from __future__ import annotations

import ctypes

__all__ = ["mapped_blocks"]


class _MallInfo(ctypes.Structure):
    """The fields of glibc's `struct mallinfo2`, in order."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def mapped_blocks() -> int:
    """Return how many blocks lie outside the heap."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _MallInfo
    return int(ask().hblks)
