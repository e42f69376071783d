"""The state of accumulation by the names of Accelerate's `GradientState`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notebook_launcher.training.data.active_loaders import ActiveLoaders
    from notebook_launcher.training.plugins import GradientAccumulationPlugin

__all__ = ["AccelerateNames"]


class AccelerateNames:
    """The properties of Accelerate's `GradientState`, for code that asks it; the base of `GradientState`."""

    active_loaders: ActiveLoaders
    """The loaders that are being iterated."""
    num_steps: int
    """Micro-batches per update."""
    plugin: GradientAccumulationPlugin
    """The settings of accumulation."""

    @property
    def active_dataloader(self) -> Any | None:
        """The prepared loader that has drawn a batch last and is still iterated; None outside a loop."""
        return self.active_loaders.active

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders that are being iterated, and None at the end, as in Accelerate."""
        return [None, *self.active_loaders.loaders]

    @property
    def in_dataloader(self) -> bool:
        """True while a prepared loader is being iterated."""
        return self.active_loaders.active is not None

    @property
    def end_of_dataloader(self) -> bool:
        """True if the active loader is at its last batch, or one that is iterated beside it, as by `zip`."""
        return self.active_loaders.is_at_end(self.active_loaders.active)

    @property
    def remainder(self) -> int:
        """Samples of the last round that are not repetitions; -1 if unknown, or if the data divide evenly."""
        loader = self.active_loaders.active
        return -1 if loader is None else int(loader.remainder)

    @property
    def adjust_scheduler(self) -> bool:
        """As given; without effect, as in Accelerate 1.15."""
        return self.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """True if a window ends where its loader ends."""
        return self.plugin.sync_with_dataloader

    @property
    def sync_each_batch(self) -> bool:
        """True if gradients are synchronised in every micro-batch."""
        return bool(self.plugin.sync_each_batch)

    @property
    def is_xla_gradients_synced(self) -> bool:
        """False: nothing runs on XLA here."""
        return False

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The settings by name."""
        return {**vars(self.plugin), "num_steps": self.num_steps}
