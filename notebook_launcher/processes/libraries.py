"""Shared libraries that processes call into, each opened once: a fork of the fork server inherits it open."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from typing import Any

__all__ = ["libc", "name_process", "open_now", "openblas_setter"]

PR_SET_NAME = 15
PR_GET_NAME = 16

OPENBLAS_SETTERS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")
"""Names in NumPy's own builds since 1.26, in its builds before, and in the builds of a system."""


def open_now() -> None:
    """Open the libraries that every rank uses, in a process from which ranks are forked."""
    libc()
    if (numpy := sys.modules.get("numpy")) is not None:
        openblas_setter(numpy)


@functools.lru_cache(maxsize=1)
def libc() -> ctypes.CDLL:
    """Return the functions of the C library."""
    library = ctypes.CDLL(None)
    getattr(library, "prctl", None)  # Looked up here, so that forked supervisors and ranks inherit the function.
    return library


def name_process(name: str) -> str:
    """Name this process for `ps` and `top`, which show 15 characters; return its name before."""
    before = ctypes.create_string_buffer(16)
    with contextlib.suppress(OSError, AttributeError):
        libc().prctl(PR_GET_NAME, before, 0, 0, 0)
        libc().prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
    return before.value.decode(errors="replace")


@functools.lru_cache(maxsize=1)
def openblas_setter(numpy: Any) -> Any:
    """Return the function that sets the threads of NumPy's OpenBLAS; None if NumPy has another library."""
    core = numpy._core if hasattr(numpy, "_core") else numpy.core  # numpy._core since NumPy 2
    library = ctypes.CDLL(core._multiarray_umath.__file__)
    for name in OPENBLAS_SETTERS:
        if (setter := getattr(library, name, None)) is not None:
            return setter
    return None
