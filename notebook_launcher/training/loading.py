"""Reading back one file that `save` wrote."""

from __future__ import annotations

from typing import Any

from notebook_launcher.training.checkpoints.objects import read_object

__all__ = ["load"]


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Return what a file of `save` or `torch.save` holds: tensors, NumPy arrays and plain types.

    Args:
        f: A path, or a file that is open for bytes.
        map_location: Where tensors go, as for `torch.load`; None: where they were.
        kwargs: For `torch.load`. `weights_only=False` lets the file construct anything, which can run any code.

    Raises:
        CheckpointError: The file is missing or damaged, or holds other types.
    """
    return read_object(f, map_location, trust="weights_only=False to load", **kwargs)
