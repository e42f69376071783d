"""Outcomes of ranks that are made up: returned, raised by the rank's own fault, or raised because a peer was lost."""

from __future__ import annotations

from notebook_launcher.kernel.run.call_state import RankOutcome
from notebook_launcher.messaging import messages

GROUP = messages.GroupState(is_kept=True, num_calls={})
BOOM = messages.ExceptionReport(type_name="ValueError", message="boom", frames=())
LOST_PEER = messages.ExceptionReport(
    type_name="RuntimeError",
    message="Connection closed by peer [127.0.0.1]:28912",
    frames=(messages.Frame(filename="/x/torch/distributed/distributed_c10d.py", lineno=1, name="all_reduce"),),
)


def returned_record(at: float = 1.0, *, call_id: int = 1, group: messages.GroupState = GROUP) -> messages.Returned:
    """Return the record of a rank whose function has returned at this time."""
    return messages.Returned(call_id=call_id, time=at, peak_rss=7, group=group)


def raised_record(
    report: messages.ExceptionReport = BOOM, at: float = 1.0, *, group: messages.GroupState = GROUP
) -> messages.Raised:
    """Return the record of a rank whose function has raised at this time."""
    return messages.Raised(call_id=1, time=at, peak_rss=7, stage="function", report=report, group=group)


def returned(rank: int, group: messages.GroupState = GROUP) -> RankOutcome:
    """Return the outcome of a rank whose function has returned nothing."""
    return RankOutcome.of_record(rank, returned_record(group=group), ())


def raised(
    rank: int, report: messages.ExceptionReport = BOOM, at: float = 1.0, *, group: messages.GroupState = GROUP
) -> RankOutcome:
    """Return the outcome of a rank whose function has raised an exception that cannot travel."""
    return RankOutcome.of_record(rank, raised_record(report, at, group=group), ())
