"""Writes files that are on the disk when the call returns, and returns their digests."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import re
import stat
from typing import IO, TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["FileDigest", "measure", "sync_folder", "write_object", "write_tensors", "write_text"]

CHUNK = 2**20
"""Bytes read at a time; larger reads make a digest no faster."""


@dataclasses.dataclass(frozen=True, slots=True)
class FileDigest:
    """Size and digest of a file of a whole checkpoint."""

    bytes: int
    sha256: str


class _DigestingFile:
    """A file that digests what `torch.save` writes, and keeps the error that torch would hide.

    Where writing fails, torch raises "unexpected pos" from its archive writer and not the OSError.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.error: OSError | None = None
        self.size = 0
        self.digest = hashlib.sha256()
        self._file = file

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.digest.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: the file is synchronised once, when it is complete."""


def write_object(path: Path, obj: Any) -> FileDigest:
    """Write an object with `torch.save`; raise OSError if the disk is full or fails."""
    with path.open("wb") as file:
        digesting = _DigestingFile(file)
        try:
            torch.save(obj, digesting)  # type: ignore[arg-type] # it needs write() and flush() alone
        except Exception:
            if digesting.error is not None:
                raise digesting.error from None
            raise
        _sync(file)
    return FileDigest(digesting.size, digesting.digest.hexdigest())


def write_text(path: Path, text: str) -> None:
    """Write a text; raise OSError if the disk is full or fails."""
    with path.open("wb") as file:
        file.write(text.encode())
        _sync(file)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> FileDigest:
    """Write tensors as safetensors; raise OSError if the disk is full or fails."""
    # safetensors (0.8) makes a file for its owner alone and ignores the umask.
    with path.open("wb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    try:
        safetensors.torch.save_file(dict(tensors), path, metadata=dict(metadata))
    except safetensors.SafetensorError as error:
        if (number := re.search(r"os error (\d+)", str(error))) is not None:
            code = int(number[1])
            raise OSError(code, os.strerror(code), str(path)) from error
        raise
    path.chmod(mode)
    return measure(path, sync=True)


def measure(path: Path, *, sync: bool = False) -> FileDigest:
    """Return size and digest of a file; with `sync`, once the file is on the disk."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        buffer = memoryview(bytearray(CHUNK))
        while read := file.readinto(buffer):
            digest.update(buffer[:read])
            size += read
    return FileDigest(size, digest.hexdigest())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot synchronise a folder, and need not.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
