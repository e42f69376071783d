"""IPython's shell in this process, if there is one; nothing here imports IPython."""

from __future__ import annotations

import sys
from typing import Any

FRONT_END = ("IPython", "ipykernel", "ipywidgets", "jupyter_client", "traitlets", "zmq", "tornado", "comm", "debugpy")
"""Libraries of the kernel itself: what a notebook does with them is about its cells, and not for ranks."""


def running_shell() -> Any:
    """Return IPython's shell; None if IPython was not imported or has no shell."""
    ipython: Any = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def kernel_shell() -> Any:
    """Return the shell of a Jupyter kernel; None in a terminal or a script."""
    shell = running_shell()
    return None if getattr(shell, "kernel", None) is None else shell


def running_cell_file(shell: Any) -> str:
    """Return the file name under which IPython compiled the cell that calls this; empty if it is not known."""
    frame: Any = sys._getframe(1)  # noqa: SLF001 - the only way to the cell that called the magic
    while frame is not None and frame.f_globals is not shell.user_ns:
        frame = frame.f_back
    return "" if frame is None else str(frame.f_code.co_filename)
