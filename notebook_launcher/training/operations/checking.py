"""Debug mode: whether all processes call an operation with tensors that fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from notebook_launcher.training.operations.nested import recursively_apply
from notebook_launcher.training.process.environment import debug_mode

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["DistributedOperationException", "require_alike"]


class DistributedOperationException(Exception):  # noqa: N818 - Accelerate's name
    """The processes called one operation with tensors that do not fit together."""


def require_alike(operation: str, data: Any, describe: Callable[[torch.Tensor], str] | None = None) -> None:
    """In debug mode, compare what the processes are about to communicate.

    Args:
        operation: Its name in the error.
        data: This process' nested tensors.
        describe: Function of a tensor whose result must be equal on all ranks; None: shape and dtype.

    Raises:
        DistributedOperationException: On every process, with what each one has.
    """
    if not debug_mode():
        return
    mine = repr(recursively_apply(describe or shape_and_dtype, data))
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if len(set(everyone)) > 1:
        listed = "\n".join(f"  process {rank}: {text}" for rank, text in enumerate(everyone))
        raise DistributedOperationException(
            f"{operation} needs tensors that agree on all processes, and these differ:\n{listed}\n"
            "Tensors of different length can be made equal with pad_across_processes(...)."
        )


def shape_and_dtype(tensor: torch.Tensor) -> str:
    """Describe a tensor as `[2, 3] float32`."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
