"""Finds ranks that wait in a collective which other ranks have not entered, by looking at them from outside.

Ranks do nothing for this: no thread, no record, no cost at any step. Linux counts how often the main thread of a
process has gone to sleep voluntarily. While the thread waits in one collective, the count does not change; a rank
that trains raises it many times a second. The run's thread therefore reads two small files of each rank about once a
second. A rank is asked for its stack only if its count has not changed for `hang_notice` seconds, and the other ranks
are asked only if that stack ends in a collective.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import re
from typing import TYPE_CHECKING

from notebook_launcher.kernel.inspection.stacks import CUDA_WAIT, GROUP_CALLS, LIBRARIES, StackFrame, Stacks
from notebook_launcher.tracebacks import is_ours
from notebook_launcher.wording import format_elapsed, plural_verb, rank_list

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from notebook_launcher.engines.board import Pulse
    from notebook_launcher.kernel.failures.culprit import Failure
    from notebook_launcher.kernel.inspection.stacks import RankStack, ThreadStack
    from notebook_launcher.messaging.messages import ExceptionReport


SHORTEST_INTERVAL, LONGEST_INTERVAL = 0.05, 1.0
"""Seconds between two looks at the ranks; a quarter of `hang_notice`, within these bounds."""
FIRST_LOOK = 0.1
"""Seconds until the first look, so that a short call is over before it."""
MAX_SOURCE = 80
"""Characters of a line of code that are quoted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hang:
    """Ranks that wait for others, and where all ranks were when this was found."""

    since: Mapping[int, float]
    """By waiting rank: when the wait began, by `time.monotonic()`."""
    stacks: Stacks
    absent: Mapping[int, str]
    """By rank that runs no function at present: `has returned`, `has ended`."""

    def text(self, now: float) -> str:
        """Return `rank 0 has waited 12 s in all_reduce (Cell In[3], line 4); rank 1 is at line 7: time.sleep(60)`."""
        waits = self._waits(now, lambda ranks: plural_verb("has waited", len(ranks)))
        others: dict[str, list[int]] = {}
        files = self._files()
        for stack in self.stacks:
            if stack.rank not in self.since:
                others.setdefault(_describe(stack, files), []).append(stack.rank)
        for rank, end in self.absent.items():
            others.setdefault(end, []).append(rank)
        return "; ".join(
            [*waits, *(f"{rank_list(ranks)} {plural_verb(words, len(ranks))}" for words, ranks in others.items())]
        )

    def end_line(self, now: float) -> str:
        """Return the line that ends the notice: `rank 0 waited 47 s in all_reduce (...); the run continues`."""
        return "; ".join([*self._waits(now, lambda _: "waited"), "the run continues"])

    def places(self) -> dict[int, str]:
        """Return the place of each rank that runs the function, in a few words."""
        return {
            stack.rank: f"in {_call(stack)}" if stack.rank in self.since else _describe(stack).removeprefix("is ")
            for stack in self.stacks
        }

    @property
    def key(self) -> str:
        """The collectives and the places where ranks wait, in words, by which the same wait is recognised."""
        return "; ".join(self._calls())

    def _calls(self) -> dict[str, list[int]]:
        calls: dict[str, list[int]] = {}
        for stack in self.stacks:
            if stack.rank in self.since:
                calls.setdefault(_call(stack), []).append(stack.rank)
        return calls

    def _waits(self, now: float, verb: Callable[[list[int]], str]) -> list[str]:
        calls = self._calls()
        seconds = {call: now - min(self.since[rank] for rank in ranks) for call, ranks in calls.items()}
        return [
            f"{rank_list(ranks)} {verb(ranks)} {format_elapsed(seconds[call])} in {call}"
            for call, ranks in calls.items()
        ]

    def _files(self) -> frozenset[str]:
        """Return the files in which ranks wait."""
        waiting = (stack.here for stack in self.stacks if stack.rank in self.since)
        return frozenset(here.file for here in waiting if here is not None)


