"""Comparison of the micro-batches that ranks have left out of their windows, by `continue` or a caught exception.

Each rank knows how many samples the others' loaders gave them, so a window of counted samples needs no exchange. That
holds only while all ranks use what they are given. A rank that leaves a micro-batch out writes what its window holds
before the next reduction, and looks for the other ranks' notes after it. Ranks that left out nothing write nothing,
which is the answer, and pay nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher import context
from notebook_launcher.training.accumulation.members.ddp import FORWARD_SYNCED
from notebook_launcher.training.rank_check.bulletin import Bulletin
from notebook_launcher.training.rank_check.divergence import SWITCH, named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.training.accumulation.members.member_kinds import PreparedModel
    from notebook_launcher.training.accumulation.windows.gradient_state import GradientState
    from notebook_launcher.training.accumulation.windows.windows import Window
    from notebook_launcher.training.requests.agreement import UpdateFence

__all__ = ["LeftOut"]


class LeftOut:
    """Finds windows that lack a micro-batch on some ranks, although other ranks have used theirs."""

    def __init__(self, gradient_state: GradientState, rank: int, num_processes: int, fence: UpdateFence) -> None:
        self._gradient_state = gradient_state
        self._rank = rank
        self._num_processes = num_processes
        self._fence = fence
        self._bulletin = Bulletin(rank, num_processes)
        self._num_reductions = 0
        """Backwards so far that have reduced the gradients; a rank's n-th one is paired with every other rank's."""
        self._registered_in: int | None = None
        """The run of a session in which the bulletin has named this object last."""
        self._held: list[int] | None = None
        """Contents of this rank's window, if this rank has written them for the present backward."""

    def write(self, window: Window, watched: Sequence[tuple[PreparedModel, Any]], *, syncs: bool) -> bool:
        """Before a backward: write what the window holds, if this rank left something out since the last reduction.

        Returns True if this rank has written, and `compare` has to follow.

        Args:
            window: The window that the backward belongs to.
            watched: The models that the backward may reach.
            syncs: True if the backward reduces the gradients.
        """
        found, self._held = self._gradient_state.loops.left_out, None
        # DDP reduces at the first backward after a forward that was to synchronise and had none.
        syncs = syncs or (found is not None and any(member.notes.forwards & FORWARD_SYNCED for member, _ in watched))
        if not syncs:
            return False
        self._num_reductions += 1
        if self._registered_in != context.call_id():  # On all ranks; later only some may have a word to write.
            self._registered_in = context.call_id()
            self._bulletin.register(self)
        # Weights that were given are added up over the ranks where a window ends.
        if found is not None and found.iteration is window.iteration and window.kind != "given":
            held = [self._gradient_state.loops.num_blocks, window.num_batches, window.num_backwards]
            if self._bulletin.write(self, self._topic, held):
                self._held = held
        return self._held is not None

    @property
    def _topic(self) -> str:
        return f"window {self._num_reductions}"

    def compare(self) -> None:
        """After the backward: compare with the other ranks, if this rank has written.

        Raises:
            RuntimeError: Another rank's window holds other micro-batches; on the ranks that left one out.
        """
        held, self._held = self._held, None
        if held is None:
            return
        self._fence.finish()  # On a GPU a peer could otherwise be about to write.
        found = self._bulletin.read(self, self._topic)
        others = [rank for rank in range(self._num_processes) if found.get(rank) != held]
        if not others:
            self._gradient_state.loops.forget_left_out()
            return
        left_out = self._gradient_state.loops.left_out
        how = "no block of accumulate() began for a batch of the loader, by `continue` for instance."
        if left_out is not None and left_out.was_begun:
            how = (
                "a block of accumulate() ended without a backward, by `continue` or by an exception that the loop "
                "caught."
            )
        way_out = "pass weight=len(inputs) to every backward: then a window counts what its ranks really hold."
        if left_out is not None and left_out.was_last:
            way_out = (
                "run its backward with weight=0 (and pass weight= in all other backwards of the window): the last "
                "micro-batch of a window reduces the gradients together with the other ranks."
            )
        raise RuntimeError(
            f"update {self._num_reductions}: rank {self._rank} left a micro-batch out of its window, and rank"
            f"{'s' * (len(others) > 1)} {named(others)} did not: {how} The ranks' gradients would be means over "
            f"different samples. Leave it out on all ranks, or {way_out} {SWITCH}"
        )
