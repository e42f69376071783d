"""What a launch says about training, as the ranks get it."""

from __future__ import annotations

import dataclasses

__all__ = ["TrainingSettings"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """The fields of `LaunchConfig` that an `Accelerator()` made in a rank adopts, by the same names."""

    mixed_precision: str
    gradient_accumulation_steps: int
    max_grad_norm: float | None
    comm_hook: str
    asked: frozenset[str]
    """The fields that differ from their defaults: what the user chose."""
