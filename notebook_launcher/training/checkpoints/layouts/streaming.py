"""Whole files of spread tensors, written one tensor at a time, so that no rank ever holds a whole model.

Every rank calls the functions with a state of the same structure, because each tensor is gathered by all ranks
together. A rank whose disk fails therefore takes part until the last tensor, and raises then.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from typing import IO, TYPE_CHECKING, Any

import torch

from notebook_launcher.training.checkpoints.checkpoint_error import CheckpointError
from notebook_launcher.training.checkpoints.folders.durable_files import FileDigest, measure, write_object
from notebook_launcher.training.checkpoints.layouts.sharded import has_spread, leaves
from notebook_launcher.training.spread_tensors import whole_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

__all__ = ["stream_object", "stream_tensors"]

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in a safetensors file."""


class _Postponed:
    """Steps of this rank alone between collectives: the first failure is kept, and later steps are skipped."""

    def __init__(self) -> None:
        self._failure: Exception | None = None

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        if self._failure is not None:
            return None
        try:
            return step(*args)
        except Exception as error:  # raised by finish()
            self._failure = error

    def finish(self) -> None:
        """Raise the failure."""
        if self._failure is not None:
            raise self._failure


def stream_tensors(path: Path | None, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> FileDigest | None:
    """Write tensors as safetensors, gathering one at a time; all ranks call it together.

    The library itself takes all tensors at once. The format is the length of a header, the header in JSON, and the
    bytes of the tensors one after the other.

    Args:
        path: The file; None on ranks that do not write.
        tensors: Dense tensors by name, the same names on all ranks.
        metadata: Texts for the header.

    Raises:
        CheckpointError: safetensors has no name for a dtype; on all ranks.
        OSError: The disk is full or fails.
    """
    # Large items first, as the library does it, so that every tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header = _header(names, tensors, metadata)
    postponed, file = _Postponed(), None
    digest = hashlib.sha256()

    def put(data: Any) -> None:
        assert file is not None
        file.write(data)
        digest.update(data)

    try:
        if path is not None:
            file = postponed.run(path.open, "wb")
            postponed.run(put, header)
        for name in names:
            whole = whole_tensor(tensors[name])
            if path is not None:
                postponed.run(lambda whole=whole: put(_bytes_of(whole)))
        postponed.finish()
        return None if file is None else FileDigest(_close(file), digest.hexdigest())
    finally:
        if file is not None:
            file.close()


def _header(names: Iterable[str], tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"safetensors cannot hold the weights ({name} is of {tensor.dtype}). Pass safe_serialization=False, or "
                "convert them."
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _close(file: IO[bytes]) -> int:
    file.flush()
    os.fsync(file.fileno())
    return file.tell()


def stream_object(path: Path | None, obj: Any) -> FileDigest | None:
    """Write nested dicts and lists as `torch.save` does, gathering one tensor at a time; all ranks call it together.

    The file is written without the tensors' bytes first, and they are put in their places one by one.

    Args:
        path: The file; None on ranks that do not write.
        obj: Of the same structure on all ranks.

    Raises:
        OSError: The disk is full or fails.
    """
    if not has_spread(obj):
        return None if path is None else write_object(path, obj)
    postponed = _Postponed()
    places = None if path is None else postponed.run(_write_frame, path, obj)
    gathered: list[torch.Tensor] = []
    for at, tensor in enumerate(_tensors(obj)):
        whole = whole_tensor(tensor)
        if path is None:
            continue
        if places is None:
            postponed.run(lambda whole=whole: gathered.append(whole.cpu()))
        else:
            postponed.run(_fill, path, places[at], whole)
    postponed.finish()
    if path is None:
        return None
    if places is None:
        return write_object(path, _rebuild(obj, iter(gathered)))
    return measure(path, sync=True)


def _tensors(obj: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(obj) if isinstance(leaf, torch.Tensor)]


def _write_frame(path: Path, obj: Any) -> list[int] | None:
    """Write the file with room for the tensors' bytes; return the place of each, or None if torch does not know it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        frame = _rebuild(obj, (torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in _tensors(obj)))
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(frame, path)
    with FakeTensorMode():
        found = _tensors(torch.load(path, weights_only=False))  # this function wrote the file itself
    places = [getattr(tensor.untyped_storage(), "_checkpoint_offset", None) for tensor in found]  # since torch 2.7
    with zipfile.ZipFile(path) as archive:
        held = sum("/data/" in name for name in archive.namelist())
    # An object of another kind may hold tensors too, whose bytes would be missing.
    return [place for place in places if place is not None] if held == len(places) and None not in places else None


def _fill(path: Path, place: int, whole: torch.Tensor) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(_bytes_of(whole))


def _rebuild(tree: Any, tensors: Any) -> Any:
    """Return nested dicts and lists with other tensors, in their order."""
    if isinstance(tree, torch.Tensor):
        return next(tensors)
    if isinstance(tree, dict):
        return {name: _rebuild(value, tensors) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_rebuild(value, tensors) for value in tree)
    return tree
