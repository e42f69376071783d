"""Files of a run's folder, opened only if they are the user's own.

Several users may be able to write to the folder of all runs, so anybody may have put a folder into it, or links to
files of others. What is checked is what was opened: a check of the path could be outrun.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from typing import TYPE_CHECKING, Any

from notebook_launcher.errors import RunFolderError
from notebook_launcher.wording import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
MAX_JSON = 8_000_000
"""Bytes of a JSON file that is read: its objects may take twenty times as much memory. The summary of a run of a
thousand ranks has about 1 MB."""
MAX_TEXT = 100_000_000
"""Bytes of another file that are read at once. Metrics and logs stop at 64 MB and little more."""


def belongs_to_another(folder: Path) -> bool:
    """Return True for a folder of another user and for a link; a list of runs leaves both out."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return status.st_uid != os.getuid() or stat.S_ISLNK(status.st_mode)


def open_folder(folder: Path) -> int:
    """Return a descriptor of a run's folder.

    Raises:
        FileNotFoundError: There is no such folder.
        RunFolderError: It is a link, belongs to another user, or other users can write to it.
    """
    with _named(folder):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_owner(folder, os.fstat(fd), folder)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_file(folder: Path, name: str) -> int:
    """Return a descriptor for reading a file of a run's folder.

    Raises:
        FileNotFoundError: There is no such file or folder.
        RunFolderError: File or folder is a link, belongs to another user, or other users can write to it; or the file
            cannot be read.
    """
    path = folder / name
    with opened(folder) as at, _named(path):
        # Without O_NONBLOCK the open of a named pipe would wait for a writer.
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    try:
        status = os.fstat(fd)
        _check_kind(path, is_right=stat.S_ISREG(status.st_mode))
        _check_owner(path, status, folder)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def socket_path(folder: Path, name: str) -> Iterator[str]:
    """Yield a path of a socket in a run's folder that is short enough: the address of a socket holds 107 bytes.

    Raises:
        OSError: There is no such folder.
        RunFolderError: As `open_folder`; or there is something else of this name, or a socket of another user.
    """
    with opened(folder) as at:
        with contextlib.suppress(FileNotFoundError):  # The caller is about to make it.
            status = os.stat(name, dir_fd=at, follow_symlinks=False)
            _check_kind(folder / name, is_right=stat.S_ISSOCK(status.st_mode))
            _check_owner(folder / name, status, folder)
        yield f"/proc/self/fd/{at}/{name}"


def read_bytes(folder: Path, name: str, start: int = 0) -> bytes:
    """Return the contents of a file from a position on; empty if there is no file.

    Raises:
        RunFolderError: As `open_file`; or the file is longer than any that a run writes.
    """
    try:
        fd = open_file(folder, name)
    except FileNotFoundError:
        return b""
    return _read(fd, folder / name, start, MAX_TEXT)


def load_json(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is no file.

    Raises:
        RunFolderError: As `open_file`; or the file does not hold a JSON object.
    """
    path = folder / name
    try:
        fd = open_file(folder, name)
    except FileNotFoundError:
        return None
    text = _read(fd, path, 0, MAX_JSON)
    try:
        data = json.loads(text)
        if b"\\ud" in text:  # JSON can hold half of a character, which no page and no terminal takes.
            whole = json.dumps(data, ensure_ascii=False).encode("utf-16", "surrogatepass")
            data = json.loads(whole.decode("utf-16", "replace"))
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{path} is damaged: it is not JSON ({one_line(error, 100)}).") from error
    if not isinstance(data, dict):
        raise RunFolderError(f"{path} is damaged: it holds {type(data).__name__} instead of an object.")
    return data


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is no file, or `load_json` refuses it."""
    with contextlib.suppress(OSError):
        return load_json(folder, name)
    return None


def _read(fd: int, path: Path, start: int, limit: int) -> bytes:
    with _named(path), open(fd, "rb") as file:
        # A file of gigabytes takes no room on the disk if it has holes.
        if (size := os.fstat(fd).st_size) - start > limit:
            raise RunFolderError(f"{path} has {size:,} bytes, and no run writes more than {limit:,}.")
        file.seek(start)
        return file.read(limit)


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[int]:
    """Yield what `open_folder` returns, and close it."""
    fd = open_folder(folder)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the path in an error of the system, except where there is nothing of the name."""
    try:
        yield
    except (FileNotFoundError, RunFolderError):
        raise
    except OSError as error:
        is_link = error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink()
        why = "it is a link, and no run makes links" if is_link else error.strerror
        raise RunFolderError(f"{path} cannot be read: {why}.") from error


def _check_kind(path: Path, *, is_right: bool) -> None:
    if not is_right:
        raise RunFolderError(f"{path} is neither an ordinary file nor a socket as runs make them. Remove it.")


def _check_owner(path: Path, status: os.stat_result, folder: Path) -> None:
    if status.st_uid != os.getuid():
        raise RunFolderError(
            f"{path} belongs to another user ({status.st_uid}), so it is not read: open it as that user."
        )
    if status.st_mode & OTHERS_WRITE:
        raise RunFolderError(
            f"{path} can be written by other users (mode {stat.S_IMODE(status.st_mode):o}), so it is not read. If you "
            f"trust what it holds, type `chmod -R go-w {folder}`."
        )
