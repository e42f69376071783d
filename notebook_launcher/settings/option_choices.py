"""The options that are one of several words, and what None means, for all that check, ask for and show them."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias, get_args

__all__ = [
    "CHOICES",
    "Backend",
    "CommHook",
    "OptionChoices",
    "Precision",
    "PreemptionSignal",
    "RankSeeds",
    "ResumePoint",
    "ShownRanks",
    "StartMethod",
]

Backend: TypeAlias = Literal["auto", "gloo", "nccl", "mpi", "ucc", "cpu:gloo,cuda:nccl"]
Precision: TypeAlias = Literal["no", "fp16", "bf16"]
CommHook: TypeAlias = Literal["no", "fp16", "bf16", "power_sgd", "batched_power_sgd"]
StartMethod: TypeAlias = Literal["forkserver", "fork", "spawn"]
ShownRanks: TypeAlias = Literal["all", "rank0", "none"]
ResumePoint: TypeAlias = Literal["checkpoint"]
RankSeeds: TypeAlias = Literal["alike", "apart"]
PreemptionSignal: TypeAlias = Literal["SIGTERM", "SIGUSR1", "SIGUSR2"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptionChoices:
    """The words that an option takes."""

    words: tuple[str, ...]
    none: str | None = None
    """Meaning of None in a word of a menu; None: the option must be one of the words."""


CHOICES = {
    "backend": OptionChoices(words=get_args(Backend), none="none"),
    "mixed_precision": OptionChoices(words=get_args(Precision), none="from the environment"),
    "comm_hook": OptionChoices(words=get_args(CommHook), none="no"),
    "start_method": OptionChoices(words=get_args(StartMethod)),
    "output": OptionChoices(words=get_args(ShownRanks)),
    "display": OptionChoices(words=get_args(ShownRanks)),
    "rank_seeds": OptionChoices(words=get_args(RankSeeds), none="alike until prepare()"),
    "resume": OptionChoices(words=get_args(ResumePoint), none="none"),
    "preemption_signal": OptionChoices(words=get_args(PreemptionSignal), none="none"),
}
"""By name of the option."""
