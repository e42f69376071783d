"""How an Accelerator shares data out, as it was told."""

from __future__ import annotations

from typing import Any

from notebook_launcher.training.plugins import DataLoaderConfiguration

__all__ = ["LoaderSettings", "loader_config"]


class LoaderSettings:
    """The fields of `DataLoaderConfiguration`, by Accelerate's names."""

    dataloader_config: DataLoaderConfiguration

    @property
    def split_batches(self) -> bool:
        """Whether each rank gets a slice of every batch."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads for all."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether the last round is filled with samples from the start."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config.even_batches = even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the order of samples depends on seed and epoch alone."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def use_stateful_dataloader(self) -> bool:
        """As given."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the GPU beside the computation."""
        return self.dataloader_config.non_blocking


def loader_config(config: DataLoaderConfiguration | None, **shortcuts: Any) -> DataLoaderConfiguration:
    """Return the configuration with the shortcuts in it; raises ValueError where the two differ."""
    given = {name: value for name, value in shortcuts.items() if value is not None}
    if config is None:
        return DataLoaderConfiguration(**given)
    for name, value in given.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"{name}={value!r} and dataloader_config with {name}={getattr(config, name)!r} were both given. "
                "Pass one."
            )
    return config
