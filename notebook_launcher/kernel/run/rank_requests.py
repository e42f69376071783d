"""Requests of the run's thread to ranks that train: to stop, to save, to change settings, each at their next step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from notebook_launcher.messaging import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from notebook_launcher.engines.tree import Tree
    from notebook_launcher.messaging.messages import ChangeAction, ChangeSource
    from notebook_launcher.settings.changes import Wanted

__all__ = ["RankRequests"]


class RankRequests:
    """The requests of one attempt; the ranks find them on the board, and changes in their channels.

    Args:
        tree: The ranks' processes.
        clock: Returns the time.
    """

    def __init__(self, tree: Tree, clock: Callable[[], float] = time.monotonic) -> None:
        self._tree = tree
        self._clock = clock
        self.stop_asked_at: float | None = None
        """Time at which the ranks were first asked to stop after their step, by `clock`."""
        self.paused_after: int | None = None
        """Number of updates after which all ranks are held; None while they train."""
        self._num_changes = 0
        """Number of the last change that was sent."""

    def can_ask(self, ranks: Iterable[int]) -> bool:
        """Return True if one of these ranks looks at the stop flag."""
        return any(self._tree.board.is_read_by(rank) for rank in ranks)

    def ask_to_stop(self, ranks: Iterable[int]) -> bool:
        """Ask the ranks to stop after their present step; return True if one of `ranks` looks at the stop flag."""
        if not self.can_ask(ranks):
            return False
        if self.paused_after is not None:
            self.stop_asked_at = self._clock()
            return self.ask_to_change("stop")
        if self.stop_asked_at is None:  # Set before the flag, so that a rank that ends because of the flag ends later.
            self.stop_asked_at = self._clock()
        self._tree.board.ask_to_stop(together=True)
        return True

    def ask_to_save(self) -> bool:
        """Ask the ranks for a checkpoint; return True if an Accelerator will write it."""
        if self.paused_after is not None:
            return self.ask_to_change("save")
        self._tree.board.ask_to_save()
        return self._tree.board.has_safepoint

    def ask_to_change(
        self,
        action: ChangeAction,
        values: dict[str, Wanted] | None = None,
        source: ChangeSource = "code",
        profile: messages.ProfileOrder | None = None,
    ) -> bool:
        """Ask the ranks to do something after the same update; return True if an Accelerator will do it."""
        if not self._tree.board.has_safepoint:
            return False
        self._num_changes += 1
        change = messages.Change(
            number=self._num_changes, action=action, values=values or {}, source=source, profile=profile
        )
        self._tree.send_all(change)
        # Written last: a rank that sees the number finds the change in its channel.
        self._tree.board.announce_change(self._num_changes)
        return True

    def note_change(self, changed: messages.Changed) -> bool:
        """Note that a change was carried out; return True if it paused or resumed the ranks."""
        if changed.action not in ("pause", "resume"):
            return False
        self.paused_after = changed.update if changed.action == "pause" else None
        return True
