"""The end of a hosted run, kept in its folder: results and exception, whose parcels the first reader opens."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import pickle
import struct
import zlib
from typing import TYPE_CHECKING, Any

from notebook_launcher import travel
from notebook_launcher.errors import ReturnValueError, RunFolderError
from notebook_launcher.history import run_files
from notebook_launcher.history.folder_files import open_file
from notebook_launcher.history.run_folders import ENDING
from notebook_launcher.kernel.failures import failure_display
from notebook_launcher.kernel.failures.failure_display import cannot_travel
from notebook_launcher.kernel.run.conclusion import RunOutcome
from notebook_launcher.tracebacks import without_locals
from notebook_launcher.wording import format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from notebook_launcher.kernel.results import Results
    from notebook_launcher.messaging.messages import ExceptionReport


ERROR = "error.parcel"


@dataclasses.dataclass(frozen=True, slots=True)
class KeptValue:
    """Stands for a value whose parcel lies in the run's folder."""

    file: str
    size: int
    checksum: int

    def __repr__(self) -> str:
        return f"kept in the run's folder, {format_bytes(self.size)}"


class KeptError(Exception):
    """Stands for a rank's exception; subclasses have the name of its class."""

    checksum: int | None = None
    """Checksum of its parcel in the run's folder; None if there is none."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a run as its host knows it."""

    state: Any
    results: Results
    """With a `KeptValue` for each value."""
    error: BaseException | None
    """An exception of the launcher's own; None if there is none, or if a rank raised it."""
    raised: tuple[str, str] | None
    """Name and message of the exception that a rank raised, which is in a parcel."""
    error_checksum: int | None
    """Checksum of that parcel; None if there is none."""
    last_line: str

    def open(self, folder: Path) -> RunOutcome:
        """Open the parcels and return the outcome; another process may do the same, and a later call again."""
        results, values = copy.copy(self.results), dict[int, Any]()
        unsent: dict[int, str | Exception] = {**results.unsent}
        for rank, kept in results.returned.items():
            try:
                values[rank] = travel.unpack_value(open_kept(folder, kept.file, kept.checksum, kept.size))
            except (OSError, ReturnValueError) as error:  # noqa: PERF203 - the file may be gone, its classes too
                unsent[rank] = without_locals(error)
        results.fill(values, unsent, folder)
        failure = self.error if self.raised is None else self._open_error(folder)
        if failure is not None:
            failure_display.attach_failures(failure, results.failures, results)
        return RunOutcome(state=self.state, results=results, error=failure)

    def num_unopened(self, outcome: RunOutcome) -> int:
        """Return how many parcels `open` could not open for an outcome: a class that is missing may come later."""
        is_replaced = self.raised is not None and str(outcome.error) == str(self._stand_in(self.raised))
        return len(outcome.results.unsent) - len(self.results.unsent) + is_replaced

    def _open_error(self, folder: Path) -> BaseException:
        assert self.raised is not None
        error, reason = None, ""
        if self.error_checksum is not None:
            try:
                error = travel.unpack_exception(open_kept(folder, ERROR, self.error_checksum))
            except RunFolderError as damage:
                reason = str(damage)
            except FileNotFoundError:
                pass
        if error is None:
            error = self._stand_in(self.raised)
            error.add_note(reason) if reason else None
        return error

    def _stand_in(self, raised: tuple[str, str]) -> BaseException:
        return cannot_travel(*raised, self.results.failures[0].rank)


class KeptParcels:
    """Moves parcels to a run's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_values = 0

    def keep_value(self, fd: int) -> KeptValue:
        """Move a value's parcel to the folder; raises `ReturnValueError` if that fails."""
        name = f"value-{self._num_values}.parcel"
        self._num_values += 1
        return KeptValue(name, *self._move(fd, name))

    def keep_exception(self, fd: int, report: ExceptionReport) -> BaseException:
        """Move an exception's parcel to the folder, and return a stand-in of the same name and message."""
        checksum = None
        with contextlib.suppress(OSError):  # The disk is full: name, message and traceback fit into its reserve.
            _, checksum = self._move(fd, ERROR)
        namespace = {"__module__": "builtins", "__qualname__": report.type_name, "checksum": checksum}
        stand_in: BaseException = type(report.type_name, (KeptError,), namespace)(report.message)
        return stand_in

    def _move(self, fd: int, name: str) -> tuple[int, int]:
        """Move a parcel to the folder; return its size and checksum."""
        path = self._folder / name
        try:
            size, done = os.fstat(fd).st_size, 0
            with open(run_files.open_new(self._folder, name), "wb") as file:
                while done < size:
                    done += os.sendfile(file.fileno(), fd, done, size - done)
            checksum = checksum_of(fd)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise OSError(f"it could not be kept in {path}: {error.strerror or error}.") from error
        finally:
            os.close(fd)
        return size, checksum


