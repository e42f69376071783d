"""The condition of every debugger: a user who can answer its prompt."""

from __future__ import annotations

import threading

from notebook_launcher.errors import CallOrderError
from notebook_launcher.kernel.display.asking import why_no_answers

__all__ = ["check_answers"]


def check_answers(what: str, *, in_cell: bool = True) -> None:
    """Raise `CallOrderError` if no user can answer a prompt.

    Args:
        what: The call or the option that opens a debugger, as the user typed it.
        in_cell: True if a cell waits for the run.
    """
    reason = why_no_answers()
    if not in_cell:
        reason = "a run in the background has no cell that waits. Use notebook_launch(...) or session.run(...)"
    elif threading.current_thread() is not threading.main_thread():
        reason = "it was called in a thread, and only the main thread can ask. Call it in a cell"
    if reason:
        raise CallOrderError(f"{what} opens a debugger, whose prompt must be answered: {reason}.")
