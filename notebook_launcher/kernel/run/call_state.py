"""The state of one call on each rank, from the moment it is sent until every rank has settled.

A rank has settled when it waits for the next call or its process has exited.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Literal, TypeAlias

from notebook_launcher.engines.engine import SupervisorLost
from notebook_launcher.kernel.failures.culprit import lost_its_peer
from notebook_launcher.messaging import messages

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Self

    from notebook_launcher.engines.engine import NodeLost


IDLE = "is idle, so the collective never ends: interrupt the cell, and run it on all ranks"


class CallState:
    """State of each rank in one call; its fields are read by all, and written by the attempt alone."""

    def __init__(self, num_processes: int, called_ranks: tuple[int, ...] | None) -> None:
        self.num_processes = num_processes
        self.outcomes: dict[int, RankOutcome] = {}
        """By rank, for each rank on which the call has ended."""
        self.started: set[int] = set()
        """The ranks that have begun the function."""
        self.supervisor_lost: str | None = None
        """The reason why the supervisor is gone; None while it lives."""
        self.node_lost: NodeLost | None = None
        """The first node that is gone; None on one machine, and while all nodes live."""
        self.not_started: messages.RankNotStarted | None = None
        """The first rank that could not be started."""
        self.debugged: int | None = None
        """The rank whose frames the user looks into; until the user leaves, no rank is stopped and no clock runs."""
        self.left: set[int] = set()
        """The ranks that were asked to leave the process group."""
        self.doomed: set[int] = set()
        """The ranks that were sent SIGKILL."""
        self._called_ranks = called_ranks

    @property
    def sorted_outcomes(self) -> list[RankOutcome]:
        """The outcomes in rank order."""
        return [self.outcomes[rank] for rank in sorted(self.outcomes)]

    def close(self) -> None:
        """Close the parcels of outcomes that will not be read; idempotent."""
        for outcome in self.outcomes.values():
            outcome.close()

    def note_not_started(self, event: messages.RankNotStarted) -> None:
        """Note that a rank could not be started."""
        self.not_started = self.not_started or event

    def replace(self, outcome: RankOutcome) -> None:
        """Set the outcome of a rank, in place of an earlier outcome."""
        if outcome.rank in self.outcomes:
            self.outcomes[outcome.rank].close()
        self.outcomes[outcome.rank] = outcome

    def note_exit(self, exited: messages.RankExited) -> bool:
        """Add the exit of a rank to its outcome; return False if the rank has none yet."""
        known = self.outcomes.get(exited.rank)
        if known is None:
            return False
        known.pid = exited.pid
        if known.raised is not None and known.raised.is_spent:
            known.was_removed = True
        else:
            known.exited = exited
        return True

    def note_killed_at_exit(self, rank: int) -> None:
        """Note that a rank is killed in its exit handlers, which is no failure of a function that has returned."""
        outcome = self.outcomes[rank]
        outcome.after_stop = outcome.after_stop or not outcome.failed

    def note_loss(self, event: SupervisorLost | NodeLost) -> None:
        """Note that the tree is of no further use."""
        if isinstance(event, SupervisorLost):
            self.supervisor_lost = event.reason or "its process ended"
        else:
            self.node_lost = self.node_lost or event

    def leave_group(self) -> frozenset[int]:
        """Note that the ranks on which the call has ended are asked to leave the group; return those to ask now."""
        leaving = frozenset(self.outcomes.keys() - self.left)
        self.left |= leaving
        return leaving

    @property
    def tree_lost(self) -> bool:
        """True if the tree is of no further use, because its supervisor or a node is gone."""
        return self.supervisor_lost is not None or self.node_lost is not None

    @property
    def failed(self) -> bool:
        """True if a rank gave no value, or the tree was lost."""
        return self.tree_lost or bool(self.failures)

    @property
    def failures(self) -> list[RankOutcome]:
        """The outcomes of the ranks that gave no value."""
        return [outcome for outcome in self.outcomes.values() if outcome.failed]

    @property
    def unsettled(self) -> tuple[int, ...]:
        """The ranks that have not settled."""
        return tuple(rank for rank in range(self.num_processes) if not self._has_settled(rank))

    @property
    def all_settled(self) -> bool:
        """True if all ranks have settled."""
        # While the function runs, this is asked after each batch of events, of as many as a thousand ranks.
        return len(self.outcomes) == self.num_processes and not self.unsettled

    def _has_settled(self, rank: int) -> bool:
        # A rank that was sent SIGKILL settles only when it has exited, even if it still sent its outcome.
        if rank not in self.outcomes or rank == self.debugged:
            return False
        return rank not in self.doomed or self.outcomes[rank].is_over

    @property
    def running(self) -> frozenset[int]:
        """The ranks that run the function."""
        return frozenset(self.started - self.outcomes.keys())

    @property
    def absent(self) -> dict[int, str]:
        """The ranks that do not run the function, each with its state, such as `has returned`."""
        outcomes = {rank: "has ended" if outcome.failed else "has returned" for rank, outcome in self.outcomes.items()}
        everyone = set(range(self.num_processes))
        late = everyone - self.started - self.outcomes.keys()
        idle = everyone - set(self._called_ranks) if self._called_ranks is not None else set()
        return dict.fromkeys(sorted(late), "has not started the function yet") | outcomes | dict.fromkeys(idle, IDLE)

    @property
    def broke_group(self) -> bool:
        """True if a failure has cost the ranks their process group."""
        return not self.kept_group and bool(self.failures)

    @property
    def kept_group(self) -> bool:
        """True if all ranks still have the process group with which the call began, and are in step in it."""
        groups = [outcome.group for outcome in self.outcomes.values()]
        kept = [group for group in groups if group is not None and group.is_kept]
        if self.left or len(kept) < len(groups):
            return False
        raised = [outcome.raised.report for outcome in self.outcomes.values() if outcome.raised is not None]
        return not raised or (_are_in_step(kept) and not any(lost_its_peer(report) for report in raised))


def _are_in_step(groups: Iterable[messages.GroupState]) -> bool:
    """Return True if all ranks that have called a collective have called it equally often."""
    num_calls: dict[str, set[int]] = {}
    for group in groups:
        for name, number in group.num_calls.items():
            num_calls.setdefault(name, set()).add(number)
    return all(len(numbers) == 1 for numbers in num_calls.values())


# --------------------------------------------------------------------------------------------------------------------
# The outcome of a call on one rank.


EndState: TypeAlias = Literal["returned", "failed", "stopped"]
"""State of a rank on which the call has ended."""


@dataclasses.dataclass(slots=True)
class RankOutcome:
    """The outcome of a call on one rank. Without `returned`, `raised` and `exited` the rank did not start."""

    rank: int
    time: float
    """Time of the end on this rank, by CLOCK_MONOTONIC."""
    returned: messages.Returned | None = None
    """The rank's record, if the function returned."""
    raised: messages.Raised | None = None
    """The rank's record, if the function raised."""
    exited: messages.RankExited | None = None
    """The supervisor's record, if the process has exited."""
    was_removed: bool = False
    """True if the process has exited after `raised`, because it was spent: see `messages.Raised.is_spent`."""
    pid: int | None = None
    """Process number of the rank; None if the process did not start."""
    parcel_fd: int | None = None
    """Descriptor of the value's or the exception's parcel; None if there is none, or once it is unpacked."""
    after_stop: bool = False
    """True if the outcome came after a stop of the run had begun; then it is not a failure of the rank's own."""

    @classmethod
    def of_record(cls, rank: int, record: messages.Returned | messages.Raised, fds: Sequence[int]) -> Self:
        """Return the outcome of a rank whose function has ended; `fds`: the descriptors beside the record."""
        outcome = cls(rank=rank, time=record.time, parcel_fd=fds[0] if fds else None)
        if isinstance(record, messages.Returned):
            outcome.returned = record
        else:
            outcome.raised = record
        return outcome

    @property
    def state(self) -> EndState:
        """State of the rank, apart from other ranks: the victim of another rank's failure counts as failed here."""
        return "returned" if not self.failed else "stopped" if self.after_stop else "failed"

    @property
    def is_over(self) -> bool:
        """True if the process has exited or never started."""
        return self.exited is not None or self.was_removed or (self.returned is None and self.raised is None)

    @property
    def is_spent(self) -> bool:
        """True if the process is alive and of no further use."""
        return not self.is_over and self.raised is not None and self.raised.is_spent

    @property
    def group(self) -> messages.GroupState | None:
        """State of the rank's process group; None if the process has exited."""
        record = self.returned or self.raised
        return None if record is None or self.is_over else record.group

    @property
    def failed(self) -> bool:
        """True if the function did not return on this rank."""
        return self.returned is None

    def take_parcel(self) -> int | None:
        """Return the parcel's descriptor, which the caller closes; None if there is none, and from then on."""
        fd, self.parcel_fd = self.parcel_fd, None
        return fd

    def close(self) -> None:
        """Close the parcel's descriptor; idempotent."""
        if (fd := self.take_parcel()) is not None:
            os.close(fd)
