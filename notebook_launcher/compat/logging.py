"""`get_logger` whose `stacklevel` counts as Accelerate's does."""

from __future__ import annotations

from notebook_launcher import training
from notebook_launcher.compat.names import find as __getattr__  # noqa: F401 - the rest of Accelerate's module
from notebook_launcher.training.recording.logging import MultiProcessAdapter as _MultiProcessAdapter

__all__ = ["MultiProcessAdapter", "get_logger"]


class MultiProcessAdapter(_MultiProcessAdapter):
    """A logger that knows which process it speaks in; a `stacklevel` that it is given counts its own frame."""

    calling_line = 2


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """Return a logger for several processes; see `notebook_launcher.training.get_logger`."""
    adapter: _MultiProcessAdapter = training.get_logger(name, log_level)
    return MultiProcessAdapter(adapter.logger)