class HangWatch:
    """Looks at the ranks of one attempt at intervals; used in the run's thread.

    `notice_after`: `LaunchConfig.hang_notice`. `began`: time at which the ranks begin, by `time.monotonic()`.
    """

    def __init__(self, notice_after: float | None, began: float = -math.inf, *, uses_gpu: bool = False) -> None:
        self.hang: Hang | None = None
        """The present wait; None if no rank waits for others."""
        self._notice_after = math.inf if notice_after is None else notice_after
        self._interval = min(max(self._notice_after / 4, SHORTEST_INTERVAL), LONGEST_INTERVAL)
        self._is_on = notice_after is not None
        self._uses_gpu = uses_gpu
        self._look_at = began + min(FIRST_LOOK, self._interval)
        """Time of the next look, by `time.monotonic()`."""
        self._standstills: dict[int, Standstill] = {}
        """By rank: the period since its main thread last moved."""
        self._is_announced = False
        """True once the cell has a line about the present wait."""
        self._announced: dict[str, float] = {}
        """By `Hang.key`: the seconds that an announced wait lasted before it ended by itself."""

    def next_due(self, now: float) -> float | None:
        """Return the seconds until the next look; None: never."""
        return max(0.0, self._look_at - now) if self._is_on else None

    def reset(self) -> None:
        """Forget what is known, because ranks are being stopped or wait for the user."""
        self.hang = None
        self._is_announced = False
        self._standstills.clear()

    def forgive(self) -> None:
        """Ignore the moves of ranks that a request for all stacks causes."""
        for standstill in self._standstills.values():
            standstill.forgive()

    def poll(
        self,
        now: float,
        pulses: Callable[[], Mapping[int, Pulse]],
        absent: Mapping[int, str],
        dump: Callable[[Iterable[int]], Mapping[int, str]],
    ) -> str:
        """Look at the ranks, if that is due, and bring `hang` up to date; return a line for the cell, or nothing.

        `pulses` reads those of the ranks that run the function; `absent` has the others with their activity, such as
        `has returned`. `dump` asks ranks for their stacks.
        """
        if not self._is_on or now < self._look_at:
            return ""
        self._look_at = now + self._interval
        self._follow(now, pulses())
        line = self._release(now)
        due = [rank for rank, standstill in self._standstills.items() if standstill.is_due(now)]
        if due:
            # Ranks that are known to wait are asked again, so that the notice stays up to date.
            due += [rank for rank in (self.hang.since if self.hang else ()) if rank not in due]
            self.hang = self._examine(now, due, absent, dump) or self.hang
        return line or self._announce(now)

    def _follow(self, now: float, pulses: Mapping[int, Pulse]) -> None:
        before, self._standstills = self._standstills, {}
        for rank, pulse in pulses.items():
            standstill = before.get(rank)
            if standstill is None or not standstill.goes_on(pulse):
                standstill = Standstill(since=now, sample_after=self._notice_after, first=pulse, last=pulse)
            self._standstills[rank] = standstill

    def _release(self, now: float) -> str:
        """Drop the ranks that no longer wait; return a line for the cell once none waits."""
        if self.hang is None:
            return ""
        present = {rank: standstill.since for rank, standstill in self._standstills.items()}
        kept = {rank: since for rank, since in self.hang.since.items() if present.get(rank) == since}
        if kept:
            self.hang = dataclasses.replace(self.hang, since=kept) if kept != self.hang.since else self.hang
            return ""
        hang, self.hang = self.hang, None
        lasted = now - min(hang.since.values())
        is_announced, self._is_announced = self._is_announced, False
        if not is_announced:
            return ""
        self._announced[hang.key] = lasted
        return hang.end_line(now) if lasted >= 2 * self._notice_after else ""

    def _announce(self, now: float) -> str:
        """Return a line for a wait that has none yet; a wait that was announced before must last twice as long."""
        if self.hang is None or self._is_announced:
            return ""
        if now - min(self.hang.since.values()) < 2 * self._announced.get(self.hang.key, 0.0):
            return ""
        self._is_announced = True
        return self.hang.text(now)

    def _note(self, stack: RankStack, now: float) -> bool:
        """Record a rank's stack, and return True if the rank has waited for others since it last moved."""
        standstill = self._standstills[stack.rank]
        standstill.note(stack, now)
        return standstill.is_wait(stack, now)

    def _examine(
        self,
        now: float,
        due: list[int],
        absent: Mapping[int, str],
        dump: Callable[[Iterable[int]], Mapping[int, str]],
    ) -> Hang | None:
        """Ask the ranks that have not moved for their stacks, and if such a rank waits in a collective, all others."""
        stacks = {stack.rank: stack for stack in Stacks.parse(dump(due), uses_gpu=self._uses_gpu)}
        waiting = {rank: self._standstills[rank].since for rank, stack in stacks.items() if self._note(stack, now)}
        if not waiting:
            return None
        others = self._standstills.keys() - set(due)
        if others:
            stacks |= {stack.rank: stack for stack in Stacks.parse(dump(others), uses_gpu=self._uses_gpu)}
        for rank in others:
            if rank not in stacks or stacks[rank].waiting_in is None:
                del self._standstills[rank]  # The request has moved the rank, so its period starts again.
            elif self._note(stacks[rank], now) and now - self._standstills[rank].since >= self._notice_after:
                # Two ranks that entered at different times would otherwise never be found in one look.
                waiting[rank] = self._standstills[rank].since
        hang = Hang(since=waiting, stacks=Stacks(stacks[rank] for rank in sorted(stacks)), absent=absent)
        return hang if _is_missing(hang) or self._is_dead(hang, now) else None

    def _is_dead(self, hang: Hang, now: float) -> bool:
        """Return True if every rank waits and all are idle: no data will ever come.

        Ranks that use their processors may be moving data, and their GPUs may still be computing.
        """
        return all(
            stack.rank in hang.since and stack.waiting_in != CUDA_WAIT and self._standstills[stack.rank].is_idle(now)
            for stack in hang.stacks
        )


