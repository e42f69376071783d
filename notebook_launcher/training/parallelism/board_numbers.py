"""Numbers that ranks of one machine count on the board, each in one byte."""

from __future__ import annotations

import os

from notebook_launcher.context import RankContext, current

__all__ = ["NUMBERS", "distance", "own_context"]

NUMBERS = 255
"""Forwards, reductions and steps are counted modulo this number."""


def distance(place: int, other: int) -> int:
    """Return by how much one number is ahead of another, both modulo `NUMBERS`; negative: it is behind."""
    half = NUMBERS // 2
    return (place - other + half) % NUMBERS - half


def own_context() -> RankContext | None:
    """Return this rank's context; None outside a launch, and in a process that a rank has forked."""
    context = current()
    return None if context is None or context.pid != os.getpid() else context
