"""Files of the sharded layout: each rank writes its parts of the tensors, and any number of ranks reads them.

`torch.distributed.checkpoint` writes and reads them. A folder holds a file for each rank that had something to
write, and `.metadata` with the place of every part of every tensor.

torch's module is imported by the functions that need it: it takes 1.2 s of processor time (DTensor and SymPy come with
it), which every program with an Accelerator would pay.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_launcher.training.checkpoints.checkpoint_error import CheckpointError
from notebook_launcher.training.checkpoints.folders.durable_files import FileDigest, measure
from notebook_launcher.training.checkpoints.folders.file_names import METADATA
from notebook_launcher.training.checkpoints.folders.manifest import ADVICE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["measure_shards", "read_outline", "read_shards", "write_shards"]


def write_shards(folder: Path, tensors: Mapping[str, Any]) -> bool:
    """Write this rank's parts of tensors; all ranks call it together.

    Args:
        folder: Made if it does not exist; all ranks see the same one.
        tensors: Tensors by nested names. A plain tensor is written by a rank that has it.

    Returns:
        False if another rank failed, which the caller has to exchange.

    Raises:
        Exception: Error of this rank.
    """
    import torch.distributed.checkpoint as dcp

    try:
        with _quiet():
            dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder), no_dist=not _is_distributed())
    except dcp.CheckpointException as error:
        mine = error.failures.get(dist.get_rank() if _is_distributed() else 0)
        if mine is not None:
            raise mine[0] from None
        return False
    return True


def measure_shards(folder: Path, rank: int) -> dict[str, FileDigest]:
    """Return sizes and digests of the files that a rank wrote into a folder, by their names there."""
    names = [path.name for path in sorted(folder.glob(f"__{rank}_*"))] + ([METADATA] if rank == 0 else [])
    return {name: measure(folder / name, sync=True) for name in names}


def read_outline(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder by name, on the meta device.

    Args:
        folder: Written by `write_shards`.
        kind: The first part of the names, `"model"` or `"optimizer"`, which the names in the result lack.

    Raises:
        CheckpointError: The folder's `.metadata` is missing, cannot be read, or refers to types of other kinds.
    """
    from notebook_launcher.training.checkpoints.layouts.shard_reader import ShardReader

    try:
        entries = ShardReader(folder).read_metadata().state_dict_metadata
        return {
            name.removeprefix(f"{kind}."): torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for name, entry in entries.items()
            if name.startswith(f"{kind}.") and hasattr(entry, "properties")
        }
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder / METADATA} cannot be read: {error}. {ADVICE}") from error


def read_shards(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors in place with the saved ones of their names; each rank reads what its parts need, without waiting.

    Raises:
        CheckpointError: A tensor is missing, or has another shape, or a file cannot be read.
    """
    import torch.distributed.checkpoint as dcp

    from notebook_launcher.training.checkpoints.layouts.shard_reader import ShardReader

    try:
        with _quiet():
            dcp.load(dict(tensors), storage_reader=ShardReader(folder), no_dist=True)
    except dcp.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{folder} cannot be read: {type(cause).__name__}: {cause}. {ADVICE}") from cause


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from warning in every rank that no ranks are asked, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*in a single process")
        yield


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
