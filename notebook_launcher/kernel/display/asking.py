"""A question to the user by the front end of the running cell, or by the terminal."""

from __future__ import annotations

import getpass
import sys

from notebook_launcher.ipython_shell import kernel_shell

__all__ = ["ask", "why_no_answers"]

CANNOT_ASK = "this front end cannot ask for input (nbclient, papermill and nbconvert never can)"


def ask(prompt: str, *, password: bool = False) -> str:
    """Ask the user; call it in the kernel's main thread.

    Raises:
        EOFError: The user cannot be asked here; the message gives the reason.
    """
    try:
        return getpass.getpass(prompt) if password else input(prompt)
    except (EOFError, OSError, RuntimeError) as error:  # IPython's StdinNotImplementedError is a RuntimeError
        reason = "standard input has ended" if isinstance(error, EOFError) else CANNOT_ASK
        hint = (
            'Switch breakpoints off with env={"PYTHONBREAKPOINT": "0"}.'
            if prompt.endswith(" pdb) ")
            else "Pass the value to the function as an argument instead."
        )
        raise EOFError(f"no answer to {prompt!r}: {reason}. {hint}") from error


def why_no_answers() -> str:
    """Return the reason why `ask` cannot be answered in the running cell, as a clause; empty if it may be."""
    shell = kernel_shell()
    if shell is None:
        return "standard input is closed" if sys.stdin is None or sys.stdin.closed else ""
    request = shell.kernel.get_parent("shell").get("content", {})
    if request.get("allow_stdin", True):
        return ""
    return CANNOT_ASK
