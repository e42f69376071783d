"""All checks, beginning with the checks that decide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher.gpu_check import endings, late_ranks, launches, several_ranks, trainings

if TYPE_CHECKING:
    from notebook_launcher.gpu_check.check_kind import Check

__all__ = ["ALL_CHECKS", "find_check"]

_LISTED: tuple[Check, ...] = (
    *launches.CHECKS,
    *trainings.CHECKS,
    *several_ranks.CHECKS,
    *late_ranks.CHECKS,
    *endings.CHECKS,
)
ALL_CHECKS = tuple(sorted(_LISTED, key=lambda check: not check.decides))


def find_check(name: str) -> Check:
    """Return a check by its name; raises LookupError."""
    for check in ALL_CHECKS:
        if check.name == name:
            return check
    msg = f"there is no check {name!r}"
    raise LookupError(msg)
