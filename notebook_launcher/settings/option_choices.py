"""The options that are one of several words, and what None means, for all that check, ask for and show them."""

from __future__ import annotations

import dataclasses

__all__ = ["CHOICES", "OptionChoices"]

OUTPUTS = ("all", "rank0", "none")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptionChoices:
    """The words that an option takes."""

    words: tuple[str, ...]
    none: str | None = None
    """Meaning of None in a word of a menu; None: the option must be one of the words."""


CHOICES = {
    "backend": OptionChoices(words=("auto", "gloo", "nccl", "mpi", "ucc", "cpu:gloo,cuda:nccl"), none="none"),
    "mixed_precision": OptionChoices(words=("no", "fp16", "bf16"), none="from the environment"),
    "comm_hook": OptionChoices(words=("no", "fp16", "bf16", "power_sgd", "batched_power_sgd"), none="no"),
    "start_method": OptionChoices(words=("forkserver", "fork", "spawn")),
    "output": OptionChoices(words=OUTPUTS),
    "display": OptionChoices(words=OUTPUTS),
    "resume": OptionChoices(words=("checkpoint",), none="none"),
    "preemption_signal": OptionChoices(words=("SIGTERM", "SIGUSR1", "SIGUSR2"), none="none"),
}
"""By name of the option."""
