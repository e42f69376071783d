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
from typing import TYPE_CHECKING

from notebook_launcher.history import run_files, run_folders
from notebook_launcher.history.encoding import encode, encode_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from notebook_launcher.history.schema import RunReader, RunSnapshot
    from notebook_launcher.kernel.calls.origin import Origin


FIRST_AFTER = 1.0
"""Seconds after the launch at which the folder is made."""
WRITE_EVERY = 0.5
SUMMARY_EVERY = 5.0
"""Seconds between two summaries; fewer in a run's first seconds, in which its ranks start."""
MAX_SHARE = 0.02
"""Share of the time that writes may take; where one takes long, as with a thousand ranks, the next comes later."""
MUCH = 100_000
"""Fewest characters of output for which a brief run is kept, because a cell does not keep all of it."""
HEAVY = 1_000_000
"""Bytes of a run from which it checks the size of all folders, which takes a `stat` of each of their files."""


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
        origin: Callable[[Path], Origin] | None = None,
    ) -> None:
        self._open: OpenFolder | None = None
        """The folder, once something is recorded."""
        self._home: Path | None = None
        """The folder of all runs, which may not exist yet; None if the run is not recorded."""
        self._reserved: Path | None = None
        """The run's folder, if it was made before anything is recorded."""
        self._reader = reader
        self._say = say
        self._origin = origin
        self._is_on = False
        """True if the run is recorded, and no write has failed."""
        self._is_early = False
        """True if the folder was made before anything showed that the run is worth recording."""
        self._has_new = False
        self._write_at = self._summary_at = launched + FIRST_AFTER
        self._summary_wait = WRITE_EVERY
        with self._forgiving():
            # Found now, because the working directory and the environment may change within a second.
            self._home = run_folders.find_home(chosen)
            self._is_on = self._home is not None

    @property
    def folder(self) -> Path | None:
        """The run's folder; None while nothing is recorded."""
        return None if self._open is None else self._open.path

    def make_folder(self) -> Path:
        """Make the folder now, and keep it however short the run is; raises `OSError`.

        The files that take some time come after FIRST_AFTER seconds. A shorter run that goes well does without them.
        """
        self._is_early = True
        try:
            opened = self._write_state()
            opened.reserve_room(is_needed=True)  # Who comes back for such a run finds its end here alone.
        except OSError:
            if self._open is not None:
                run_folders.remove(self._open.path)
                self._open = None
            raise
        return opened.path

    def reserve_folder(self) -> Path:
        """Make an empty folder now, and fill it when the run is found worth recording; raises `OSError`."""
        self._reserved = self._make_folder(self._reader.snapshot().id)
        return self._reserved

    def note(self) -> None:
        """Note that a rank wrote or reported something."""
        self._has_new = True

    def next_due(self, now: float) -> float | None:
        """Return the seconds until `tick` has something to do; None: never."""
        due = min(self._summary_at, self._write_at) if self._has_new else self._summary_at
        return max(0.0, due - now) if self._is_on else None

    def tick(self, now: float) -> None:
        """Write the files that are due. `now` is a time of `time.monotonic()`."""
        if not self._is_on or now < min(self._write_at, self._summary_at):
            return
        with self._forgiving():
            if now >= self._summary_at:
                self._write_state().write_late(wait=False)
                self._summary_at = now + _pause_after(now, self._summary_wait)
                self._summary_wait = min(2 * self._summary_wait, SUMMARY_EVERY)
            if self._open is not None and self._has_new and now >= self._write_at:
                began = time.monotonic()
                self._open.write_news()
                self._has_new = False
                self._write_at = now + _pause_after(began, WRITE_EVERY)

    def settle(self, *, failed: bool, is_brief: bool = False) -> Path | None:
        """Make the folder of a run that ends, if it has none and anything to record; return the folder.

        A brief run of less than FIRST_AFTER seconds, such as a cell on ranks, has something to record only if it
        reported metrics or wrote much.
        """
        is_worth_it = self._has_new and self._is_worth_it() if is_brief else failed or self._has_new
        if self._open is None and self._home is not None and is_worth_it:
            # After a failed write, too: the disk may have room again.
            with self._forgiving():
                self._opened(self._reader.snapshot()) if self._is_on else self._write_state()
        return self.folder

    def finish(self) -> None:
        """Write the end of the run if it has a folder, and remove old runs."""
        opened = self._open
        if opened is None:
            return
        if self._is_on:
            with self._forgiving():
                opened.write_end(self._reader.snapshot())
        opened.release_room()
        if not self._is_on:
            # A write has failed, perhaps because the disk is full. The final summary is small, so try once more.
            with contextlib.suppress(Exception):
                opened.write_summary(self._reader.snapshot())
            self._drop_unless_it_has_a_summary()
        snapshot = self._reader.snapshot()
        if not (self._is_early and snapshot.state == "done" and snapshot.seconds < FIRST_AFTER):
            with contextlib.suppress(Exception):  # Even after failed writes: it ends the process of git.
                opened.write_late(wait=True)
        if self._home is not None:
            with contextlib.suppress(OSError):
                max_bytes = run_folders.MAX_BYTES if opened.size > HEAVY else None
                run_folders.prune(self._home, max_runs=run_folders.MAX_RUNS, max_bytes=max_bytes)

    def _is_worth_it(self) -> bool:
        num_processes = self._reader.snapshot().num_processes
        written = sum(len(self._reader.logs_since(rank, 0)[0]) for rank in range(num_processes))
        return bool(self._reader.metrics_since(0)[0]) or written > MUCH

    def _write_state(self) -> OpenFolder:
        """Write the summary, in a folder that is made if there is none; return the folder."""
        snapshot = self._reader.snapshot()
        opened = self._opened(snapshot)
        opened.write_summary(snapshot)
        opened.reserve_room()
        return opened

    def _opened(self, snapshot: RunSnapshot) -> OpenFolder:
        if self._open is None:
            path = self._reserved or self._make_folder(snapshot.id)
            # Kept before anything is written, so that it is removed if this write fails.
            self._open = OpenFolder(path, self._reader, snapshot.num_processes)
            self._open.write_origin(snapshot, self._origin)
        return self._open

    def _make_folder(self, run_id: str) -> Path:
        assert self._home is not None
        folder = self._home / run_id
        try:
            folder.mkdir(mode=0o700)
        except FileNotFoundError:
            self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700)
        return folder

    @contextlib.contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # neither a full disk nor an error of this package may fail the run
            was_on, self._is_on = self._is_on, False
            reason = error.strerror or error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            where = f" in {self.folder or self._home}" if self._home is not None else ""
            self._drop_unless_it_has_a_summary()
            if was_on or self._home is None:
                with contextlib.suppress(Exception):
                    self._say(f"recording of the run ended{where}: {reason}")

    def _drop_unless_it_has_a_summary(self) -> None:
        """Remove a folder that shows nothing of the run: a list would have it as starting, and then as lost."""
        if self._home is None or self._reserved or self._open is None:  # A host has its socket there.
            return
        if not self._open.path.exists():  # Somebody has deleted it while the run went on: it is not made again.
            self._home = None
        elif not (self._open.path / run_folders.SUMMARY).exists():
            run_folders.remove(self._open.path)
            self._open = None


