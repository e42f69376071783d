"""`accelerate.data_loader`, with every name that this package has for Accelerate's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.compat.names import find as __getattr__  # noqa: F401 - answers `from ... import name`
from notebook_launcher.compat.state import GradientState
from notebook_launcher.training.data import prepare_data_loader as prepare

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

__all__ = ["prepare_data_loader"]


def prepare_data_loader(dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
    """Return a loader that yields this rank's share, as `prepare_data_loader` of `training` does.

    As in Accelerate, the one state of accumulation of the process sees the loader, so that windows end with it.
    """
    stack = GradientState().active_loaders
    accelerates = {"uneven": "leave", "check_ranks": False, "keeps_shares": True, "stack": stack}
    return prepare(dataloader, *args, **{**accelerates, **kwargs})
