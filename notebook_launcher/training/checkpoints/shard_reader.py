"""Reader of the sharded layout that constructs nothing but the types of an index: torch's own unpickles anything."""

from __future__ import annotations

import contextlib
import enum
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from notebook_launcher.files import check_plain
from notebook_launcher.training.checkpoints.folders import METADATA, leaves_folder

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


class ShardReader(dcp.FileSystemReader):
    """A reader whose `.metadata` may refer to `SAFE_TYPES` alone."""

    def read_metadata(self, *_: Any, **__: Any) -> Any:
        """Return the index of the folder."""
        folder = Path(self.path)
        check_plain(folder / METADATA)
        with (folder / METADATA).open("rb") as file:
            metadata = _IndexUnpickler(file).load()
        for name in {stored.relative_path for stored in (metadata.storage_data or {}).values()}:
            if leaves_folder(name):
                raise pickle.UnpicklingError(f"{name!r} is outside the folder")
            with contextlib.suppress(FileNotFoundError):  # torch names it.
                check_plain(folder / name)
        if metadata.storage_meta is None:
            metadata.storage_meta = dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    """An unpickler that finds the types of an index alone."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member  # Python 3.11.0 to 3.11.3 pickle a member of an enumeration as an attribute of its class.
        known = SAFE_TYPES.get(module, ())
        if name not in known and not (module == "torch" and (name == "Size" or _is_dtype(name))):
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, and constructing that could run any code")
        return super().find_class(module, name)


def _member(cls: Any, name: str) -> enum.Enum:
    """Return a member of an enumeration, in the place of `getattr`, which would reach anything."""
    if not (isinstance(cls, enum.EnumMeta) and name in cls.__members__):
        raise pickle.UnpicklingError(f"it refers to {name} of {cls!r}, and using that could run any code")
    member: enum.Enum = cls[name]
    return member


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)
