"""A call on its way to the ranks: packed into a parcel, or inherited by a fork."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher import travel

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.messaging.channel import AnonymousFile

__all__ = ["OutgoingCall"]

MOST_NAMES = 3
"""Attributes that a line names."""


class OutgoingCall:
    """A call on its way to the ranks: packed into a parcel, or inherited by a fork.

    Args:
        call: The function and its arguments; None in a host, where only the ranks unpack them.
        parcel: The packed call, which `close` closes; None if it is not packed yet, or inherited.
    """

    def __init__(self, call: travel.FunctionCall | None, parcel: AnonymousFile | None = None) -> None:
        self.call = call
        """The function and its arguments; None in a host and after `close`."""
        self._parcel = parcel

    def pack(self, *, start: Callable[[], object], tell: Callable[[str], object]) -> None:
        """Pack the call; `start` and `tell` are called as by `travel.pack_call`, and the same errors are raised."""
        assert self.call is not None
        self._parcel = travel.pack_call(self.call, start=start, tell=tell)

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors beside the record that makes a rank call the function: the parcel's, or none."""
        return () if self._parcel is None else (self._parcel.fileno(),)

    def describe_copies(self, num_ranks: int) -> str:
        """Return notices about copies of which a user should know, such as generators; empty if there are none."""
        return "" if self.call is None else travel.describe_copies(*self.call[:3], num_ranks=num_ranks)

    def stale_modules(self) -> list[str]:
        """Return the files that the call uses and that changed since this process imported them."""
        return travel.stale_modules(None if self._parcel is None else self._parcel.fileno())

    def describe_replacements(self) -> tuple[str, str]:
        """Return a notice about attributes of libraries that ranks have from the notebook, and one about others.

        Either is empty if there is nothing new to tell.
        """
        notes = travel.read_notes(self._parcel.fileno()) if self._parcel is not None else travel.Notes()
        names, more = notes.replaced[:MOST_NAMES], len(notes.replaced) - MOST_NAMES
        listed = ", ".join(names) + (f" and {more} more" if more > 0 else "")
        return listed and f"ranks use your {listed}", "; ".join(notes.left)

    def close(self) -> None:
        """Let go of the function and its arguments, and close the parcel; idempotent."""
        if self._parcel is not None:
            self._parcel.close()
        self.call = self._parcel = None
