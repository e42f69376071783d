"""Writer of a run's folder. The run's thread drives it; it has no thread of its own.

    config.json     the run's LaunchConfig, and the function's arguments in a few words
    function.py     the function's source
    environment.json  versions, git commit, working directory, variables
    metrics.jsonl   one call of report(...) or accelerator.log(...) on each line
    pictures.jsonl  images, histograms and tables, with picture-0.png, picture-1.csv ... beside it
    changes.diff    the working tree beyond the git commit
    rank-0.log ...  the output of each rank; no file for a rank without output
    log-order.txt   the order in which the output of different ranks arrived
    summary.json    the run's snapshot, replaced as a whole: when the folder is made, every 5 s, at the end
    reserve         during the run: space that the run frees at its end, for its last state

A run that is over within a second is written at its end, all at once. If it ended without an error, and its ranks wrote
and reported nothing, it leaves no folder: a loop of such runs in a session would push out all other runs. An error of
writing never fails a run; it is reported once.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Protocol

from notebook_launcher.history import owners, run_folders
from notebook_launcher.history.encoding import encode, encode_snapshot
from notebook_launcher.history.log_order_file import LogOrderFile
from notebook_launcher.history.picture_files import PictureFiles
from notebook_launcher.history.run_files import LogFile, MetricsFile, append, replace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from notebook_launcher.history.schema import RunReader, RunSnapshot

__all__ = ["FORMAT", "Recorder"]

FORMAT = 1
"""The layout of the folder; readers ignore what they do not know."""
FIRST_AFTER = 1.0
"""Seconds after the launch at which the folder is made."""
WRITE_EVERY = 0.5
SUMMARY_EVERY = 5.0
"""Seconds between two summaries; fewer in a run's first seconds, in which its ranks start."""
LARGEST_SHARE = 0.02
"""Share of the time that writes may take; where one takes long, as with a thousand ranks, the next comes later."""
RESERVED = 262_144
"""Bytes of the reserve: a summary has 160 kB at most, a detached run's ending a few."""
MUCH = 100_000
"""Characters that the ranks of a brief run wrote, from which on the run is kept: a cell does not keep all of it."""
HEAVY = 1_000_000
"""Bytes of a run from which it checks the size of all folders, which takes a `stat` of each of their files."""


class LateFiles(Protocol):
    """Origin of a run, as files of its folder by name."""

    files: dict[str, str]

    def later(self, *, wait: bool) -> Mapping[str, str] | None:
        """Return files that take some time, which add to or replace `files`; None: not yet, unless `wait`."""
        ...


