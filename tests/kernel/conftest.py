"""One kernel for the files of this folder, reset before each of them: a kernel and its fork server take 8 CPU seconds.

A file whose tests need a kernel that nobody has used before says `KERNEL_IS_NEW = True`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from tests.support.warm_kernels import FIRST, run_cell, warm_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.kernels import Kernel

__all__ = ["module_kernel", "shared_kernels"]

# A handle that a variable, `Out` or the last exception holds would keep its session open.
RESET = """
import os, sys
os.chdir({cwd!r} or get_ipython().starting_dir)
for name in ("last_type", "last_value", "last_traceback", "last_exc"):
    vars(sys).pop(name, None)
if "notebook_launcher" in get_ipython().extension_manager.loaded:
    get_ipython().run_line_magic("unload_ext", "notebook_launcher")
get_ipython().reset(new_session=False)
__import__("gc").collect()
"""


class SharedKernels:
    """The shared kernel, and its successor if a failed test has left it busy."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._kernel: Kernel | None = None

    def reset(self, cwd: Path | None) -> Kernel:
        """Return a kernel without any variables, in this folder, that has launched."""
        if self._kernel is not None:
            with contextlib.suppress(Exception):
                return _reset(self._kernel, cwd)
            self._stack.close()
        self._kernel = self._stack.enter_context(warm_kernel())
        return _reset(self._kernel, cwd)


def _reset(kernel: Kernel, cwd: Path | None) -> Kernel:
    run_cell(kernel, RESET.format(cwd=str(cwd or "")))
    run_cell(kernel, FIRST)
    return kernel


@pytest.fixture(scope="session")
def shared_kernels() -> Iterator[SharedKernels]:
    """The shared kernel; it starts with the first file that needs it."""
    with contextlib.ExitStack() as stack:
        yield SharedKernels(stack)


@pytest.fixture(scope="module")
def module_kernel(
    request: pytest.FixtureRequest, shared_kernels: SharedKernels, kernel_code: str, kernel_cwd: Path | None
) -> Iterator[Kernel]:
    """A warm kernel for all tests of a file."""
    with contextlib.ExitStack() as stack:
        is_new = getattr(request.module, "KERNEL_IS_NEW", False)
        kernel = stack.enter_context(warm_kernel(cwd=kernel_cwd)) if is_new else shared_kernels.reset(kernel_cwd)
        run_cell(kernel, kernel_code)
        yield kernel
