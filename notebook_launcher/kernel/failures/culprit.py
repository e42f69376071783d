"""Finds the culprit: the rank with the first real failure, which need not be the first failure that was noticed.

The sockets of a rank that fails are closed, and a peer that waits for the rank in a collective fails too, often before
the first failure is noticed. Failures are therefore sorted by the time at which they happened (all processes share one
monotonic clock), and failures that look like consequences come last. The cell gets the error of the first
(`failure_display.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
from typing import TYPE_CHECKING, Literal

from notebook_launcher.kernel.display.output import error_line, format_report
from notebook_launcher.kernel.inspection.hangs import collective_in, waits_in
from notebook_launcher.kernel.inspection.stacks import crash_site
from notebook_launcher.wording import name_rank, plural_verb, rank_list, told

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from notebook_launcher.kernel.run.call_state import RankOutcome
    from notebook_launcher.messaging.messages import ExceptionReport, KeptFrames, Raised


CONSEQUENCES = re.compile(
    r"failed to pass monitoredbarrier"
    r"|connection (was (likely )?)?(closed|reset|refused|aborted)|closed by (remote )?peer|broken pipe|connection lost"
    r"|timed out|timeout|remote process exited|nccl (communicator was aborted|error)|watchdog"
    r"|process group .*(abort|shut)|socket .*(closed|reset)|peer (closed|disconnected)|no error \(recv\)",
    re.IGNORECASE,
)
TORCHS_COLLECTIVES = re.compile(r"/torch/(distributed|nn/parallel|autograd)/")
TOLD_BY_ANOTHER = re.compile(r"rank \d+ could not ")
"""Begins a `CheckpointError` on ranks that learn of another rank's error; the other rank raises the error itself."""
COLLECTIVE_ERRORS = re.compile(r"DistBackendError|DistNetworkError|DistStoreError|DistError|RuntimeError")
KIND_OF_STAGE: dict[str, Literal["arrival", "return"]] = {"arrive": "arrival", "return": "return"}
"""Kind of a failure by the stage of the call that raised it, for stages other than the function itself."""
STOPPED = "stopped"
"""The summary of a rank that ended because the run was stopped."""
INTERRUPTS = ("KeyboardInterrupt", "notebook_launcher.context.RunStopped")
LAST_LINES = 10
LEAVING = 1.0
"""Seconds after a rank has lost a peer in which the peer still returns: it closes its connections a little before."""
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""The signals at which faulthandler writes the stacks of all threads, as a process's last words."""
DUMP = "Fatal Python error: "
DUMP_LINES = 100 * 102
"""The most lines that faulthandler writes: 100 threads of 100 frames, each with a header and an empty line."""


def lost_its_peer(report: ExceptionReport) -> bool:
    """Return True if the exception looks like the consequence of another rank's end."""
    if not COLLECTIVE_ERRORS.search(report.type_name) or not CONSEQUENCES.search(report.message):
        return False
    if "CUDA error" in report.message:
        return False
    # The gradients of a DDP model are reduced inside autograd.
    return any(TORCHS_COLLECTIVES.search(frame.filename) for frame in report.frames)


def is_victim(report: ExceptionReport) -> bool:
    """Return True if another rank has the first failure: this one lost it as a peer, or received its failure."""
    is_told = report.type_name.endswith(".CheckpointError") and TOLD_BY_ANOTHER.match(report.message)
    return bool(is_told) or lost_its_peer(report)


def failures_of(
    failed: list[RankOutcome],
    last_lines: Callable[[int, int], tuple[str, ...]],
    nodes: Sequence[str],
    returned: Mapping[int, float],
) -> tuple[Failure, ...]:
    """Return the failure of each rank that failed, the culprit first.

    `last_lines` takes a rank and a number of lines. `nodes`: by rank, the name of its machine; empty if there is one.
    `returned`: by rank that returned, the time.
    """
    failures = [_failure(outcome, last_lines) for outcome in failed]
    failures = _left_waiting(failures, failed, returned)
    if nodes:
        failures = [dataclasses.replace(failure, node=nodes[failure.rank]) for failure in failures]
    return tuple(sorted(failures, key=lambda failure: (failure.victim, failure.time)))


def consequences(failures: tuple[Failure, ...]) -> dict[int, int]:
    """Return the victims, each with the culprit."""
    if not failures or failures[0].victim:
        return {}
    return {failure.rank: failures[0].rank for failure in failures if failure.victim}


def _failure(outcome: RankOutcome, last_lines: Callable[[int, int], tuple[str, ...]]) -> Failure:
    if outcome.raised is not None and outcome.raised.exit_code is None:
        report = outcome.raised.report
        return Failure(
            rank=outcome.rank,
            kind=KIND_OF_STAGE.get(outcome.raised.stage, "exception"),
            time=outcome.time,
            # A rank that was stopped, or that waited for a peer that was.
            summary=STOPPED
            if outcome.after_stop and (report.type_name in INTERRUPTS or is_victim(report))
            else error_line(report),
            traceback=format_report(report),
            pid=outcome.pid,
            victim=outcome.after_stop or is_victim(report),
            last_lines=last_lines(outcome.rank, LAST_LINES),
            kept=outcome.raised.kept,
            collective=collective_in(report),
        )
    exitcode = (
        outcome.raised.exit_code if outcome.raised is not None else outcome.exited.exitcode if outcome.exited else None
    )
    by_signal = exitcode is not None and exitcode < 0 and outcome.raised is None
    crashed = by_signal and -(exitcode or 0) in CRASHES
    words, place = _last_words(outcome.rank, last_lines) if crashed else (last_lines(outcome.rank, LAST_LINES), "")
    return Failure(
        rank=outcome.rank,
        kind="signal" if by_signal else "exit",
        time=outcome.time,
        summary=_exit_summary(outcome, exitcode),
        traceback=format_report(outcome.raised.report) if outcome.raised is not None else "",
        exitcode=exitcode,
        pid=outcome.pid,
        victim=outcome.after_stop,
        place=place,
        last_lines=words,
    )


