"""Notes below the fields that decide how long a run lives, and how it goes on after a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_launcher.config import LaunchConfig

__all__ = ["lifetime_hints"]

IDLENESS = "Stops the run if its processes write, report and update nothing for this long"
BEGINNING = "Unless the function itself loads what it has saved"
RESUME = "accelerator.load_state() without a folder loads it, and nothing before the first one"
NO_RESTARTS = "No restarts are allowed yet: enter their number in Restarts after a failure"
DETACHED = "The run goes on when the kernel ends or restarts. attach() reconnects to it"
SIGNAL = "Sent by a cluster before it takes the machine: the run saves after its next update, and stops"
AUTOMATIC = f"SIGTERM. {SIGNAL}"
NO_SIGNAL = "None, unless restarts go on from a checkpoint: then SIGTERM, at which the run saves and stops"
ONLY_DETACHED = "Only for a run that outlives the kernel: tick that box, too"


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
