"""The ranks' time by sampled stacks: a tree of calls for each rank, as plain data."""

from __future__ import annotations

import dataclasses

__all__ = ["Flame", "FlameFrame"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlameFrame:
    """A function that was found running, in the calls that led to it."""

    name: str
    """`train, line 12` for the user's code, else the function's name."""
    place: str
    """File and line; empty for a wait."""
    count: int
    """Samples in which the function, or one that it called, was found."""
    is_wait: bool = False
    """True for a collective in which the rank waited for other ranks."""
    is_library: bool = False
    """True for the code of Python or of an installed package."""
    children: tuple[FlameFrame, ...] = ()
    """Functions that it called, the most frequent first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flame:
    """The sampled calls of one rank."""

    rank: int
    num_samples: int
    frames: tuple[FlameFrame, ...] = ()
    """The outermost functions, the most frequent first."""

    @property
    def wait_share(self) -> float:
        """Part of the samples in which the rank waited in a collective, 0 to 1."""
        return sum(map(_count_waits, self.frames)) / self.num_samples if self.num_samples else 0.0


def _count_waits(frame: FlameFrame) -> int:
    return frame.count if frame.is_wait else sum(map(_count_waits, frame.children))
