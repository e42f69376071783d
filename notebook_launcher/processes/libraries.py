"""Shared libraries that processes call into, each opened once: a fork of the fork server inherits it open."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from pathlib import Path
from typing import Any

__all__ = ["libc", "name_process", "open_now", "set_library_threads", "signal_at_parents_death"]

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_GET_NAME = 16

THREAD_SETTERS = {
    # In NumPy's own builds since 1.26, in its builds before, and in the builds of a system.
    "openblas": ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads64_",
                 "openblas_set_num_threads"),
    "libgomp": ("omp_set_num_threads",),
    "libomp": ("omp_set_num_threads",),
    "libiomp": ("omp_set_num_threads",),
}  # fmt: skip
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


def name_process(name: str) -> str:
    """Name this process for `ps` and `top`, which show 15 characters; return its name before."""
    before = ctypes.create_string_buffer(16)
    with contextlib.suppress(OSError, AttributeError):
        libc().prctl(PR_GET_NAME, before, 0, 0, 0)
        libc().prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
    return before.value.decode(errors="replace")


def set_library_threads(number: int) -> None:
    """Set the threads of each OpenBLAS and OpenMP of this process: NumPy, SciPy and scikit-learn bring their own.

    In a fork they are loaded already and have read its parent's environment: eight ranks on eight cores would multiply
    matrices with 64 threads.
    """
    for setter in _thread_setters():
        setter(number)


@functools.lru_cache(maxsize=1)
def _thread_setters() -> list[Any]:
    """Return the functions that set the threads of the libraries that are loaded."""
    setters = []
    with contextlib.suppress(OSError):
        for path in dict.fromkeys(line.rpartition(" ")[2] for line in Path("/proc/self/maps").read_text().splitlines()):
            file = path.rpartition("/")[2]
            names = next((names for part, names in THREAD_SETTERS.items() if part in file), ())
            with contextlib.suppress(OSError):
                library = ctypes.CDLL(path) if names else None
                setters += [getattr(library, name) for name in names if hasattr(library, name)][:1]
    return setters
