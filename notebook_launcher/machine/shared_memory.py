"""The folder in which Linux keeps the shared memory of all processes."""

from __future__ import annotations

from pathlib import Path

__all__ = ["SHARED_MEMORY"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written to
"""Torch puts there what data-loader workers share, and NCCL what ranks share."""
