"""The ranks that a call is for, its name and arguments in words, and how its run is shown."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, TypeAlias

from notebook_launcher import travel
from notebook_launcher.kernel.calls.checks import describe_arguments
from notebook_launcher.messaging import messages
from notebook_launcher.travel import changed_modules, parcel, random_states
from notebook_launcher.wording import name_of

if TYPE_CHECKING:
    from notebook_launcher.messaging.channel import AnonymousFile
    from notebook_launcher.travel import FunctionCall


TakesDisplay: TypeAlias = Callable[[int, messages.Display | messages.ClearOutput], bool]
"""Takes the rich output of a rank, and returns True unless the cell is to show it as it comes."""
SUBSET_NOTICE = 2.0
"""Seconds after which a collective of some ranks counts as a hang: the other ranks are known to run nothing."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallScope:
    """The ranks that a call is for, its name and arguments in words, and how its run is shown."""

    ranks: tuple[int, ...] | None = None
    """The ranks that call the function, in order; None: all."""
    name: str = ""
    """The run's name; empty: the function's."""
    arguments: Mapping[str, str] | None = None
    """The call's arguments for readers; None: the function's own."""
    is_brief: bool = False
    """True if a run of less than a second has no last line."""
    displays: TakesDisplay | None = None
    """Decides about the ranks' rich output, in place of `LaunchConfig.display`."""

    widget_ranks: tuple[int, ...] | None = None
    """The ranks whose widgets the cell shows; None: the ranks that `LaunchConfig.display` names."""
    comm_messages: tuple[messages.CommMessage, ...] = ()
    """Messages of the page to widgets, to be handled before the call."""
    is_widget_call: bool = False
    """True for a call that only serves widgets: it has no view and no folder, and the ranks keep the last failure."""

    def describe(self, call: FunctionCall, name: str | None = None) -> CallScope:
        """Return the scope with a name and arguments for readers: its own, else the given name, else the call's."""
        arguments = describe_arguments(*call[:3]) if self.arguments is None else self.arguments
        return dataclasses.replace(self, name=self.name or name or name_of(call.fn), arguments=arguments)

    def includes(self, rank: int) -> bool:
        """Return True if the rank calls the function."""
        return self.ranks is None or rank in self.ranks

    def notice_after(self, hang_notice: float | None) -> float | None:
        """Return the seconds of waiting in a collective after which a line reports it; None: never."""
        return hang_notice if self.ranks is None or hang_notice is None else min(hang_notice, SUBSET_NOTICE)


EVERYWHERE = CallScope()
"""The scope of an ordinary run."""


# --------------------------------------------------------------------------------------------------------------------
# A call on its way to the ranks: packed into a parcel, or inherited by a fork.


MOST_NAMES = 3
"""Attributes that a line names."""


class OutgoingCall:
    """A call on its way to the ranks: packed into a parcel, which `close` closes, or inherited by a fork."""

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
        return "" if self.call is None else random_states.describe_copies(*self.call[:3], num_ranks=num_ranks)

    def stale_modules(self) -> list[str]:
        """Return the files that the call uses and that changed since this process imported them."""
        return changed_modules.stale_modules(None if self._parcel is None else self._parcel.fileno())

    def describe_replacements(self) -> tuple[str, str]:
        """Return a notice about attributes of libraries that ranks have from the notebook, and one about others.

        Either is empty if there is nothing new to tell.
        """
        notes = parcel.read_notes(self._parcel.fileno()) if self._parcel is not None else parcel.Notes()
        names, more = notes.replaced[:MOST_NAMES], len(notes.replaced) - MOST_NAMES
        listed = ", ".join(names) + (f" and {more} more" if more > 0 else "")
        return listed and f"ranks use your {listed}", "; ".join(notes.left)

    def close(self) -> None:
        """Let go of the function and its arguments, and close the parcel; idempotent."""
        if self._parcel is not None:
            self._parcel.close()
        self.call = self._parcel = None


# --------------------------------------------------------------------------------------------------------------------
# The folders from which the ranks import, and what they have gained since ranks were started: later calls of a session
# import from them, too.


def import_folders() -> list[str]:
    """Return `sys.path` as absolute folders, with those from which this process has imported the notebook's modules.

    After `os.chdir` an entry such as "" means another folder, but the kernel still has what it imported before. Such a
    folder comes first if the module would be found elsewhere otherwise, else last.
    """
    folders = []
    for entry in sys.path:
        if isinstance(entry, str):  # Python ignores other objects, too.
            # Python keeps for each entry the folder that it was when Python first looked there.
            seen = getattr(sys.path_importer_cache.get(entry), "path", entry)
            folders.append(os.path.normpath(os.path.join(_working_directory(), seen)))
    homes: dict[str, bool] = {}
    for name, module in list(sys.modules.items()):
        if "." in name or name in ("__main__", "__mp_main__"):
            continue
        held = getattr(module, "__dict__", {})
        place = str(next(iter(held.get("__path__") or ()), held.get("__file__")))
        if place.startswith(os.sep) and not changed_modules.is_of_installation(place + os.sep):
            home = os.path.normpath(os.path.dirname(place))  # noqa: PTH120 - the text, as it stands in `folders`
            if home not in folders:
                homes[home] = homes.get(home, False) or PathFinder.find_spec(name, folders) is not None
    return [*filter(homes.get, homes), *folders, *(home for home, is_hidden in homes.items() if not is_hidden)]


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # It was removed, so that a relative entry names nothing.
        return ""


class AddedFolders:
    """Folders of the import path that are newer than this object."""

    def __init__(self) -> None:
        self._begun = frozenset(import_folders())
        self._seen: list[object] = []
        self._first: tuple[str, ...] = ()
        self._last: tuple[str, ...] = ()

    def look(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the new folders before all others, and the other new ones."""
        now = [*sys.path, _working_directory(), len(sys.modules)]
        if now != self._seen:
            self._seen, folders = now, import_folders()
            self._first = tuple(itertools.takewhile(lambda folder: folder not in self._begun, folders))
            self._last = tuple(folder for folder in folders[len(self._first) :] if folder not in self._begun)
        return self._first, self._last