class Recorder:
    """The folder of one run. Not thread-safe: the run's thread calls it.

    Args:
        reader: The run.
        chosen: `LaunchConfig.runs_folder`.
        launched: Time of the launch, by `time.monotonic()`.
        say: Called with a line for the user.
        origin: Returns further files for the folder; called once with the new folder. None: there are none.
    """

    def __init__(
        self,
        reader: RunReader,
        chosen: str | os.PathLike[str] | None,
        launched: float,
        say: Callable[[str], None],
        *,
        origin: Callable[[Path], LateFiles] | None = None,
    ) -> None:
        self.folder: Path | None = None
        self._reserved: Path | None = None
        """The folder before anything is recorded in it, if it was made in advance."""
        self._home: Path | None = None
        self._reader = reader
        self._say = say
        self._origin = origin
        self._late: LateFiles | None = None
        """The origin of the run until all of its files are written."""
        self._is_on = False
        self._has_new = False
        self._write_at = self._summary_at = launched + FIRST_AFTER
        self._summary_wait = WRITE_EVERY
        self._position = 0
        self._metrics: MetricsFile | None = None
        self._num_pictures = 0
        self._pictures: PictureFiles | None = None
        self._logs: list[LogFile] = []
        self._log_order: LogOrderFile | None = None
        self._has_reserve = False
        with self._forgiving():
            # Found now, because the working directory and the environment may change within a second.
            self._home = run_folders.find_home(chosen)
            self._is_on = self._home is not None

    def make_folder(self) -> Path:
        """Make the folder now, and keep it however short the run is; raises `OSError`."""
        snapshot = self._reader.snapshot()
        self._make_folder(snapshot)
        self._write_summary(snapshot)
        self._reserve_room()
        assert self.folder is not None
        return self.folder

    def reserve_folder(self) -> Path:
        """Make an empty folder now, and fill it when the run is found worth recording; raises `OSError`."""
        assert self._home is not None
        self._reserved = self._new_folder(self._reader.snapshot().id)
        return self._reserved

    def note(self) -> None:
        """Note that a rank wrote or reported something."""
        self._has_new = True

    def next_due(self, now: float) -> float | None:
        """Return the seconds until `tick` has something to do; None: never."""
        if not self._is_on:
            return None
        due = min(self._summary_at, self._write_at) if self._has_new else self._summary_at
        return max(0.0, due - now)

    def tick(self, now: float) -> None:
        """Write the files that are due. `now` is a time of `time.monotonic()`."""
        if not self._is_on or now < min(self._write_at, self._summary_at):
            return
        with self._forgiving():
            if now >= self._summary_at:
                snapshot = self._reader.snapshot()
                self._make_folder(snapshot)
                self._write_summary(snapshot)
                self._reserve_room()
                self._write_late(wait=False)
                self._summary_at = now + _pause_after(now, self._summary_wait)
                self._summary_wait = min(2 * self._summary_wait, SUMMARY_EVERY)
            if self._has_new and now >= self._write_at:
                began = time.monotonic()
                self._write_news()
                self._has_new = False
                self._write_at = now + _pause_after(began, WRITE_EVERY)

    def settle(self, *, failed: bool, is_brief: bool = False) -> Path | None:
        """Make the folder of a run that ends, if it has none and anything to record; return the folder.

        A brief run of less than FIRST_AFTER seconds, such as a cell on ranks, has something to record only if it
        reported metrics or wrote much.
        """
        if self.folder is None and self._is_on and (self._is_worth_it() if is_brief else failed or self._has_new):
            with self._forgiving():
                self._make_folder(self._reader.snapshot())
        return self.folder

    def finish(self) -> None:
        """Write the end of the run if it has a folder, and remove old runs."""
        if self.folder is None:
            return
        if self._is_on:
            with self._forgiving():
                self._write_end(self._reader.snapshot())
        self._release_room()
        if not self._is_on:
            # A write has failed, perhaps because the disk is full. The final summary is small, so try once more.
            with contextlib.suppress(Exception):
                self._write_summary(self._reader.snapshot())
        with contextlib.suppress(Exception):  # Even after failed writes: it ends the process of git.
            self._write_late(wait=True)
        self._make_room()

    def _is_worth_it(self) -> bool:
        if not self._has_new:
            return False
        num_processes = self._reader.snapshot().num_processes
        written = sum(len(self._reader.logs_since(rank, 0)[0]) for rank in range(num_processes))
        return bool(self._reader.metrics_since(0)[0]) or written > MUCH

    def _write_end(self, snapshot: RunSnapshot) -> None:
        self._write_news()
        for log in self._logs:
            log.finish(self._reader)
        self._write_summary(snapshot)

    def _make_room(self) -> None:
        if self.folder is None or self._home is None:
            return
        growing = [part for part in (self._metrics, self._pictures, *self._logs) if part is not None]
        size = sum(part.size for part in growing)
        with contextlib.suppress(OSError):
            max_bytes = run_folders.MAX_BYTES if size > HEAVY else None
            run_folders.prune(self._home, max_runs=run_folders.MAX_RUNS, max_bytes=max_bytes)

    def _make_folder(self, snapshot: RunSnapshot) -> None:
        if self.folder is None:
            self.folder = folder = self._reserved or self._new_folder(snapshot.id)
            self._metrics = MetricsFile(folder)
            self._pictures = PictureFiles(folder)
            self._logs = [LogFile(folder, rank, snapshot.num_processes) for rank in range(snapshot.num_processes)]
            self._log_order = LogOrderFile(folder) if snapshot.num_processes > 1 else None
            settings = {**snapshot.config, "arguments": snapshot.arguments}
            append(folder / run_folders.CONFIG, encode(settings).encode("ascii"))
            if self._origin is not None:
                self._late = self._origin(folder)
                for name, text in self._late.files.items():
                    append(folder / name, text.encode("utf-8", "backslashreplace"))

    def _reserve_room(self) -> None:
        if self._has_reserve or self.folder is None:
            return
        self._has_reserve = True
        with contextlib.suppress(OSError):
            fd = os.open(self.folder / run_folders.RESERVE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, RESERVED)
            finally:
                os.close(fd)

    def _release_room(self) -> None:
        if self._has_reserve and self.folder is not None:
            with contextlib.suppress(OSError):
                (self.folder / run_folders.RESERVE).unlink()

    def _new_folder(self, run_id: str) -> Path:
        assert self._home is not None
        folder = self._home / run_id
        try:
            folder.mkdir(mode=0o700)
        except FileNotFoundError:
            self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700)
        return folder

    def _write_late(self, *, wait: bool) -> None:
        files = None if self._late is None else self._late.later(wait=wait)
        if files is None or self.folder is None:
            return
        self._late = None
        for name, text in files.items():
            replace(self.folder / name, text.encode("utf-8", "backslashreplace"), self.folder / run_folders.PART)

    def _write_news(self) -> None:
        assert self._metrics is not None
        assert self._pictures is not None
        pictures, self._num_pictures = self._reader.pictures_since(self._num_pictures)
        self._pictures.write(pictures)
        points, self._position = self._reader.metrics_since(self._position)
        self._metrics.write(points)
        for log in self._logs:
            log.write(self._reader)
        if self._log_order is not None:
            self._log_order.write(self._reader)

    def _write_summary(self, snapshot: RunSnapshot) -> None:
        assert self.folder is not None
        left_out = self._metrics.num_left_out if self._metrics is not None else 0
        more = {"format": FORMAT, "kernel": owners.identify(), "metrics_left_out": left_out}
        data = encode({**encode_snapshot(snapshot), **more}).encode("ascii")
        replace(self.folder / run_folders.SUMMARY, data, self.folder / run_folders.PART)

    @contextlib.contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - neither a full disk nor an error of this package may fail the run
            self._is_on = False
            reason = error.strerror or error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            where = f" in {self.folder or self._home}" if self._home is not None else ""
            with contextlib.suppress(Exception):
                self._say(f"recording of the run ended{where}: {reason}")


def _pause_after(began: float, shortest: float) -> float:
    """Return the seconds until the next write, after one that began at this time."""
    return max(shortest, (time.monotonic() - began) / LARGEST_SHARE)
