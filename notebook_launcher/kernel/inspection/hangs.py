"""Finds ranks that wait in a collective which other ranks have not entered, by looking at them from outside.

Ranks do nothing for this: no thread, no record, no cost at any step. Linux counts how often the main thread of a
process has gone to sleep voluntarily. While the thread waits in one collective, the count does not change; a rank
that trains raises it many times a second. The run's thread therefore reads two small files of each rank about once a
second. A rank is asked for its stack only if its count has not changed for `hang_notice` seconds, and the other ranks
are asked only if that stack ends in a collective.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from notebook_launcher.kernel.inspection.gpu_waits import CUDA_WAIT
from notebook_launcher.kernel.inspection.stacks import Stacks
from notebook_launcher.kernel.inspection.standstill import Standstill
from notebook_launcher.wording.counts import plural_verb, rank_list
from notebook_launcher.wording.units import format_elapsed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from notebook_launcher.engines.gauges import Pulse
    from notebook_launcher.kernel.inspection.stacks import RankStack

__all__ = ["Hang", "HangWatch"]

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
        seconds = {call: now - min(self.since[rank] for rank in ranks) for call, ranks in self._calls().items()}
        return [
            f"{rank_list(ranks)} {verb(ranks)} {format_elapsed(seconds[call])} in {call}"
            for call, ranks in self._calls().items()
        ]

    def _files(self) -> frozenset[str]:
        """Return the files in which ranks wait."""
        waiting = (stack.here for stack in self.stacks if stack.rank in self.since)
        return frozenset(here.file for here in waiting if here is not None)


class HangWatch:
    """Looks at the ranks of one attempt at intervals; used in the run's thread.

    Args:
        notice_after: `LaunchConfig.hang_notice`: seconds of waiting after which a wait counts; None: never.
        began: Time at which the ranks begin, by `time.monotonic()`.
        uses_gpu: True if the ranks use GPUs.
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

        Args:
            now: The time, by `time.monotonic()`.
            pulses: Reads the pulses of the ranks that run the function.
            absent: The other ranks, each with its activity: `has returned`.
            dump: Asks ranks for their stacks.
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
        kept = {rank: since for rank, since in self.hang.since.items() if self._since(rank) == since}
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

    def _since(self, rank: int) -> float | None:
        return self._standstills[rank].since if rank in self._standstills else None

    def _parse(self, dumps: Mapping[int, str]) -> Stacks:
        return Stacks.parse(dumps, uses_gpu=self._uses_gpu)

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
        stacks = {stack.rank: stack for stack in self._parse(dump(due))}
        waiting = {rank: self._standstills[rank].since for rank, stack in stacks.items() if self._note(stack, now)}
        if not waiting:
            return None
        others = self._standstills.keys() - set(due)
        stacks |= {stack.rank: stack for stack in self._parse(dump(others))} if others else {}
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
