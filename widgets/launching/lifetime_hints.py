"""Notes below the fields that decide how long a run lives, and from where it resumes after a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_launcher.config import LaunchConfig

__all__ = ["lifetime_hints"]

IDLENESS = "Stops the run after this time without output, reports or updates"
BEGINNING = "The function starts from the beginning, unless it loads a checkpoint itself"
RESUME = "accelerator.load_state() without a folder loads the newest checkpoint, or nothing if there is none yet"
NO_RESTARTS = "No restarts are allowed yet: enter their number in Restarts after a failure"
DETACHED = "The run continues when the kernel ends or restarts; attach() reconnects to the run"
SIGNAL = "Sent by a cluster before it takes the machine: the run saves after its next update, and stops"
AUTOMATIC = f"SIGTERM. {SIGNAL}"
NO_SIGNAL = "Automatic: no signal; if restarts resume from a checkpoint, SIGTERM saves and stops the run"
ONLY_DETACHED = 'Only for a run that outlives the kernel: tick "Outlive the kernel", too'


def lifetime_hints(config: LaunchConfig) -> dict[str, str]:
    """Return the note below each of these fields, by the option's name."""
    return {
        "idle_timeout": IDLENESS,
        "resume": _resume_hint(config),
        "detached": DETACHED,
        "preemption_signal": _signal_hint(config),
    }


def _resume_hint(config: LaunchConfig) -> str:
    if config.resume is None:
        return BEGINNING
    return RESUME if config.max_restarts or config.detached else NO_RESTARTS


def _signal_hint(config: LaunchConfig) -> str:
    if config.preemption_signal is not None:
        return SIGNAL if config.detached else ONLY_DETACHED
    return AUTOMATIC if config.detached and config.resume is not None else NO_SIGNAL
