"""The settings of prepared loaders, each as one value that functions pass on."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from notebook_launcher.training.plugins import check_uneven

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from notebook_launcher.training.data.active_loaders import ActiveLoaders
    from notebook_launcher.training.data.position import LoaderProgress

__all__ = ["LoaderSettings", "SharingSettings"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharingSettings:
    """The way in which a user's loader is shared out among ranks.

    Raises:
        ValueError: `uneven` is unknown.
    """

    num_processes: int
    """Ranks that share the data."""
    process_index: int
    """Place of this process among them."""
    device: torch.device | str | int | None
    """Device that batches go to with `put_on_device`."""
    put_on_device: bool
    """True if batches are moved to `device`."""
    split_batches: bool
    """True if each rank gets a slice of every batch."""
    dispatch_batches: bool | None
    """True if rank 0 reads for all; None: for an iterable data set, with `put_on_device`."""
    even_batches: bool
    """True if the last round is filled with samples from the start."""
    uneven: str
    """With `even_batches=False`, the conduct of a rank that has run out of batches before others."""
    slice_fn: Callable[..., Any] | None
    """Function that cuts a rank's part out of a batch that rank 0 read."""
    rng_types: Sequence[str] | None
    """Generators that every rank takes from rank 0 before each epoch; None: the sampler's generator."""
    seed: int | Literal[False] | None
    """Seed of a random order; None: the one that torch's generator was last given; False: the order is the sampler's
    own."""
    non_blocking: bool
    """True if batches are copied to a GPU while the one before is computed on."""
    use_stateful_dataloader: bool
    """Accepted; prepared loaders always know their position."""
    check_ranks: bool
    """True if ranks compare their epoch plans before each epoch."""
    keeps_shares: bool
    """True if a `DistributedSampler` stays, so that its share is shared out again."""
    active_loaders: ActiveLoaders | None
    """Loaders that are being iterated; the loader is among them while it is iterated."""

    def __post_init__(self) -> None:
        check_uneven(self.uneven)

    @property
    def share(self) -> tuple[int, int, bool]:
        """The arguments with which a shard finds this rank's part."""
        return self.num_processes, self.process_index, self.split_batches

    @property
    def policy(self) -> dict[str, Any]:
        """The arguments with which a shard treats the last round."""
        return {"even_batches": self.even_batches, "uneven": self.uneven}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """The settings of any prepared loader, besides the arguments of torch's `DataLoader`."""

    device: torch.device | str | int | None
    """Device that batches are moved to; None: they are not moved."""
    skip_batches: int
    """Batches, or rounds, that are left out at the start of each epoch."""
    drop_last: bool
    """True if the user's loader drops a last batch that is not full."""
    non_blocking: bool
    """True if batches are copied to a GPU while the one before is computed on."""
    iteration: int
    """The first epoch's number."""
    active_loaders: ActiveLoaders | None
    """Loaders that are being iterated; the loader is among them while it is iterated. None: it is alone."""
    progress: LoaderProgress | None
    """Progress of the loader whose rest this loader reads; None: a new one."""
