"""The exception with which a rank's last call ended: kept with its frames, so that a debugger can look into them."""

from __future__ import annotations

import bdb
import contextlib
import gc
import sys
from typing import TYPE_CHECKING, Any

from notebook_launcher.messaging.messages import KeptFrames
from notebook_launcher.processes.failures.held_memory import gpu_bytes, tensor_bytes
from notebook_launcher.tracebacks import is_ours

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["KeptFailure"]


class KeptFailure:
    """Keeps the exception of a call until the next call begins."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    @property
    def is_kept(self) -> bool:
        """True if there is an exception to look into."""
        return self._error is not None

    def keep(self, error: BaseException) -> None:
        """Keep an exception, without the frames of the launcher around the function."""
        with contextlib.suppress(Exception):  # The exception may be frozen.
            error.__traceback__ = _own_frames(error.__traceback__)
        self._error = error

    def measure(self) -> KeptFrames | None:
        """Return the size of the kept frames' tensors; None without an exception, or without a frame of user code.

        Code that cannot be compiled has no frame.
        """
        step = None if self._error is None else self._error.__traceback__
        if step is None or is_ours(step.tb_frame.f_code.co_filename):
            return None
        frames = []
        while step is not None:
            frames.append(step.tb_frame)
            step = step.tb_next
        return KeptFrames(num_frames=len(frames), tensor_bytes=tensor_bytes(frames), gpu_bytes=gpu_bytes())

    def forget(self) -> None:
        """Release the exception and its frames, with all memory that only they hold."""
        if self._error is not None:
            self._error = None
            gc.collect()  # A frame that keeps an exception which passed through it is a cycle, and may hold GPU memory.

    def debug(self, rank: int, ask: Callable[[str], str]) -> None:
        """Open the debugger in the frame that raised, until the user leaves it; return at once if nothing is kept."""
        if self._error is None or self._error.__traceback__ is None:
            return
        from notebook_launcher.processes.failures.debugger import RankPdb

        debugger = RankPdb(rank, ask, sys.stdout)
        debugger.reset()
        with contextlib.suppress(bdb.BdbQuit, EOFError):  # EOFError: no user answers any more.
            # Since Python 3.13 pdb takes the exception itself, and can show the exceptions that led to it.
            shown: Any = self._error if sys.version_info >= (3, 13) else self._error.__traceback__
            debugger.interaction(None, shown)
        sys.settrace(None)


def _own_frames(step: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame on that is not the launcher's; all of it if every frame is."""
    first = step
    while first is not None and is_ours(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    return first or step
