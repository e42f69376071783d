"""The error of checkpoints that cannot be written or read."""

from __future__ import annotations

__all__ = ["CheckpointError"]


class CheckpointError(RuntimeError, ValueError):
    """A checkpoint that is damaged, does not fit the objects here, or could not be written by another rank.

    Accelerate raises RuntimeError or ValueError in these cases; this is both.
    """
