"""A checkpoint that the launcher asks for, written by all ranks after the same update.

Ranks see the launcher's request at different moments, so rank 0 chooses: the end of its next window. It
writes that on the board, which all ranks map, before it takes part in that window's reduction; whoever has
come out of the reduction therefore finds it there. This costs no message, and one look at a byte for each window.
"""

from __future__ import annotations

import os
import struct
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher import context, messages

if TYPE_CHECKING:
    from notebook_launcher.context import RankContext

__all__ = ["Savepoint"]

CHOICE = struct.Struct("<QQ")
"""Which request, and after which update."""


class Savepoint:
    """Counts an Accelerator's synchronised backwards, one for each update, and knows when it is to save."""

    def __init__(self, accelerator: Any = None) -> None:
        self._accelerator = None if accelerator is None else weakref.ref(accelerator)
        self._num_updates = 0
        self._seen = 0
        self._is_due = False

    def count_update(self) -> None:
        """Say that all ranks have reduced their gradients; every rank does so at the same update."""
        self._num_updates += 1
        rank = context.current()
        if rank is None or not (rank.saver is self or self._claim(rank)):
            return
        asked = rank.board[context.SAVES_ASKED]
        if asked != self._seen:
            self._look(rank, asked)

    def _claim(self, rank: RankContext) -> bool:
        # One Accelerator of a call answers: two would count different updates.
        if rank.pid != os.getpid() or rank.saver is not None or self._accelerator is None:
            return False
        rank.saver, self._seen, self._is_due = self, 0, False
        rank.board[context.CAN_SAVE] = 1
        return True

    def _look(self, rank: RankContext, asked: int) -> None:
        request, at = CHOICE.unpack(rank.board[context.SAVE_CHOICE])
        if rank.rank == 0 and request != asked and at <= self._num_updates:
            # A peer may be past this update already, but not past the next one.
            request, at = asked, self._num_updates + (rank.num_processes > 1)
            rank.board[context.SAVE_CHOICE] = CHOICE.pack(request, at)
        if at == self._num_updates:
            self._seen, self._is_due = request, True

    def save_if_due(self) -> None:
        """Save, if this is the moment; called between two micro-batches, when the first one is done with."""
        accelerator = self._accelerator() if self._is_due and self._accelerator is not None else None
        if accelerator is None:
            return
        self._is_due = False
        configuration, folder = accelerator.project_configuration, None
        if not (configuration.automatic_checkpoint_naming and configuration.project_dir):
            folder = Path(configuration.project_dir or ".") / "checkpoints" / f"update_{self._num_updates}"
        saved = accelerator.save_state(folder)
        rank = context.current()
        if rank is not None and rank.rank == 0:
            rank.send(messages.Notice(text=f"saved {saved}, after update {self._num_updates}"))

    def __reduce__(self) -> tuple[Any, ...]:
        return Savepoint, ()  # An Accelerator that is pickled does not answer to another launch.
