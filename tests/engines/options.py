"""Options of the launches in these tests."""

from __future__ import annotations

from typing import Any

__all__ = ["QUIET"]

QUIET: dict[str, Any] = {"output": "none", "monitor": False, "threads_per_process": 1, "runs_folder": None}
"""No output, no view and no folder: the tests look at results and processes."""
