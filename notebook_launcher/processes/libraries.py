"""Shared libraries that processes call into, each opened once: a fork of the fork server inherits it open."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15

THREAD_SETTERS = {
    # In NumPy's own builds since 1.26, in its builds before, and in the builds of a system.
    "openblas": tuple(f"{who}openblas_set_num_threads{bits}" for who in ("scipy_", "") for bits in ("64_", "")),
    **dict.fromkeys(("libgomp", "libomp", "libiomp"), ("omp_set_num_threads",)),
}
"""By a part of a library's file name: the functions that set its threads, of which it has one."""


def open_now() -> None:
    """Open the libraries that every rank uses, in a process from which ranks are forked."""
    libc()
    _thread_setters.cache_clear()
    _thread_setters()


@functools.lru_cache(maxsize=1)
def libc() -> ctypes.CDLL:
    """Return the functions of the C library."""
    library = ctypes.CDLL(None)
    getattr(library, "prctl", None)  # Looked up here, so that forked supervisors and ranks inherit the function.
    return library


def signal_at_parents_death(signum: int) -> None:
    """Have Linux send this process a signal when its parent dies, or the parent's thread that started it ends.

    SIGCONT does nothing to a process that runs, and lets one that is stopped (SIGSTOP) notice the death.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc().prctl(PR_SET_PDEATHSIG, int(signum), 0, 0, 0)


def name_process(name: str) -> None:
    """Name this process for `ps` and `top`, which show 15 characters."""
    with contextlib.suppress(OSError, AttributeError):
        libc().prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def set_library_threads(number: int) -> None:
    """Set the threads of each OpenBLAS and OpenMP of this process: NumPy, SciPy and scikit-learn bring their own.

    In a fork they are loaded already and have read its parent's environment: eight ranks on eight cores would multiply
    matrices with 64 threads.
    """
    for setter in _thread_setters():
        setter(number)


@functools.lru_cache(maxsize=1)
def _thread_setters() -> list[Any]:
    setters = []
    with contextlib.suppress(OSError):
        for path in dict.fromkeys(line.rpartition(" ")[2] for line in Path("/proc/self/maps").read_text().splitlines()):
            names = next((names for part, names in THREAD_SETTERS.items() if part in path.rpartition("/")[2]), ())
            with contextlib.suppress(OSError):
                library = ctypes.CDLL(path) if names else None
                setters += [getattr(library, name) for name in names if hasattr(library, name)][:1]
    return setters


# --------------------------------------------------------------------------------------------------------------------
# Huge pages: for the fork server's heap, which makes forks cheap, and for large tensors of ranks.
#
# A fork copies a table entry for each resident page, and an exit drops it again: with torch and its compiler
# imported, 216 MB of private memory are 54,000 entries. Collapsed into pages of 2 MB they are a hundred: a fork and
# exit of two children took 14.6 ms before and 5.8 ms after (Linux 6.18, 2 cores).


TENSORS_IN_HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Variable by which torch asks for huge pages for each tensor of 2 MB and more on the CPU; it is read at the first one.
An update of a transformer of 512 MB took 6.4 s of processor time instead of 7.1 with `fully_shard` on 4 ranks, and 3.5
instead of 3.7 with DistributedDataParallel, at 1 % more memory: a page of 2 MB costs one fault instead of 512."""

HUGE = 1 << 21
MADV_HUGEPAGE = 14
MADV_COLLAPSE = 25
"""Since Linux 6.1; older kernels refuse the call, and the memory stays as it is."""


def collapse() -> None:
    """Collapse this process's private anonymous memory into huge pages, if the system allows it."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        madvise = libc().madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for start, end in _anonymous_regions():
            if madvise(start, end - start, MADV_HUGEPAGE) != 0:
                continue
            for address in range(start, end, HUGE):
                madvise(address, HUGE, MADV_COLLAPSE)


def _anonymous_regions() -> list[tuple[int, int]]:
    """Return the parts of private writable anonymous memory that whole huge pages cover."""
    regions = []
    with open(f"/proc/{os.getpid()}/maps", encoding="ascii", errors="replace") as file:
        for line in file:
            addresses, permissions, _, _, inode = line.split(None, 5)[:5]
            if permissions != "rw-p" or inode != "0" or "[stack" in line:
                continue
            start, end = (int(part, 16) for part in addresses.split("-"))
            start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
            if start < end:
                regions.append((start, end))
    return regions
