"""Notes on the loops over prepared loaders: whether each batch gets a micro-batch, and a micro-batch its batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.training.data.active_loaders import ActiveLoader

__all__ = ["LeftOutBatch", "LoopNotes"]


class LeftOutBatch(NamedTuple):
    """A batch of a prepared loader that no backward has used."""

    iteration: object | None
    """The loader's iteration that it belongs to."""
    was_begun: bool
    """True if a block of `accumulate` began, and ended without a backward; False if none began."""
    was_last: bool
    """True if it would have been the last of its window."""


class LoopNotes:
    """Notes on the loops over prepared loaders, and on the micro-batches that begin inside them."""

    def __init__(self) -> None:
        self.num_blocks = 0
        """Micro-batches begun so far."""
        self.left_out: LeftOutBatch | None = None
        """The batch that was left out last."""
        self.was_read_ahead = False
        """True if the last loop read all of its loader and no micro-batch began meanwhile, as `list(loader)` does."""
        self.is_out_of_step = False
        """True if the micro-batch began without a batch of its own from the loader that ends its window: the loader
        ends windows by another batch then."""
        self.models: Sequence[torch.nn.Module] = ()
        """The prepared models."""
        self._blocks_before_loop = 0
        """Micro-batches that had begun when the last loop over a prepared loader began."""

    def begin_loop(self) -> None:
        """Note that a loop over a prepared loader begins."""
        self._blocks_before_loop, self.was_read_ahead = self.num_blocks, False

    def note_end(self, loader: ActiveLoader) -> None:
        """Note that a loop over a prepared loader has come to its end."""
        is_unused = self.num_blocks == self._blocks_before_loop and loader.num_drawn > 1
        # An evaluation, which needs no accumulate(), computes no gradients.
        self.was_read_ahead = is_unused and torch.is_grad_enabled()

    def evaluates(self) -> bool:
        """Return True if gradients are switched off, or all prepared models are in evaluation mode."""
        is_off = bool(self.models) and not any(model.training for model in self.models)
        return is_off or not torch.is_grad_enabled()

    def forget_left_out(self) -> None:
        """Forget the batch that was left out last: all ranks have left out the same."""
        self.left_out = None
