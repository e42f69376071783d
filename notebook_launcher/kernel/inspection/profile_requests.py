"""Requests for a profile of a run: one at a time, until all its ranks have delivered."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from notebook_launcher.errors import check_rank
from notebook_launcher.kernel.inspection.profiles import Profile
from notebook_launcher.kernel.no_update_yet import no_update_yet
from notebook_launcher.messaging import messages
from notebook_launcher.tracebacks import for_caller

if TYPE_CHECKING:
    from notebook_launcher.history.recorder import Recorder
    from notebook_launcher.kernel.latch import Latch
    from notebook_launcher.kernel.run.commands import ProfileCommand
    from notebook_launcher.kernel.run.rank_requests import RankRequests

__all__ = ["ProfileRequests", "check_profile"]

MAX_PROFILED = 100
"""Updates of a profile: the trace of a large model takes a megabyte or more for each."""


def check_profile(updates: object, ranks: object, num_processes: int) -> tuple[int, ...]:
    """Return the ranks to profile, each once, in the order in which they were named.

    Args:
        updates: Number of updates, as the user typed it.
        ranks: The ranks, as the user typed them.
        num_processes: Number of ranks of the run.

    Raises:
        ValueError: The number of updates cannot be, or no rank is chosen.
        NoSuchRankError: The run has no such rank.
    """
    if isinstance(updates, bool) or not isinstance(updates, int) or not 1 <= updates <= MAX_PROFILED:
        msg = f"profile(updates={updates!r}): updates must be a whole number from 1 to {MAX_PROFILED}."
        raise for_caller(ValueError(msg))
    typed = f"profile(ranks={ranks!r})"
    named = list(ranks) if isinstance(ranks, Iterable) else []
    if not named:
        msg = f"{typed}: ranks must be a list of one or more ranks. Write ranks=[0]."
        raise for_caller(ValueError(msg))
    return tuple(dict.fromkeys(check_rank(rank, num_processes, typed=typed) for rank in named))


class ProfileRequests:
    """The profile of a run that was asked for and is not complete; used in the run's thread alone.

    Args:
        recorder: Writes the run's folder, in which the ranks leave their traces.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._pending: _PendingProfile | None = None

    def begin(self, command: ProfileCommand, requests: RankRequests, trainer: messages.TrainerMade | None) -> None:
        """Ask the ranks for a profile, or answer why there will be none; `trainer`: as for `no_update_yet`."""
        if self._pending is not None:
            command.answer.set(
                "this run is being profiled already. Wait for that profile, then call run.profile() again."
            )
            return
        folder = self._recorder.folder
        order = messages.ProfileOrder(
            ranks=command.ranks, updates=command.updates, folder=None if folder is None else str(folder)
        )
        if requests.ask_to_change("profile", profile=order):
            self._pending = _PendingProfile(command.ranks, command.answer)
            return
        command.answer.set(
            no_update_yet(
                "there is nothing to profile",
                "and try again after the first update; run.sample(seconds) shows where the time of any function goes",
                trainer,
            )
        )

    def note(self, record: messages.Profiled) -> None:
        """Add the result of a rank."""
        if self._pending is not None:
            self._pending.note(record)
            if self._pending.answer.is_set:
                self._pending = None

    def give_up(self) -> None:
        """Answer that the profile stays incomplete, because the ranks ended."""
        if self._pending is not None:
            self._pending.answer.set("the ranks ended before the profile was complete")
            self._pending = None


@dataclasses.dataclass(slots=True)
class _PendingProfile:
    """A profile that some ranks have not delivered yet."""

    ranks: tuple[int, ...]
    answer: Latch[Profile | str]
    records: dict[int, messages.Profiled] = dataclasses.field(default_factory=dict)

    def note(self, record: messages.Profiled) -> None:
        """Add the result of a rank, and give the answer once all are there."""
        self.records[record.rank] = record
        if self.records.keys() != set(self.ranks):
            return
        empty = [result for result in self.records.values() if not result.operators]
        if len(empty) == len(self.ranks):
            self.answer.set(f"rank {empty[0].rank}: {empty[0].problem or 'nothing was recorded'}")
        else:
            self.answer.set(Profile(self.records[rank] for rank in sorted(self.records)))