def write_ending(folder: Path, outcome: RunOutcome, last_line: str) -> None:
    """Write the end of a run to its folder, whole or not at all; raises `OSError`."""
    error = outcome.error
    is_rank_s = isinstance(error, KeptError)
    ending = Ending(
        state=outcome.state,
        results=outcome.results,
        error=None if is_rank_s else error,
        raised=(type(error).__qualname__, str(error)) if is_rank_s else None,
        error_checksum=error.checksum if isinstance(error, KeptError) else None,
        last_line=last_line,
    )
    write_own_pickle(folder, ENDING, ending)


def read_ending(folder: Path) -> Ending | None:
    """Return the end of a run; None if there is none yet. Raises `RunFolderError` as `read_own_pickle`."""
    try:
        ending = read_own_pickle(folder, ENDING)
    except FileNotFoundError:
        return None
    if not isinstance(ending, Ending):
        raise RunFolderError(f"{folder / ENDING} holds {type(ending).__name__} instead of the end of a run.")
    return ending


# --------------------------------------------------------------------------------------------------------------------
# Pickles and unopened parcels that a host leaves in a run's folder for later clients of the same user.
#
# Each has a checksum, because a damaged disk or copy would otherwise give wrong numbers. CRC-32 is the fastest that
# finds any damage of up to 32 bits in a row: 1 s a GB here (SHA-256 takes 1.6 s, BLAKE2 4 s). It is no protection
# from people; the check of the owner is.


HEADER = struct.Struct("<8sQI")
MAGIC = b"nblkept1"
CHUNK = 1 << 20
VERSION = "Probably another version of notebook-launcher has written it: attach with the version that launched the run."


def write_own_pickle(folder: Path, name: str, value: object) -> None:
    """Write a pickle to a run's folder, whole or not at all; raises `OSError`."""
    data = pickle.dumps(value, protocol=5)
    run_files.replace(folder / name, HEADER.pack(MAGIC, len(data), zlib.crc32(data)) + data, folder / f"{name}.part")


def read_own_pickle(folder: Path, name: str) -> Any:
    """Return what a host has written.

    Raises:
        FileNotFoundError: There is no such file.
        RunFolderError: The file is not the user's own, is damaged, or cannot be unpickled, perhaps because another
            version of this package has written it.
    """
    path = folder / name
    with open(open_file(folder, name), "rb") as file:
        head = file.read(HEADER.size)
        if not head.startswith(MAGIC):
            raise RunFolderError(f"the end of {folder.name} cannot be read: {path} has no checksum. {VERSION}")
        size = HEADER.unpack(head)[1] if len(head) == HEADER.size else 0
        data = file.read(min(size, os.fstat(file.fileno()).st_size) + 1)  # Not all of a file that has grown.
    _check(path, is_whole=head == HEADER.pack(MAGIC, len(data), zlib.crc32(data)))
    try:
        return pickle.loads(data)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise RunFolderError(f"the end of {folder.name} cannot be read: {reason}. {VERSION}") from error


def open_kept(folder: Path, name: str, checksum: int, size: int | None = None) -> int:
    """Return a descriptor of a file whose contents have the checksum, and the size if it is known.

    Raises:
        FileNotFoundError: There is no such file.
        RunFolderError: The file is not the user's own, or damaged.
    """
    fd = open_file(folder, name)
    try:
        has_size = size in (None, os.fstat(fd).st_size)
        _check(folder / name, is_whole=has_size and checksum_of(fd) == checksum)
    except BaseException:
        os.close(fd)
        raise
    return fd


def checksum_of(fd: int) -> int:
    """Return the checksum of a file, and leave its position as it is."""
    checksum = at = 0
    while chunk := os.pread(fd, CHUNK, at):
        checksum = zlib.crc32(chunk, checksum)
        at += len(chunk)
    return checksum


def _check(path: Path, *, is_whole: bool) -> None:
    if not is_whole:
        raise RunFolderError(f"{path} is damaged: its contents do not have the checksum that was written.")
