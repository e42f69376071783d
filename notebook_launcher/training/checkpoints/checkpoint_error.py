"""The error of checkpoints that cannot be written or read."""

from __future__ import annotations

__all__ = ["CheckpointError"]


class CheckpointError(RuntimeError, ValueError):
    """A checkpoint that is damaged or does not fit what it is loaded into, or that another rank could not write.

    Accelerate raises RuntimeError or ValueError in these cases; this is both.
    """
