"""`Finding`: one fact about this machine or process."""

from __future__ import annotations

import dataclasses
from typing import Literal

__all__ = ["Finding", "Verdict"]

Verdict = Literal["fact", "good", "warning", "problem"]
"""`"fact"`: nothing follows from it. `"good"`: tried, and it works. `"warning"`: it will cost time or limit a launch.
`"problem"`: launches fail or lose output until it is changed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fact, the verdict on it, and what to type."""

    area: str
    """Heading under which the fact stands, such as `"limits"`."""
    name: str
    fact: str
    """Measurement in words, with units."""
    verdict: Verdict = "fact"
    advice: str = ""
    """Code or command to type; empty if there is nothing to do. Every warning and every problem has it."""
