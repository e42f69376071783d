"""Calls a panel after each cell of the notebook, for as long as the panel is open."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from notebook_launcher.ipython_shell import kernel_shell

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["call_after_cells"]

EVENT = "post_run_cell"


def call_after_cells(method: Callable[[], bool]) -> None:
    """Call a method after each cell, until it returns False or its object is gone; without a kernel, never."""
    shell = kernel_shell()
    if shell is None:
        return
    # Weakly, because the shell would keep the panel, and with the panel its run.
    reference = weakref.WeakMethod(method)

    def after(*_: Any) -> None:
        live = reference()
        if live is None or not live():
            shell.events.unregister(EVENT, after)

    shell.events.register(EVENT, after)
