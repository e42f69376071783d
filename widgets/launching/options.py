"""Options of a launch that have a field in a panel, in the order of their fields."""

from __future__ import annotations

__all__ = ["ADVANCED", "ESSENTIAL"]

ESSENTIAL = ("num_processes", "gradient_accumulation_steps", "mixed_precision")
"""Options that are always in view."""
ADVANCED = (
    "engine",
    "devices",
    "backend",
    "start_method",
    "output",
    "shard",
    "seed",
    "max_grad_norm",
    "comm_hook",
    "timeout",
    "idle_timeout",
    "max_restarts",
    "resume",
    "check_collectives",
    "detached",
    "preemption_signal",
)
"""Options in the section that is folded at first; they are seldom changed."""