def _pause_after(began: float, shortest: float) -> float:
    """Return the seconds until the next write, after one that began at this time."""
    return max(shortest, (time.monotonic() - began) / MAX_SHARE)


# --------------------------------------------------------------------------------------------------------------------
# A run's folder while the run writes to it: its growing files, its summary and its reserve.
#
# The recorder decides when something is written, and what an error of writing means.


FORMAT = 1
"""The layout of the folder; readers ignore what they do not know."""
RESERVED = 262_144
"""Bytes of the reserve: a summary has 160 kB at most, a detached run's ending a few."""


class OpenFolder:
    """The files of one run's folder, which exists and is empty. Every method that writes raises `OSError`."""

    def __init__(self, path: Path, reader: RunReader, num_processes: int) -> None:
        self.path = path
        self._reader = reader
        self._late: Origin | None = None
        """The origin of the run until all of its files are written."""
        self._metrics = run_files.MetricsFile(path)
        self._position = 0
        self._pictures = run_files.PictureFiles(path)
        self._num_pictures = 0
        self._logs = [run_files.LogFile(path, rank, num_processes) for rank in range(num_processes)]
        self._log_order = run_files.LogOrderFile(path) if num_processes > 1 else None
        self._has_reserve = False

    @property
    def size(self) -> int:
        """Bytes of the files that grow."""
        order = 0 if self._log_order is None else self._log_order.size
        return self._metrics.size + self._pictures.size + sum(log.size for log in self._logs) + order

    def write_origin(self, snapshot: RunSnapshot, origin: Callable[[Path], Origin] | None) -> None:
        """Write the options, and the files of the run's origin that are there at once."""
        settings = {**snapshot.config, "arguments": snapshot.arguments}
        run_files.append(self.path / run_folders.CONFIG, encode(settings).encode("ascii"))
        if origin is not None:
            self._late = origin(self.path)
            for name, text in self._late.files.items():
                run_files.append(self.path / name, text.encode("utf-8", "backslashreplace"))

    def write_late(self, *, wait: bool) -> None:
        """Write the files of the run's origin that take some time, once they are there, or with `wait` now."""
        files = None if self._late is None else self._late.later(wait=wait)
        if files is None:
            return
        self._late = None
        for name, text in files.items():
            data = text.encode("utf-8", "backslashreplace")
            run_files.replace(self.path / name, data, self.path / run_folders.PART)

    def write_news(self) -> None:
        """Append what the ranks wrote and reported since the last call."""
        pictures, self._num_pictures = self._reader.pictures_since(self._num_pictures)
        self._pictures.write(pictures)
        points, self._position = self._reader.metrics_since(self._position)
        self._metrics.write(points)
        for log in self._logs:
            log.write(self._reader)
        if self._log_order is not None:
            self._log_order.write(self._reader)

    def write_end(self, snapshot: RunSnapshot) -> None:
        """Write the rest of what the ranks wrote and reported, and the last summary."""
        self.write_news()
        for log in self._logs:
            log.finish(self._reader)
        self.write_summary(snapshot)

    def write_summary(self, snapshot: RunSnapshot) -> None:
        """Replace the summary as a whole."""
        more = {"format": FORMAT, "kernel": run_folders.identify(), "metrics_left_out": self._metrics.num_left_out}
        data = encode({**encode_snapshot(snapshot), **more}).encode("ascii")
        run_files.replace(self.path / run_folders.SUMMARY, data, self.path / run_folders.PART)

    def reserve_room(self, *, is_needed: bool = False) -> None:
        """Reserve room for the run's last state, once; without that much raise `OSError` only if it `is_needed`."""
        if self._has_reserve:
            return
        try:
            with open(run_files.open_new(self.path, run_folders.RESERVE), "wb") as file:
                os.posix_fallocate(file.fileno(), 0, RESERVED)
            self._has_reserve = True
        except OSError:
            with contextlib.suppress(OSError):
                (self.path / run_folders.RESERVE).unlink(missing_ok=True)  # What it got is of more use to the run.
            if is_needed:
                raise

    def release_room(self) -> None:
        """Release the room that was reserved; raises nothing."""
        if self._has_reserve:
            with contextlib.suppress(OSError):
                (self.path / run_folders.RESERVE).unlink()
