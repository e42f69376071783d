"""`pdb` in a rank: its prompt is answered in the cell."""

from __future__ import annotations

import bdb
import io
import pdb  # noqa: T100
from typing import IO, TYPE_CHECKING, Any, cast

from notebook_launcher.tracebacks import is_ours
from notebook_launcher.travel import cells

if TYPE_CHECKING:
    from collections.abc import Callable
    from pdb import Pdb as PlainPdb
    from types import FrameType, TracebackType
else:
    # ipykernel puts IPython's debugger in the place of Python's, and a rank may be a fork of a kernel.
    PlainPdb = next(cls for cls in pdb.Pdb.__mro__ if cls.__module__ == "pdb")

__all__ = ["RankPdb"]


class RankPdb(PlainPdb):
    """A debugger whose prompt is part of the request for input, so that both are on one line."""

    def __init__(self, rank: int, ask: Callable[[str], str], stdout: Any) -> None:
        # Without nosigint, `continue` would replace the handler of SIGINT, with which a run is stopped.
        super().__init__(
            stdin=cast("IO[str]", _Prompt(self, f"(rank {rank} pdb) ", ask)),
            stdout=stdout,
            skip=["notebook_launcher.*"],
            nosigint=True,
        )
        self.prompt = ""
        self._rank = rank

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Handle an event of the traced code, as `bdb.Bdb`.

        Raises:
            BdbQuit: The user has left the debugger with `q`. The text is printed too, because IPython shows nothing of
                this exception.
        """
        try:
            return super().trace_dispatch(frame, event, arg)
        except bdb.BdbQuit:
            text = (
                f"the user has quit the debugger on rank {self._rank}, which ends the run (c leaves the debugger and "
                "continues)"
            )
            self.message(text)
            raise bdb.BdbQuit(text) from None

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """Return the stack and the frame to begin in: of a rank that was interrupted as it waited, the user's own."""
        stack, at = super().get_stack(f, t)
        if t is None or f is not None or len(stack) < 2 or not is_ours(stack[at][0].f_code.co_filename):
            return stack, at
        del stack[at:]  # The handler of the signal.
        own = [place for place, (frame, _) in enumerate(stack) if not _is_library(frame.f_code.co_filename)]
        return stack, own[-1] if own else len(stack) - 1

    def format_stack_entry(self, frame_lineno: tuple[FrameType, int], lprefix: str = ": ") -> str:
        """Return `Cell In[3](4)train()-> loss.backward()`, with the cell's name in place of its file name."""
        entry = super().format_stack_entry(frame_lineno, lprefix)
        filename = self.canonic(frame_lineno[0].f_code.co_filename)
        return entry.replace(filename, cells.shown_file(filename), 1)


def _is_library(filename: str) -> bool:
    """Return True for the file of an installed package, or of this one."""
    return is_ours(filename) or "/site-packages/" in filename or "/dist-packages/" in filename


class _Prompt(io.TextIOBase):
    def __init__(self, debugger: pdb.Pdb, prompt: str, ask: Callable[[str], str]) -> None:
        self._debugger = debugger
        self._prompt = prompt
        self._ask = ask

    def readline(self, _size: int | None = -1) -> str:  # type: ignore[override]
        # The `commands` command of pdb sets a prompt of its own for a while.
        return self._ask(self._debugger.prompt or self._prompt) + "\n"
