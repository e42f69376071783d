"""Folders of checkpoints: names, files that are on the disk when a call returns, and their replacement as a whole."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch

from notebook_launcher.files import check_plain, read_text
from notebook_launcher.installed import version_of
from notebook_launcher.wording import one_line

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from notebook_launcher.training.plugins import ProjectConfiguration


# --------------------------------------------------------------------------------------------------------------------
# The folder of a checkpoint: the one to save to, the one to load from, and the ones that go to make room.


NUMBERED = re.compile(r"checkpoint_(\d+)")


def folder_to_save(config: ProjectConfiguration, output_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder for the next checkpoint; raise ValueError if there is no name for it, or the name is taken."""
    if output_dir is not None:
        return _real(output_dir)
    directory = _checkpoints(config, "save_state")
    target = directory / f"checkpoint_{config.iteration}"
    if target.exists():
        newest = _numbered(directory)[-1][0]
        raise ValueError(
            f"{target} exists already, and automatic naming never overwrites a checkpoint. To continue after the "
            f"newest: ProjectConfiguration(..., iteration={newest + 1}), or call load_state() first."
        )
    return target


def folder_to_load(config: ProjectConfiguration, input_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder of the checkpoint to load, after moving a complete save of a killed process to its place."""
    if input_dir is not None:
        folder = _real(input_dir)
        settle(folder)
        if not folder.is_dir():
            raise CheckpointError(f"load_state({os.fspath(input_dir)!r}): there is no folder {folder}. Check the path.")
        return folder
    directory = _checkpoints(config, "load_state")
    found = _numbered(directory)
    if not found:
        raise CheckpointError(f"load_state(): {directory} holds no folder checkpoint_N yet. Call save_state() first.")
    return found[-1][1]


def newest_of(saved: Sequence[str]) -> Path | None:
    """Return the last of a run's checkpoints that still exists, which is the newest; None without any."""
    for folder in map(Path, reversed(saved)):
        settle(folder)
        if folder.is_dir():
            return folder
    return None


def continue_after(config: ProjectConfiguration, folder: Path) -> None:
    """Let automatic naming continue after the checkpoint that was loaded, if it named that checkpoint."""
    if (number := _number_of(config, folder)) is not None:
        config.iteration = max(config.iteration, number + 1)


def keep_newest(config: ProjectConfiguration, newest: Path) -> None:
    """Remove the oldest automatically named checkpoints, now that a new one is whole.

    Numbers count up, so a checkpoint with a higher number than the new one is of an earlier run, and older than all of
    this run: a run that loads nothing begins at 0 again.
    """
    mine = _number_of(config, newest)
    if config.total_limit is None or mine is None:
        return
    directory = newest.parent
    for leftover in directory.glob(".checkpoint_*.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    others = [(number, folder) for number, folder in _numbered(directory) if folder != newest]
    oldest_first = sorted(others, key=lambda other: (other[0] < mine, other[0]))
    for _, folder in oldest_first[: max(0, len(others) + 1 - config.total_limit)]:
        # Renamed first, so that no half removed checkpoint looks whole.
        doomed = directory / f".{folder.name}.partial-{secrets.token_hex(4)}"
        folder.rename(doomed)
        shutil.rmtree(doomed)


def _number_of(config: ProjectConfiguration, folder: Path) -> int | None:
    """Return the number that automatic naming gave to the folder; None if the name is not by it."""
    match = NUMBERED.fullmatch(folder.name)
    if match is None or not config.automatic_checkpoint_naming or config.project_dir is None:
        return None
    return int(match[1]) if folder.parent == _real(Path(config.project_dir) / "checkpoints") else None


def _checkpoints(config: ProjectConfiguration, function: str) -> Path:
    if not config.automatic_checkpoint_naming:
        more = ' A launch with resume="checkpoint" needs none: after a failure it loads the newest that it has saved.'
        raise ValueError(
            f"{function}() needs a folder: pass one, or have folders named automatically: ProjectConfiguration("
            f"project_dir=..., automatic_checkpoint_naming=True).{more if function == 'load_state' else ''}"
        )
    if config.project_dir is None:
        raise ValueError(f"{function}() without a folder needs a project: pass Accelerator(project_dir=...).")
    return _real(Path(config.project_dir) / "checkpoints")


def _numbered(directory: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints by number, the oldest first."""
    if not directory.is_dir():
        return []
    matches = ((NUMBERED.fullmatch(path.name), path) for path in directory.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in matches if match is not None)


def _real(folder: str | os.PathLike[str]) -> Path:
    return Path(os.path.realpath(Path(folder).expanduser()))


# --------------------------------------------------------------------------------------------------------------------
# Writes files that are on the disk when the call returns, and returns their digests.


CHUNK = 2**20
"""Bytes read at a time; larger reads make a digest no faster."""
MAX_TEXT = 100_000_000
"""Bytes of a text that is read: the manifest of 10,000 files has 2 MB, the index of a million tensors 100 MB."""


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


# --------------------------------------------------------------------------------------------------------------------
# Names of the files in a checkpoint, which are Accelerate's wherever Accelerate has one.


METADATA = ".metadata"
"""The file with which a reader of a folder of shards begins."""
SCALER = "scaler.pt"
LEAVES = "leaves.bin"
CUSTOM_OBJECT = "custom_checkpoint_{}.pkl"
"""The state of a registered object, by its number."""
RANDOM_STATES = "random_states_{}.pkl"
"""A rank's random number generators."""
WINDOW = "window_{}.bin"
"""The gradients that a rank has gathered in an open window."""
MODEL_SHARDS = "pytorch_model_fsdp_{}"
"""The folder of a model in the sharded layout."""
OPTIMIZER_SHARDS = "optimizer_{}"
"""The folder of an optimizer's spread tensors in the sharded layout; its file has the rest."""
FORMS = {
    "models": r"(?:pytorch_)?model(?:_\d+)?\.(?:safetensors|bin)",
    "optimizers": r"optimizer(?:_\d+)?\.bin",
    "schedulers": r"scheduler(?:_\d+)?\.bin",
    "custom_objects": r"custom_checkpoint_\d+\.pkl",
}
"""Names of files by kind of object."""
OTHER_FORMS = (
    r"scheduler(?:_\d+)?_rank_\d+\.bin|custom_checkpoint_\d+_rank_\d+\.pkl|random_states_\d+\.pkl|window_\d+\.bin"
    r"|(?:dataloader|sampler|dl_state_dict)(?:_\d+)?\.bin|scaler\.pt|leaves\.bin"
)
"""Names of all other files of a checkpoint without manifest: Accelerate's, or this package's with the manifest lost."""


def leaves_folder(name: object) -> bool:
    """Return True for what a list of a folder's files may not name: a path that leads out of the folder, or no text."""
    return not isinstance(name, str) or name.startswith("/") or ".." in name.split("/") or "\0" in name


def model(index: int, *, safe: bool) -> str:
    """Return `model.safetensors`, `model_1.safetensors` and so on, or `pytorch_model.bin`."""
    return numbered("model", index, "safetensors") if safe else numbered("pytorch_model", index)


def numbered(kind: str, index: int, suffix: str = "bin") -> str:
    """Return the file of an object: `optimizer.bin`, `optimizer_1.bin` and so on, also of schedulers and loaders."""
    return f"{kind}_{index}.{suffix}" if index else f"{kind}.{suffix}"


def of_rank(name: str, process_index: int) -> str:
    """Return the file with what a rank has in the place of the file of this name, which has the first rank's."""
    stem, _, suffix = name.rpartition(".")
    return f"{stem}_rank_{process_index}.{suffix}"


def count_objects(files: Collection[str]) -> dict[str, int]:
    """Return the numbers of models, optimizers and so on whose files are in a folder."""
    return {kind: sum(re.fullmatch(form, name) is not None for name in files) for kind, form in FORMS.items()}


def is_checkpoint_file(name: str) -> bool:
    """Return True if `save_state` or Accelerate may have written a file of this name."""
    return re.fullmatch("|".join([*FORMS.values(), OTHER_FORMS]), name) is not None


# --------------------------------------------------------------------------------------------------------------------
# The manifest: the files of a checkpoint, with their sizes and digests.


MANIFEST = "checkpoint_manifest.json"
FORMAT = 3
"""The newest format: 2 has the sharded layout, and 3 states of objects by rank. A checkpoint without either is still
written as format 1."""
ADVICE = "Load another checkpoint; this one cannot be trusted."
DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What a damaged text of JSON raises where it is read."""


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
    """Return the manifest, or None if the folder has none."""
    path = folder / MANIFEST
    try:
        values = json.loads(read_text(path, MAX_TEXT))
        if values["format"] <= FORMAT:
            files = {name: FileDigest(**digest) for name, digest in values["files"].items()}
            if outside := [name for name in files if leaves_folder(name)]:
                raise ValueError(f"{outside[0]!r} is outside the folder")
            objects = {str(what): int(number) for what, number in values["objects"].items()}
            number = int(values["num_processes"])
            return Manifest(**{**values, "num_processes": number, "files": files, "objects": objects})
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. {ADVICE}") from error
    except DAMAGE as error:
        raise CheckpointError(f"{path} is damaged: it does not parse ({one_line(repr(error))}). {ADVICE}") from error
    raise CheckpointError(
        f"{path} has format {values['format']}, and this version reads up to {FORMAT}. It was written by "
        f"{one_line(values.get('versions'))}: install that version or a later one."
    )


def check_file(folder: Path, name: str, expected: FileDigest) -> None:
    """Raise CheckpointError unless the file has the size and digest of its entry."""
    path = folder / name
    try:
        check_plain(path)
        size = path.stat().st_size
        if size != expected.bytes:
            raise CheckpointError(f"{path} is damaged: {size} bytes, where {expected.bytes} were written. {ADVICE}")
        found = measure(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing, and {expected.bytes} bytes with sha256 {expected.sha256} were written. {ADVICE}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. {ADVICE}") from error
    if found != expected:
        raise CheckpointError(
            f"{path} is damaged: its sha256 is {found.sha256}, and {expected.sha256} was written. {ADVICE}"
        )


# --------------------------------------------------------------------------------------------------------------------
# Stages: folders that are written aside, then put in place, so that a target is whole at any moment.
#
# A save is written to `.<name>.partial-<token>` beside its target. Once it is complete and on the disk, it gets its
# place in one of two ways:
#
# * By one rename or, if the target holds an earlier save and nothing else, by exchanging the two folders (Linux'
#   renameat2). At every moment, both are whole.
# * File by file, if the target holds files of the user, is where this process works, or lies on a file system of its
#   own. First the folder is renamed to `.<name>.ready-<token>`; from then on the save counts. If the process is killed,
#   the next one that calls `settle` moves the remaining files.
#
# The next save of the same target removes what a killed save has left.


MOVES = ".moves.json"
AT_FDCWD = -100
RENAME_EXCHANGE = 2


def open_stage(target: Path) -> Path:
    """Return a new empty folder for the files of the next save in `target`, after removing what killed saves left."""
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is a file; a checkpoint is a folder. Choose another name.")
    settle(target)
    for leftover in _siblings(target, "partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    name = f".{target.name}.partial-{secrets.token_hex(4)}"
    # Files can be renamed within a file system only, and a mount point's parent is on another.
    if not target.exists() or target.stat().st_dev == target.parent.stat().st_dev:
        stage = target.parent / name
        try:
            stage.mkdir()
        except PermissionError:
            if not target.exists():
                raise
        else:
            return stage
    stage = target / name
    stage.mkdir()
    return stage


def publish(stage: Path, target: Path, *, last: str, stale: Collection[str], replaceable: bool) -> None:
    """Put a complete save, with all files synchronised, in its place; afterwards it is on the disk.

    Args:
        stage: From `open_stage`.
        target: As for `open_stage`.
        last: The file that a reader looks for first, so that it comes last where files are moved one by one.
        stale: Files of the earlier save that this one does not replace.
        replaceable: True if the target, if it exists, holds nothing but an earlier save.
    """
    for folder in [stage, *(path for path in stage.rglob("*") if path.is_dir())]:
        sync_folder(folder)
    beside = stage.parent == target.parent
    if beside and not target.exists():
        stage.rename(target)
        sync_folder(target.parent)
    elif beside and replaceable and not _is_workplace(target) and _exchange(stage, target):
        sync_folder(target.parent)
        shutil.rmtree(stage)
    else:
        names = sorted(contents(stage) - {last})
        write_text(stage / MOVES, json.dumps({"files": [*names, last], "stale": sorted(stale)}))
        ready = stage.with_name(stage.name.replace(".partial-", ".ready-"))
        stage.rename(ready)
        sync_folder(ready.parent)
        _move_in(ready, target)


def settle(target: Path) -> None:
    """Finish the save that a killed process had completed but not moved to `target`.

    Anybody may have put a folder of such a name beside the target, or into it before it was copied: a folder of another
    user stays as it is.
    """
    owners = {os.geteuid(), *(path.stat().st_uid for path in [target] if path.exists())}
    for ready in _siblings(target, "ready"):
        status = ready.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid in owners:
            _move_in(ready, target)


def contents(folder: Path) -> set[str]:
    """Return the relative paths of all files in a folder and its folders, without the files of saves under way."""
    found = set()
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if not path.is_dir() and not re.match(r"\..*\.(partial|ready)-", name.parts[0]):
            found.add(name.as_posix())
    return found


def _siblings(target: Path, state: str) -> list[Path]:
    """Return the stages of a target, beside it and in it."""
    pattern = f".{glob.escape(target.name)}.{state}-*"
    return sorted([*target.parent.glob(pattern), *target.glob(pattern)])


def _is_workplace(target: Path) -> bool:
    """Return True if this process works in the folder or below: after an exchange its folder would be removed."""
    try:
        return Path.cwd().is_relative_to(target)
    except FileNotFoundError:  # it was removed
        return False


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two folders in one step; return False if the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    return bool(renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0)


def _move_in(ready: Path, target: Path) -> None:
    """Move the files of a complete save into their folder, continuing where another process was killed."""
    with _locked(ready):
        try:
            moves = _read_moves(ready, target)
        except FileNotFoundError:
            return  # another process was quicker
        *_, last = moves["files"]
        if len(moves["files"]) > 1 and (ready / last).exists():
            # Without the file that they look for first, readers fail, and do not mix old and new.
            (target / last).unlink(missing_ok=True)
        folders = {target}
        for name in moves["files"]:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            folders.add((target / name).parent)
            with contextlib.suppress(FileNotFoundError):  # moved before
                (ready / name).replace(target / name)
        for folder in folders:
            sync_folder(folder)
        for name in moves["stale"]:
            (target / name).unlink(missing_ok=True)
        finished = ready.with_name(ready.name.replace(".ready-", ".partial-"))
        ready.rename(finished)
        shutil.rmtree(finished)
        sync_folder(target)


def _read_moves(ready: Path, target: Path) -> dict[str, list[str]]:
    """Return the names of the files to move and of those to remove; raise `CheckpointError` if one leads elsewhere."""
    path = ready / MOVES
    try:
        moves = json.loads(read_text(path, MAX_TEXT))
        (*_, _), every = moves["files"], [*moves["files"], *moves["stale"]]
    except DAMAGE as error:
        raise CheckpointError(f"{path} is damaged: {one_line(repr(error))}. Remove {ready}.") from error
    for name in every:
        # A folder on the way may be a link.
        if leaves_folder(name) or any((top / name).parent.resolve() != (top / name).parent for top in (ready, target)):
            raise CheckpointError(f"{path} is damaged: {name!r} is outside the folder. Remove {ready}.")
    return dict(moves)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from moving the same save."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        yield
        return
    try:
        # File systems without locks are left to chance: two would have to load just after a crash.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# --------------------------------------------------------------------------------------------------------------------
# The error of checkpoints that cannot be written or read.


class CheckpointError(RuntimeError, ValueError):
    """A checkpoint that is damaged, does not fit the objects here, or could not be written by another rank.

    Accelerate raises RuntimeError or ValueError in these cases; this is both.
    """
