"""A question to the user by the front end of the running cell, or by the terminal."""

from __future__ import annotations

import getpass
import os
import re
import sys
from typing import Any, Literal

from notebook_launcher.ipython_shell import kernel_shell

__all__ = ["READER", "Reader", "ask", "reader_of", "why_no_answers"]

CANNOT_ASK = "this front end cannot ask for input (nbclient, papermill and nbconvert never can)"
READER = "NOTEBOOK_LAUNCHER_READER"
"""Environment variable with the reader of cells: `agent` where requests allow input that nobody gives, `person` where
that is taken for an agent, and `file` for a program that runs a notebook whose output is to be kept whole."""

BY_PYTHON = re.compile(r"_\d+_\d+$")
"""End of the names of messages that jupyter_client sends: its process and a number. Pages send UUIDs alone."""
OF_SERVER = re.compile(r"kernel-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\.json$")
"""Connection files of kernels that a Jupyter server has started; consoles and Spyder name them otherwise."""

Reader = Literal["person", "viewer", "agent", "file"]
"""The reader of a cell. `"viewer"`: a person whose front end cannot ask. `"agent"`: a program that cannot answer, and
acts on what the cell shows, so that this is short. `"file"`: nobody looks now; a notebook keeps all of its output."""


def reader_of(message: Any) -> Reader:
    """Return who reads the cell that a message has started.

    Front ends state in each request that input is possible. Programs that run notebooks (nbclient, papermill,
    nbconvert, servers for agents) state that it is not.
    """
    named, message = os.environ.get(READER), message or {}
    may_ask = message.get("content", {}).get("allow_stdin", True)
    if may_ask and (named in {"person", "file"} or not (named == "agent" or _is_sent_by_program(message))):
        return "person"
    readers: dict[str | None, Reader] = {"person": "viewer", "file": "file"}
    return readers.get(named, "agent")


def _is_sent_by_program(message: Any) -> bool:
    """Return True for a request of a client in Python to a kernel of a Jupyter server, whose front ends are pages.

    jupyter-mcp-server 2.2 allows input, which it would read from its own client's requests.
    """
    number = str(message.get("header", {}).get("msg_id", ""))
    shell = kernel_shell()
    file = getattr(getattr(getattr(shell, "kernel", None), "parent", None), "connection_file", "")
    return bool(BY_PYTHON.search(number) and OF_SERVER.search(str(file)))


def ask(prompt: str, *, password: bool = False) -> str:
    """Ask the user; call it in the kernel's main thread.

    Raises:
        EOFError: The user cannot be asked here; the message gives the reason.
    """
    if why := why_no_answers():
        raise _no_answer(prompt, why)
    try:
        return getpass.getpass(prompt) if password else input(prompt)
    except (EOFError, OSError, RuntimeError) as error:  # IPython's StdinNotImplementedError is a RuntimeError
        raise _no_answer(prompt, "standard input has ended" if isinstance(error, EOFError) else CANNOT_ASK) from error


def _no_answer(prompt: str, reason: str) -> EOFError:
    hint = (
        'Switch breakpoints off with env={"PYTHONBREAKPOINT": "0"}.'
        if prompt.endswith(" pdb) ")
        else "Pass the value to the function as an argument instead."
    )
    return EOFError(f"no answer to {prompt!r}: {reason}. {hint}")


def why_no_answers() -> str:
    """Return the reason why `ask` cannot be answered in the running cell, as a clause; empty if it may be."""
    shell = kernel_shell()
    if shell is None:
        return "standard input is closed" if sys.stdin is None or sys.stdin.closed else ""
    return "" if reader_of(shell.kernel.get_parent("shell")) == "person" else CANNOT_ASK
