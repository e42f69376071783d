"""Results of lookups among the members, kept for as long as the members stay as they are."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from notebook_launcher.training.accumulation.members.member import Member

__all__ = ["LookedUp", "Owned"]


@dataclasses.dataclass(frozen=True, slots=True)
class Owned:
    """The parameters that an optimizer updates, by member."""

    sizes: list[int]
    """Number of parameters in each of the optimizer's groups when this was looked up."""
    members: list[Member]
    local: list[torch.Tensor]
    """Parameters whose gradients nothing synchronises."""
    shared: dict[int, list[torch.Tensor]]
    """By the id of a member that other prepared optimizers update, too: the parameters that they update."""


@dataclasses.dataclass(slots=True)
class LookedUp:
    """Results of lookups among the present members; `Members` replaces them when the members change.

    The keys are ids of objects, so they do not travel to another process.
    """

    owned: dict[int, Owned] = dataclasses.field(default_factory=dict)
    """By the id of an optimizer."""
    covered: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    """The ids of an optimizer and a window, if the window's `accumulate` was given all of the optimizer's members.
    Looking it up takes 2 µs."""
    has_sparse_gradients: bool | None = None
    """True if members have sparse gradients; None if nobody has asked yet."""
    probes: dict[int, list[torch.Tensor]] = dataclasses.field(default_factory=dict)
    """By the id of a window: a trained parameter of each member and each optimizer whose gradients it gathers. Without
    them, each window would begin with a walk through the whole model."""
