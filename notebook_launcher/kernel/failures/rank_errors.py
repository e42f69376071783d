"""The error that the cell gets for a failure: an exception in its original type, anything else as `RankFailedError`."""

from __future__ import annotations

import signal
from textwrap import indent
from typing import TYPE_CHECKING

from notebook_launcher.errors import InternalError, NodeLostError, RankFailedError
from notebook_launcher.kernel.failures.culprit import CRASHES, exit_argument, signal_name
from notebook_launcher.kernel.inspection.mismatches import SIZES_DIFFER, SUGGESTION
from notebook_launcher.wording.counts import rank_list
from notebook_launcher.wording.text import name_rank
from notebook_launcher.wording.units import format_bytes

if TYPE_CHECKING:
    from notebook_launcher.engines.events import NodeLost
    from notebook_launcher.kernel.failures.failure import Failure
    from notebook_launcher.kernel.hosting import UnpacksException
    from notebook_launcher.kernel.run.rank_outcome import RankOutcome

__all__ = ["cannot_travel", "node_lost_error", "supervisor_lost_error", "to_exception"]


_LEFT = (
    "Each rank has to take part in every collective: look for one under a condition on the rank, and for ranks with "
    "fewer batches."
)


def to_exception(
    culprit: RankOutcome,
    failure: Failure,
    num_ranks: int,
    unpack: UnpacksException,
    *,
    evidence: str = "",
    is_checked: bool = False,
) -> BaseException:
    """Return the exception that the cell gets for this failure.

    Args:
        culprit: The outcome of the rank that failed.
        failure: Its failure.
        num_ranks: Number of ranks.
        unpack: Takes an exception out of its parcel.
        evidence: Lines at the end of a message of the launcher's own, such as stacks; an original exception has none.
        is_checked: The ranks' collectives are compared (`check_collectives=True`).
    """
    if failure.left_by:
        # Torch's own error speaks of a crashed peer, or of a time that has not passed.
        return RankFailedError(_joined(f"{failure.summary}. {_LEFT}{'' if is_checked else f' {SUGGESTION}'}", evidence))
    if culprit.raised is not None and culprit.raised.exit_code is None:
        return _original(culprit, unpack, evidence)
    error = RankFailedError(_joined(_message(culprit, failure, num_ranks), evidence))
    error.exitcode = failure.exitcode
    return error


def _original(culprit: RankOutcome, unpack: UnpacksException, evidence: str) -> BaseException:
    assert culprit.raised is not None
    fd, report = culprit.take_parcel(), culprit.raised.report
    error = unpack(fd, report) if fd is not None else None
    return error if error is not None else cannot_travel(report.type_name, report.message, culprit.rank, evidence)


def cannot_travel(kind: str, message: str, rank: int, evidence: str = "") -> RankFailedError:
    """Return the error that stands in for an exception which cannot be rebuilt in the kernel."""
    return RankFailedError(_joined(f"{kind}: {message} (rank {rank}; the exception itself cannot travel)", evidence))


def _joined(*parts: str) -> str:
    return "\n".join(filter(None, parts))


def _message(outcome: RankOutcome, failure: Failure, num_ranks: int) -> str:
    rank = name_rank(outcome.rank, failure.node, of=num_ranks)
    code = failure.exitcode
    if outcome.returned is not None and code is not None:
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        where = failure.place or "an exit handler, a thread or a destructor"
        text = f"{rank} {how} after it had returned: in {where}. The values are in the exception's `results`."
    elif outcome.raised is not None:
        argument = exit_argument(outcome.raised, code)
        text = f"{rank} called sys.exit({argument}). Return a value, or raise an exception that describes the problem."
    elif outcome.exited is None or code is None:
        text = f"{rank} did not start. Launch again, and if that fails, with fewer ranks."
    elif code >= 0:
        text = f"{rank} exited with code {code} before it returned: something called os._exit, or C code exited."
    else:
        text = f"{rank} was killed by {signal_name(-code)}{_signal_hint(outcome, failure.place)}"
    if failure.last_lines:
        if any(SIZES_DIFFER.search(line) for line in failure.last_lines):
            text += f"\n{SUGGESTION}"
        text += "\nIts last output:\n" + "\n".join(f"    {line}" for line in failure.last_lines)
    return text


def _signal_hint(outcome: RankOutcome, place: str) -> str:
    assert outcome.exited is not None
    signum, peak = -outcome.exited.exitcode, format_bytes(outcome.exited.peak_rss)
    site = f", in {place}" if place else ""
    if signum == signal.SIGKILL and outcome.exited.oom:
        return f", out of memory: it had used {peak}. Use fewer ranks, smaller batches, or less captured data."
    if signum == signal.SIGKILL:
        return f". It had used {peak}. There is no sign that memory ran out, so another process or a user killed it."
    if signum == signal.SIGBUS:
        return f"{site}. Often /dev/shm is full: data-loader workers need it; see `df -h /dev/shm`."
    if signum in CRASHES:
        return f" in C code{site}" if place else " in C code; its stack is in its output."
    return "."


def node_lost_error(lost: NodeLost) -> NodeLostError:
    """Return the error for a node that is gone."""
    reason, _, words = lost.reason.partition("\n")
    error = NodeLostError(
        f"{lost.node} is gone, with {rank_list(lost.ranks)}: {reason}."
        + (f"\nIts last words:\n{indent(words, '    ')}" if words else "")
    )
    error.rank = lost.ranks[0] if lost.ranks else None
    return error


def supervisor_lost_error(reason: str) -> InternalError:
    """Return the error for a supervisor that is gone."""
    return InternalError(
        f"the supervisor of this run is gone ({reason}); its ranks were killed with it. Launch again, and if this "
        "happens again, report it with this message."
    )
