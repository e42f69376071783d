"""The ranks that a call is for, its name and arguments in words, and how its run is shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from notebook_launcher.kernel.calls.argument_text import describe_arguments
from notebook_launcher.messaging import messages
from notebook_launcher.wording.value_text import name_of

if TYPE_CHECKING:
    from notebook_launcher.travel import FunctionCall

__all__ = ["EVERYWHERE", "CallScope", "TakesDisplay"]

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
