"""Files of the sharded layout: each rank writes its parts of the tensors, and any number of ranks reads them.

`torch.distributed.checkpoint` writes and reads them. A folder holds a file for each rank that had something to
write, and `.metadata` with the place of every part of every tensor.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from notebook_launcher.training.checkpoints.checkpoint_error import CheckpointError
from notebook_launcher.training.checkpoints.durable_files import FileRecord, measure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["METADATA", "read_outline", "read_shards", "record_shards", "write_shards"]

METADATA = ".metadata"
"""The file of a folder that readers begin with."""
SAFE_TYPES = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},
}  # fmt: skip
"""Names that `.metadata` may refer to, by module. Beside them, torch's dtypes and `torch.Size`."""


def write_shards(folder: Path, tensors: Mapping[str, Any]) -> bool:
    """Write this rank's parts of tensors; all ranks call it together.

    Args:
        folder: Made if it does not exist; all ranks see the same one.
        tensors: Tensors by nested names. A plain tensor is written by a rank that has it.

    Returns:
        False if another rank failed, which the caller has to exchange.

    Raises:
        Exception: What failed on this rank.
    """
    try:
        with _quiet():
            dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder), no_dist=not _is_distributed())
    except dcp.CheckpointException as error:
        mine = error.failures.get(dist.get_rank() if _is_distributed() else 0)
        if mine is not None:
            raise mine[0] from None
        return False
    return True


def record_shards(folder: Path, rank: int) -> dict[str, FileRecord]:
    """Return sizes and digests of the files that a rank wrote into a folder, by their names there."""
    names = [path.name for path in sorted(folder.glob(f"__{rank}_*"))] + ([METADATA] if rank == 0 else [])
    return {name: measure(folder / name, sync=True) for name in names}


def read_outline(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder by name, on the meta device.

    Raises:
        CheckpointError: The folder's `.metadata` is missing, cannot be read, or refers to types of other kinds.
    """
    try:
        entries = _Reader(folder).read_metadata().state_dict_metadata
        return {
            name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for name, entry in entries.items()
            if hasattr(entry, "properties")
        }
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder / METADATA} cannot be read: {error}") from error


def read_shards(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors in place with those of their names; each rank reads what its parts need, and waits for nobody.

    Raises:
        CheckpointError: A tensor is missing, or has another shape, or a file cannot be read.
    """
    try:
        with _quiet():
            dcp.load(dict(tensors), storage_reader=_Reader(folder), no_dist=True)
    except dcp.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{folder} cannot be read: {type(cause).__name__}: {cause}") from cause


class _Reader(dcp.FileSystemReader):
    """A reader that constructs nothing but the types of an index: torch's own unpickles anything."""

    def read_metadata(self, *_: Any, **__: Any) -> Any:
        with (self.path / METADATA).open("rb") as file:  # type: ignore[operator]
            metadata = _Unpickler(file).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = SAFE_TYPES.get(module, ())
        if name not in known and not (module == "torch" and (name == "Size" or _is_dtype(name))):
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, and constructing that could run any code")
        return super().find_class(module, name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from warning in every rank that no ranks are asked, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*in a single process")
        yield


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