def _is_missing(hang: Hang) -> bool:
    """Return True if a rank is not in any of the collectives in which others wait."""
    calls = {stack.waiting_in for stack in hang.stacks if stack.rank in hang.since}
    return bool(hang.absent) or any(
        stack.waiting_in not in calls for stack in hang.stacks if stack.rank not in hang.since
    )


def _call(stack: RankStack) -> str:
    return f"{stack.waiting_in} ({stack.here.place})" if stack.here is not None else str(stack.waiting_in)


def _describe(stack: RankStack, files: frozenset[str] = frozenset()) -> str:
    """Return what a rank does; a place in the only one of `files` is its line alone."""
    here = stack.here
    if stack.main is None or here is None:
        return "did not answer" if stack.main is None else "is outside of the function"
    place = f"line {here.line}" if files == {here.file} else here.place
    doing = "is compiling (torch.compile) at" if stack.main.is_compiling else "is at"
    source = here.source if len(here.source) <= MAX_SOURCE else f"{here.source[: MAX_SOURCE - 3]}..."
    return f"{doing} {place}" + (f": {source}" if source else "")


# --------------------------------------------------------------------------------------------------------------------
# Collectives that do not match: which rank runs which collective, on which tensors, at which line.
#
# With `TORCH_DISTRIBUTED_DEBUG=DETAIL` torch compares the collectives of all ranks before it runs them. On a mismatch
# each rank gets an error that begins with a fingerprint of its own collective. Only that fingerprint is read, because
# the fingerprints of other ranks, which follow, may be garbled.


FINGERPRINT = re.compile(
    r"Detected mismatch between collectives on ranks\. Rank \d+ is running collective: "
    r"CollectiveFingerPrint\(SequenceNumber=\d+(?:, )?OpType=(?P<kind>\w+)"
    r"(?:, TensorShape=(?P<shapes>.*?), TensorDtypes=(?P<dtypes>.*?), TensorDeviceTypes=)?"
)
NAMES = {
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "all_reduce_coalesced",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "all_gather_into_tensor",
    "ALLGATHER_COALESCED": "all_gather_coalesced",
    "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "reduce_scatter_tensor",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all_single",
}
"""Public names of torch's collectives, unless they are the same in lower case."""
COLLECTIVES = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/c10d_logger.py")
"""Files with the collectives, and with the function around each."""
SIZES_DIFFER = re.compile(
    r"Is there a distributed collective mismatch in your code\?"
    r"|op\.preamble\.length <= op\.nbytes"  # torch 2.6
)
"""The words with which gloo aborts a process that got another number of bytes than it expected."""
SUGGESTION = (
    "Pass check_collectives=True to have the first collective named that does not match: by rank, with line and shape."
)
FLIGHT_RECORDER = (
    "With NCCL torch also records the last collectives of each rank: "
    'env={"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/nccl_rank_"} writes them at its '
    "time-out, and `torchfrtrace /tmp --prefix nccl_rank_` compares them (not tried by this package)."
)


def collective_in(report: ExceptionReport) -> str:
    """Return `all_reduce of float [10], Cell In[3], line 4: dist.all_reduce(x)`; empty without a mismatch."""
    found = FINGERPRINT.search(report.message)
    if found is None:
        return ""
    name = NAMES.get(found["kind"], found["kind"].lower())
    tensors = f" of {found['dtypes'].lower()} {found['shapes']}" if found["shapes"] else ""
    return _with_line(f"{name}{tensors}", report)


def waits_in(report: ExceptionReport) -> str:
    """Return the call in which a rank lost its peers: `all_reduce, Cell In[3], line 4: dist.all_reduce(x)`."""
    # An operation of this package goes by the name that the user has called.
    calls = [
        frame.name
        for frame in report.frames
        if is_ours(frame.filename) or (frame.filename.endswith(COLLECTIVES) and frame.name != "wrapper")
    ]
    in_backward = any("/torch/autograd/" in frame.filename for frame in report.frames)
    return _with_line("backward" if in_backward else calls[0] if calls else "a collective", report)


