"""A member: parameters that are trained together, and what windows and updates ask of it."""

from __future__ import annotations

import contextlib
import enum
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from notebook_launcher.training.accumulation.members.ddp import Notes

__all__ = ["Member", "SwitchOff"]


class SwitchOff(enum.Enum):
    """The cases in which a window switches a member off, in all micro-batches but its last."""

    ALWAYS = enum.auto()
    IF_ASKED = enum.auto()
    """With `sync_each_batch=False`: unreduced gradients of a sharded model take as much memory as a whole model's."""
    NEVER = enum.auto()


class Member(ABC):
    """Parameters that are trained together; the base of all kinds, which synchronises nothing."""

    switch_off = SwitchOff.NEVER
    notes: Notes | None = None
    """Notes of the forwards and backwards; only a model that `prepare` wrapped in DDP keeps any."""

    @abstractmethod
    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters."""

    @property
    def synchronised(self) -> Iterable[torch.Tensor]:
        """The parameters whose gradients this member synchronises on all ranks; shards differ between ranks."""
        return ()

    def set_sync(self, on: bool) -> bool:  # noqa: ARG002 - a switch
        """Switch the synchronisation of gradients on or off; return the state before."""
        return True

    def reduce_partly(self) -> None:  # noqa: B027 - nothing to reduce, by default
        """Reduce only as far as needed inside a window, though the switch is on; `set_sync` ends that."""

    @property
    def must_sync(self) -> bool:
        """True if the next backward has to synchronise even inside a window."""
        return False

    @property
    def reduces_next(self) -> bool:
        """True if a backward that no `accumulate` decides for may wait for the other ranks."""
        return True

    @property
    def is_synced(self) -> bool:
        """False if this rank's gradients are known to be its own."""
        return True

    def has_gradients(self) -> bool:
        """Return True if any parameter has a gradient."""
        return any(parameter.grad is not None for parameter in self.parameters())

    def drop_gradients(self) -> None:
        """Drop all gradients, wherever they are kept."""
        for parameter in self.parameters():
            parameter.grad = None

    def clear_synced(self) -> None:  # noqa: B027 - nothing to forget, by default
        """Forget that the gradients were synchronised, because they are cleared."""

    def sync_next(self) -> contextlib.AbstractContextManager[None]:
        """Synchronise all gradients at the next backward, though its forward ran with the switch off."""
        return contextlib.nullcontext()

    @abstractmethod
    def describe(self) -> str:
        """Return the member's name for messages."""

    def explain_unsynced(self) -> str:
        """Return why the gradients were not synchronised, and what to write instead."""
        return ""