def _left_waiting(failures: list[Failure], failed: list[RankOutcome], returned: Mapping[int, float]) -> list[Failure]:
    """Return the failures; those of ranks that lost peers which had returned tell so, and where the ranks waited."""
    calls = {
        outcome.rank: waits_in(outcome.raised.report)
        for outcome in failed
        if outcome.raised is not None and not outcome.after_stop and lost_its_peer(outcome.raised.report)
    }
    gone = {
        outcome.rank: tuple(sorted(r for r, time in returned.items() if time < outcome.time + LEAVING))
        for outcome in failed
    }

    def tell(failure: Failure) -> Failure:
        rank, left_by = failure.rank, gone[failure.rank]
        if rank not in calls or not left_by:
            return failure
        waiting = rank_list(other for other, call in calls.items() if call == calls[rank])
        have = plural_verb("has returned", len(left_by))
        summary = f"{rank_list(left_by)} {have}; {waiting} still waited in {calls[rank]}"
        return dataclasses.replace(failure, left_by=left_by, summary=summary)

    return [tell(failure) for failure in failures]


def _last_words(rank: int, last_lines: Callable[[int, int], tuple[str, ...]]) -> tuple[tuple[str, ...], str]:
    """Return the last lines that a rank wrote before it crashed, and the place of the crash according to its dump."""
    text = "\n".join(last_lines(rank, LAST_LINES + DUMP_LINES))
    before, mark, dump = text.rpartition(DUMP)  # Not by lines: the line before the dump may have no newline.
    if not mark:
        return tuple(dump.splitlines()[-LAST_LINES:]), ""
    site = crash_site(rank, dump)
    return tuple(before.splitlines()[-LAST_LINES:]), str(site) if site else ""


def _exit_summary(outcome: RankOutcome, exitcode: int | None) -> str:
    if outcome.raised is not None:
        return f"sys.exit({exit_argument(outcome.raised, exitcode)})"
    if outcome.exited is None or exitcode is None:
        return "did not start"
    if outcome.after_stop:
        return STOPPED
    if exitcode >= 0:
        return f"exit code {exitcode}"
    return signal_name(-exitcode) + (", out of memory" if outcome.exited.oom else "")


def exit_argument(raised: Raised, code: int | None) -> str:
    """Return what `sys.exit` was called with: a text ends a process with code 1, too."""
    text = raised.report.message
    return repr(text) if text and text != str(code) else str(code)


def signal_name(signum: int) -> str:
    """Return `SIGSEGV(-11)`: the name, and the number as exit codes show it."""
    with contextlib.suppress(ValueError):
        return f"{signal.Signals(signum).name}(-{signum})"
    return f"signal {signum}"


# --------------------------------------------------------------------------------------------------------------------
# The failure of one rank, as the kernel concludes and shows it; exceptions and results carry it.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The failure of one rank."""

    rank: int
    kind: Literal["exception", "exit", "signal", "arrival", "return"]
    """`"arrival"`: the function, or an object that it uses, could not be rebuilt in the rank; `"return"`: the rank
    was stopped or exited while its value was being packed."""
    time: float
    """Time of the failure by CLOCK_MONOTONIC, which all processes of the machine share, in seconds."""
    summary: str
    """One line: `ValueError: boom`, `SIGSEGV(-11)`, `exit code 3`."""
    traceback: str = ""
    """The rank's traceback, with the source lines of the notebook's cells."""
    exitcode: int | None = None
    pid: int | None = None
    """Process number of the rank; None if the process did not start."""
    victim: bool = False
    """True if the rank failed only because another rank did."""
    left_by: tuple[int, ...] = ()
    """Ranks that had returned while this rank still waited for others in a collective."""
    place: str = ""
    """The line of Python that called into C code that crashed, if it is known: `f, Cell In[3], line 4: x = g()`."""
    last_lines: tuple[str, ...] = ()
    """The end of the rank's output, without the stacks that a crash adds."""
    kept: KeptFrames | None = None
    """The frames that the rank keeps for `Session.debug` until its next call; None if it keeps none."""
    collective: str = ""
    """The rank's collective that did not match the other ranks' collectives (`check_collectives=True`)."""
    node: str = ""
    """The name of the rank's machine; empty if all ranks are on one."""

    __repr__ = told

    @property
    def who(self) -> str:
        """The rank, with its machine if there are several: `rank 3`, `rank 3 (gpu2)`."""
        return name_rank(self.rank, self.node)
