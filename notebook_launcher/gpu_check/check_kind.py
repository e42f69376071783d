"""`Check`: one thing that is tried, and what it needs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Check", "Hardware", "Skipped"]


class Skipped(Exception):  # noqa: N818 - an outcome, which is not an error
    """Raised by a check that cannot be made here; the message is the reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """Hardware that a check runs on."""

    num_gpus: int
    """GPUs that the launcher sees and can use; 0: the check runs in its CPU form."""

    @property
    def device(self) -> str:
        """`cuda` or `cpu`."""
        return "cuda" if self.num_gpus else "cpu"

    def ranks(self, num_processes: int) -> dict[str, Any]:
        """Return the options of a quiet launch of so many ranks, each with a GPU of its own if there are any."""
        devices: list[int] | str = list(range(num_processes)) if self.num_gpus else "cpu"
        return {
            "num_processes": num_processes,
            "devices": devices,
            "output": "none",
            "monitor": False,
            "runs_folder": None,
            "timeout": 100.0,
            "seed": 0,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that is tried. It passes if its function returns; what that returns is shown."""

    name: str
    run: Callable[[Hardware], str | None]
    """Raises `Skipped`, or any other exception where the check fails."""
    num_gpus: int = 1
    """GPUs that it needs."""
    on_cpu: bool = True
    """True if it has a form without GPUs, which shows that the check works and nothing about GPUs."""
    decides: bool = False
    """True if GPUs count as working only when this check passes on one."""
    limit: float = 120.0
    """Seconds after which its process is ended."""

    def why_not(self, num_gpus: int) -> str:
        """Return the reason why it cannot be made with so many GPUs; empty if it can."""
        if num_gpus == 0:
            return "" if self.on_cpu else "needs a GPU"
        return "" if num_gpus >= self.num_gpus else f"needs {self.num_gpus} GPUs"
