"""Preemption: the signal by which a cluster announces to a host that it needs the machine."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.config import LaunchConfig

__all__ = ["on_preemption"]


def on_preemption(config: LaunchConfig, act: Callable[[], object]) -> None:
    """Call a function at the signal that the options name; at SIGTERM if a run resumes and they name none."""
    name = config.preemption_signal or ("SIGTERM" if config.resume is not None else None)
    if name is not None:
        signal.signal(signal.Signals[name], lambda *_: act())
