"""The rank's connection to the cell: `display()`, figures, `input()`, `breakpoint()`, widgets.

A rank has neither a front end nor a terminal. Rich output goes to the kernel as records; code that reads from the user
asks the kernel and waits. A rank that is forked from the fork server has all heavy imports already; in a fresh
interpreter IPython's shell is made when IPython is first imported.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import os
import sys
from typing import TYPE_CHECKING, Any

from notebook_launcher.messaging import messages
from notebook_launcher.processes.notebook.rank_widgets import RankWidgets, divide_bars
from notebook_launcher.processes.rank.rank_process import flush
from notebook_launcher.travel.afterimport import after_import

if TYPE_CHECKING:
    import types
    from collections.abc import Callable


def warm() -> None:
    """Import and build everything that `connect` needs, in a process from which ranks are forked."""
    import getpass  # noqa: F401

    with contextlib.suppress(ImportError):
        from notebook_launcher.processes import failures  # noqa: F401
        from notebook_launcher.processes.notebook import shell

        shell.build(None)


def connect(
    rank: int,
    send: Callable[[object], None],
    request: Callable[[messages.InputRequest], messages.InputReply],
    *,
    send_soon: Callable[[object], None] | None = None,
) -> RankWidgets:
    """Connect this process, a rank, with the cell, and return its widgets.

    Args:
        rank: The number that prompts show.
        send: Sends a record to the kernel and returns when the kernel has received it; may be called from any thread
            and from forked children.
        request: Sends a request and waits for its reply.
        send_soon: Sends a record without waiting, as the many messages of widgets are sent; None: `send`.
    """
    keyboard = _Keyboard(rank, request)
    builtins.input = keyboard.input
    sys.stdin = _Stdin(keyboard)
    sys.breakpointhook = keyboard.breakpoint
    widgets = RankWidgets(rank, send_soon or send)
    widgets.patch_comm()
    _connect_display(send, keyboard, widgets)
    after_import(
        {
            "getpass": lambda module: vars(module).update(getpass=keyboard.getpass),
            "pdb": lambda module: vars(module).update(set_trace=keyboard.set_trace),
            "tqdm.notebook": lambda module: divide_bars(module, widgets),
        }
    )
    return widgets


def flush_figures() -> None:
    """Show the figures that were made and not shown yet, as IPython does at the end of a cell."""
    backend: Any = sys.modules.get("matplotlib_inline.backend_inline")
    if backend is not None:
        backend.flush_figures()


def _connect_display(send: Callable[[object], None], keyboard: _Keyboard, widgets: RankWidgets) -> None:
    interactive: Any = sys.modules.get("IPython.core.interactiveshell")
    if interactive is None or not interactive.InteractiveShell.initialized():
        if not hasattr(builtins, "display"):
            vars(builtins)["display"] = _display
        module = "notebook_launcher.processes.notebook.shell"
        after_import({"IPython": lambda _: importlib.import_module(module).build(send, widgets)})
        return
    from notebook_launcher.processes.notebook.shell import RankShell, disconnect

    shell = interactive.InteractiveShell._instance
    if isinstance(shell, RankShell):
        publisher: Any = shell.display_pub
        publisher.send, publisher.widgets = send, widgets
    else:
        disconnect(shell, send, keyboard.ask, widgets)


def _display(*objects: Any, **options: Any) -> Any:
    """Replace IPython's `display`, which notebooks use without an import, until its first call imports it."""
    try:
        from IPython.display import display
    except ImportError:
        print(*objects)  # noqa: T201
        return None
    vars(builtins)["display"] = display
    return display(*objects, **options)


class _Keyboard:
    def __init__(self, rank: int, request: Callable[[messages.InputRequest], messages.InputReply]) -> None:
        self._rank = rank
        self._request = request
        self._pid = os.getpid()

    def ask(self, prompt: str, *, password: bool = False) -> str:
        """Return the text that the user typed; raises EOFError, with the reason, if no user can answer."""
        if os.getpid() != self._pid:
            raise EOFError(
                f"a process that rank {self._rank} started (a data-loader worker?) asked for input: "
                f"{prompt!r}. Only the rank itself can ask."
            )
        flush()
        reply = self._request(messages.InputRequest(prompt=prompt, password=password))
        if reply.text is None:
            raise EOFError(reply.reason)
        return reply.text

    def input(self, prompt: object = "", /) -> str:
        """Replace the builtin `input`."""
        return self.ask(f"[rank {self._rank}] {prompt}")

    def getpass(self, prompt: str = "Password: ", stream: Any = None, **_options: Any) -> str:  # noqa: ARG002
        """Replace `getpass.getpass`."""
        return self.ask(f"[rank {self._rank}] {prompt}", password=True)

    def breakpoint(self, *args: Any, **options: Any) -> Any:
        """Replace `sys.breakpointhook`."""
        if os.environ.get("PYTHONBREAKPOINT", "") not in ("", "pdb.set_trace"):
            return sys.__breakpointhook__(*args, **options)  # noqa: T100
        return self._debug(sys._getframe(1), options.get("header"))

    def set_trace(self, *, header: str | None = None, **_options: Any) -> None:
        """Replace `pdb.set_trace`."""
        self._debug(sys._getframe(1), header)

    def _debug(self, frame: types.FrameType, header: str | None) -> None:
        from notebook_launcher.processes.failures import RankPdb

        debugger = RankPdb(self._rank, self.ask, sys.stdout)
        if header is not None:
            debugger.message(header)
        debugger.set_trace(frame)


class _Stdin(io.TextIOBase):
    encoding = "utf-8"

    def __init__(self, keyboard: _Keyboard) -> None:
        self._keyboard = keyboard

    def readable(self) -> bool:
        return True

    def readline(self, _size: int | None = -1) -> str:  # type: ignore[override]
        try:
            return self._keyboard.input() + "\n"
        except EOFError:
            return ""
