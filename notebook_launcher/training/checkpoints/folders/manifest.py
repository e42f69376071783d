"""The manifest: the files of a checkpoint, with their sizes and digests."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.installed import version_of
from notebook_launcher.training.checkpoints.checkpoint_error import CheckpointError
from notebook_launcher.training.checkpoints.folders.durable_files import FileDigest, measure, write_text
from notebook_launcher.training.checkpoints.folders.file_names import leaves_folder

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ADVICE", "MANIFEST", "Manifest", "check_file", "read_manifest", "write_manifest"]

MANIFEST = "checkpoint_manifest.json"
FORMAT = 3
"""The newest format: 2 has the sharded layout, and 3 states of objects by rank. A checkpoint without either is still
written as format 1."""
ADVICE = "Load another checkpoint; this one cannot be trusted."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of a manifest."""

    num_processes: int
    """Number of ranks that saved the checkpoint."""
    objects: dict[str, int]
    """Number of prepared `models`, `leaves`, `optimizers`, `schedulers`, `dataloaders` and `custom_objects`."""
    files: dict[str, FileDigest]
    """Size and digest of each file, by path relative to the folder."""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    time: str = ""
    """The time of the save, in UTC."""
    format: int = 1


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, with versions and time."""
    versions = {
        "notebook-launcher": version_of("notebook-launcher") or "not installed",
        "torch": str(torch.__version__),
    }
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    filled = dataclasses.replace(manifest, versions=versions, time=now)
    write_text(folder / MANIFEST, json.dumps(dataclasses.asdict(filled), indent=2, sort_keys=True) + "\n")


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest, or None if the folder has none.

    Raises:
        CheckpointError: It cannot be read, or is of a format that this version does not know.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is damaged: {error}. {ADVICE}") from error
    try:
        values = json.loads(text)
        is_newer = values["format"] > FORMAT
        manifest = None if is_newer else _parse(values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: it does not parse ({error!r}). {ADVICE}") from error
    if is_newer:
        raise CheckpointError(
            f"{path} has format {values['format']}, and this version reads up to {FORMAT}. It was written by "
            f"{values.get('versions')}: install that version or a later one."
        )
    return manifest


def _parse(values: dict[str, Any]) -> Manifest:
    files = {name: FileDigest(**digest) for name, digest in values["files"].items()}
    if outside := [name for name in files if leaves_folder(name)]:
        raise ValueError(f"{outside[0]!r} is outside the folder")
    objects = {str(what): int(number) for what, number in values["objects"].items()}
    return Manifest(**{**values, "num_processes": int(values["num_processes"]), "files": files, "objects": objects})


def check_file(folder: Path, name: str, expected: FileDigest) -> None:
    """Raise CheckpointError unless the file has the size and digest of its entry."""
    path = folder / name
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            raise CheckpointError(f"{path} is damaged: {size} bytes, where {expected.bytes} were written. {ADVICE}")
        found = measure(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing, and {expected.bytes} bytes with sha256 {expected.sha256} were written. {ADVICE}"
        ) from None
    if found != expected:
        raise CheckpointError(
            f"{path} is damaged: its sha256 is {found.sha256}, and {expected.sha256} was written. {ADVICE}"
        )
