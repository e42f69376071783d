"""IPython's shell in this process, if there is one; nothing here imports IPython."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["kernel_shell", "running_shell"]


def running_shell() -> Any:
    """Return IPython's shell; None if IPython was not imported or has no shell."""
    ipython: Any = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def kernel_shell() -> Any:
    """Return the shell of a Jupyter kernel; None in a terminal or a script."""
    shell = running_shell()
    return None if getattr(shell, "kernel", None) is None else shell