def _with_line(what: str, report: ExceptionReport) -> str:
    """Return what a rank was in, with the user's line that led there."""
    own = [frame for frame in report.frames if not (LIBRARIES.search(frame.filename) or is_ours(frame.filename))]
    if not own:
        return what
    frame = StackFrame(own[-1].name, own[-1].filename, own[-1].lineno)
    source = own[-1].line.strip() or frame.source
    return f"{what}, {frame.place}" + (f": {source}" if source else "")


def describe_mismatch(failures: tuple[Failure, ...]) -> list[str]:
    """Return a line for each collective, with its ranks; no line if none of the failures is a mismatch."""
    ranks: dict[str, list[int]] = collections.defaultdict(list)
    for failure in sorted(failures, key=lambda failure: failure.rank):
        if failure.collective:
            ranks[failure.collective].append(failure.rank)
    if not ranks:
        return []
    lines = [f"  {rank_list(callers)}: {collective}" for collective, callers in ranks.items()]
    return ["The ranks were in collectives that do not match:", *lines]


def suggestion(stacks: Stacks | None, *, is_checked: bool, backend: str | None) -> str:
    """Return lines that name what finds the cause if ranks waited in different collectives; else nothing."""
    waiting = {stack.waiting_in for stack in stacks or ()} - {None}
    if len(waiting) < 2:
        return ""
    lines = [] if is_checked else [SUGGESTION]
    return "\n".join([*lines, FLIGHT_RECORDER] if "nccl" in (backend or "") else lines)


# --------------------------------------------------------------------------------------------------------------------
# Period in which a rank's main thread has not moved, told from its process's counters and a few stacks.


TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
IDLE_SHARE, IDLE_TICKS = 0.05, 2
"""Processor time that an idle process may use: this share of the time, and 2 ticks, the clock's resolution."""
SPIN_SAMPLES = 3
"""Equal stacks in a row after which a thread that uses the processor counts as waiting: NCCL waits in a loop."""
FORGIVEN = 2
"""Looks in which a move is ignored, because the launcher's own request for a stack wakes the thread."""


@dataclasses.dataclass(slots=True)
class Standstill:
    """Period in which a rank's main thread has not moved."""

    since: float
    """Its beginning, by `time.monotonic()`."""
    sample_after: float
    """Age in seconds at which the rank is asked for its stack."""
    first: Pulse
    """The activity of the rank's process at the beginning, against which its use of the processor is measured."""
    last: Pulse
    """Its activity at the last look."""
    num_forgiven: int = 0
    """Further looks at which a move does not end the period."""
    main: ThreadStack | None = None
    """The main thread's stack in the last sample; None before the first."""
    num_alike: int = 0
    """Samples in a row that showed the same stack."""

    def goes_on(self, pulse: Pulse) -> bool:
        """Return True if the thread is where it was at the last look."""
        is_same_state = pulse.is_asleep == self.last.is_asleep
        if is_same_state and (pulse.num_sleeps == self.last.num_sleeps or self.num_forgiven):
            self.last, self.num_forgiven = pulse, 0
            return True
        self.num_forgiven -= 1
        return self.num_forgiven >= 0

    def forgive(self) -> None:
        """Ignore the moves that a request for a stack causes."""
        self.num_forgiven = FORGIVEN

    def is_due(self, now: float) -> bool:
        """Return True if the rank is to be asked for its stack."""
        return now - self.since >= self.sample_after

    def note(self, stack: RankStack, now: float) -> None:
        """Record a sample, and put the next one off for twice as long, if it was due."""
        self.num_alike = self.num_alike + 1 if stack.main == self.main else 1
        self.main = stack.main
        self.forgive()
        if self.is_due(now) and (self.last.is_asleep or not _is_in_call(stack) or self.num_alike >= SPIN_SAMPLES):
            self.sample_after *= 2

    def is_idle(self, now: float) -> bool:
        """Return True if no thread of the process has done anything that counts."""
        allowed = IDLE_TICKS + IDLE_SHARE * TICKS_PER_SECOND * (now - self.since)
        return self.last.ticks - self.first.ticks <= allowed

    def is_wait(self, stack: RankStack, now: float) -> bool:
        """Return True if the thread has waited for other ranks all the time."""
        if not self.last.is_asleep:
            # It may have left the collective and entered it again without sleeping.
            return _is_in_call(stack) and self.num_alike >= SPIN_SAMPLES
        # A backward pass may be computed by another thread of the process.
        return stack.waiting_in is not None and (_is_in_call(stack) or self.is_idle(now))


def _is_in_call(stack: RankStack) -> bool:
    """Return True if the stack names a wait, and not only a place where ranks may wait."""
    return stack.waiting_in in GROUP_CALLS or stack.waiting_in == CUDA_WAIT
