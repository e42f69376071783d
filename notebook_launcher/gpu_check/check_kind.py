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
    shares: bool = False
    """True if NCCL lets several ranks share a GPU, so that most checks for two GPUs can be made on one."""

    @property
    def device(self) -> str:
        """`cuda` or `cpu`."""
        return "cuda" if self.num_gpus else "cpu"

    def ranks(self, num_processes: int) -> dict[str, Any]:
        """Return the options of a quiet launch of so many ranks, on GPUs of their own if there are any and enough."""
        devices: list[int] | str = list(range(min(num_processes, self.num_gpus))) if self.num_gpus else "cpu"
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
    can_share: bool = True
    """True if its ranks can share one GPU."""
    on_cpu: bool = True
    """True if it has a form without GPUs, which shows that the check works and nothing about GPUs."""
    decides: bool = False
    """True if GPUs count as working only when this check passes on one."""
    limit: float = 120.0
    """Seconds after which its process is ended."""

    def why_not(self, hardware: Hardware) -> str:
        """Return the reason why it cannot be made on this hardware; empty if it can."""
        if hardware.num_gpus == 0:
            return "" if self.on_cpu else "needs a GPU"
        has_enough = hardware.num_gpus >= self.num_gpus or (hardware.shares and self.can_share)
        return "" if has_enough else f"needs {self.num_gpus} GPUs"
