"""A run that is read from its folder: at any time, by any kernel, also during the run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Any

from notebook_launcher.config import LaunchConfig
from notebook_launcher.errors import CallOrderError, ConfigError, RunFolderError, check_rank
from notebook_launcher.history import encoding, run_files, run_folders
from notebook_launcher.history.curves import Curves
from notebook_launcher.history.folder_files import belongs_to_another, load_json, open_folder, read_bytes, read_json
from notebook_launcher.history.run_files import read_log_order, read_pictures
from notebook_launcher.history.schema import RankSnapshot, RunMetrics, RunReader, RunSnapshot
from notebook_launcher.tracebacks import for_caller
from notebook_launcher.travel import random_states
from notebook_launcher.wording import Listed, format_seconds, one_line, plural, recordable_variables

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from notebook_launcher.drawing.charts import AxisKind
    from notebook_launcher.drawing.run_report import RunReport
    from notebook_launcher.history.schema import MetricPoint, RankPhases, RunPicture, RunState


PARTS = ("git", "packages", "variables")
"""Parts of the environment that have names and values; anything else in their place is left out."""
TAIL = 20_000
"""Bytes of the end of each log that the picture of a run shows."""


class FolderReader(RunReader):
    """The attributes of a run with a folder that its snapshot has."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __repr__(self) -> str:
        run = self.snapshot()
        head = f"{type(self).__name__} {run.id} on {plural(run.num_processes, 'rank')}"
        return f"<{head}: {run.state}, {format_seconds(run.seconds)}>"

    @property
    def folder(self) -> Path:
        """Folder of the run, which keeps its output, curves and results."""
        return self._folder

    @property
    def id(self) -> str:
        """The run's name among all runs: the time, the function, six random digits."""
        return self._folder.name

    @property
    def name(self) -> str:
        """Name of the run: as edited, else as launched, else the function's name."""
        return self.snapshot().name

    @property
    def state(self) -> RunState:
        """State of the run, as `Run.state`, or `"lost"`: the kernel or host ended before the run did."""
        return self.snapshot().state

    @property
    def seed(self) -> int | None:
        """The seed of the launch; None: its ranks began with the random states of the kernel."""
        return self.snapshot().seed

    @property
    def ranks(self) -> tuple[RankSnapshot, ...]:
        """State of each rank."""
        return Listed(self.snapshot().ranks)

    @property
    def phases(self) -> dict[int, RankPhases]:
        """Time that each rank spent on each phase of training, for the ranks whose Accelerator has reported any."""
        return dict(self.snapshot().phases)

    @property
    def notes(self) -> str:
        """Notes that `edit` has written; empty if there are none."""
        return str(read_edits(self._folder).get("notes", ""))

    @property
    def metrics(self) -> RunMetrics:
        """Metrics that the ranks have reported, in the order of arrival; if there are very many, not all of them."""
        return RunMetrics(self.metrics_since(0)[0])

    @property
    def pictures(self) -> tuple[RunPicture, ...]:
        """Images and histograms that the ranks have reported; if there are very many, not all of them."""
        return tuple(self.pictures_since(0)[0])


class RecordedRun(FolderReader):
    """A run that is read from its folder; `open_run(...)` and `runs()` return it.

    It has the attributes of a live `Run` that describe the run, and every view accepts it. If another kernel still
    runs it, each access reads the folder again. No file stays open.

    Args:
        folder: The run's folder.

    Raises:
        LookupError: There is no such folder, or it does not hold a run.
        RunFolderError: The folder is a link or belongs to another user. Attributes and methods raise it, too, where a
            file in the folder is damaged, or not the user's own.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._snapshot: RunSnapshot | None = None
        self._points: list[MetricPoint] = []
        self._offset = 0
        if not folder.is_dir():
            msg = (
                f"there is no folder {folder}: the run was removed, by hand or to make room for newer runs. runs() "
                "lists those that are there."
            )
            raise for_caller(LookupError(msg))
        if belongs_to_another(folder):
            os.close(open_folder(folder))  # It raises, with the reason.
        if not run_folders.is_run(folder):
            msg = f"{folder} does not hold a run: it has no {run_folders.SUMMARY}. Pass a folder that runs() lists."
            raise for_caller(LookupError(msg))

    def _repr_html_(self) -> str:
        from notebook_launcher.drawing.run_picture import static_html

        snapshot = self.snapshot()
        curves = Curves()
        curves.fold(self.metrics)
        logs = {rank: self._tail(rank) for rank in range(snapshot.num_processes)}
        shown = {rank: text for rank, text in logs.items() if text}
        return static_html(snapshot, curves, logs=shown, pictures=self.pictures)

    def svg(self, *, axis: AxisKind = "step", grouped: bool = True, log: bool = False, smoothing: float = 0.0) -> str:
        """Return the run's curves, timeline, memory and load as one `<svg>`.

        Args:
            axis: Quantity on the horizontal axis of the curves: `"step"`; `"time"`, since the launch; or `"epoch"`,
                for a run that reported a metric of that name.
            grouped: True if the same quantity of several parts of the data, such as `train/loss` and `val/loss`,
                shares a plot.
            log: True for a logarithmic scale of the values.
            smoothing: Weight of the past in an exponential moving average, 0 to less than 1.

        Raises:
            ConfigError: There is no such axis, or the run reported no epochs.
        """
        from notebook_launcher.drawing.plots import PlotOptions
        from notebook_launcher.drawing.run_picture import static_svg

        curves = Curves()
        curves.fold(self.metrics)
        check_axis(axis, curves.names)
        options = PlotOptions(axis=axis, grouped=grouped, log=log, smoothing=smoothing)
        return static_svg(self.snapshot(), curves, options)

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of the run: as edited, else as launched."""
        tags = read_edits(self._folder).get("tags", self.listed().config.get("tags"))
        return tuple(map(str, tags)) if isinstance(tags, list) else ()

    @property
    def source(self) -> str:
        """Source of the function when it was launched; empty if it was not recorded."""
        return read_bytes(self._folder, run_folders.SOURCE).decode("utf-8", "replace")

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, git commit, working directory and variables at the launch; empty if they were not recorded."""
        found = read_json(self._folder, run_folders.ENVIRONMENT) or {}
        return {name: part for name, part in found.items() if name not in PARTS or isinstance(part, dict)}

    def edit(self, *, name: str | None = None, tags: Iterable[str] | None = None, notes: str | None = None) -> None:
        """Change the run's name, tags or notes in its folder; None leaves each as it is.

        Raises:
            ConfigError: The name or a tag is not text.
        """
        write_edits(self._folder, check_edits(name, tags, notes))

    def restore_random_states(self) -> None:
        """Give torch, NumPy and `random` in this process the states with which the run began, so that it repeats.

        The next launches without `seed` begin with them.

        Raises:
            LookupError: The run has none in its folder: it had a seed, which `seed` gives, or it was a session's.
        """
        plain = load_json(self._folder, run_folders.RANDOM)
        if plain is None:
            session = "Runs of a session continue where the one before ended"
            other = session if self.seed is None else f"Pass seed={self.seed}"
            msg = f"{self.id} did not begin with random states of a kernel. {other}."
            raise for_caller(LookupError(msg))
        with self._blaming(run_folders.RANDOM):
            random_states.set_random_states(random_states.decode_states(plain), use_gpu="torch" in sys.modules)

    @property
    def config(self) -> LaunchConfig:
        """Options as they were given, to launch with again.

        Options that this version does not know are left out. So are an engine and `setup`, of which the folder has only
        a text, and most variables of `env`, of which it has the names alone, because their values may be secrets.

        Raises:
            ConfigError: This version does not accept the options.
            RunFolderError: The file with the options is damaged.
        """
        known = {field.name for field in dataclasses.fields(LaunchConfig)} - {"engine", "setup"}
        options = load_json(self._folder, run_folders.CONFIG)
        if options is None:
            options = dict(self.snapshot().config)
        with self._blaming(run_folders.CONFIG):
            given = {name: value for name, value in options.items() if name in known}
            # Only what a run records: in a folder from elsewhere, others such as LD_PRELOAD would carry in code.
            env = recordable_variables(given.get("env", {}))
            given["env"] = {name: value for name, value in env.items() if value is not None}
            return LaunchConfig(**given)

    @contextlib.contextmanager
    def _blaming(self, name: str) -> Iterator[None]:
        """Blame a file for an error that its contents have caused."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            raise RunFolderError(f"{self._folder / name} is damaged: {one_line(error, 200)}.") from error

    def snapshot(self) -> RunSnapshot:
        """Return the summary in the folder; for a lost run, its state some seconds before the kernel ended."""
        if self._snapshot is None or not self._snapshot.is_over:
            summary = load_json(self._folder, run_folders.SUMMARY)
            snapshot = _decode(summary, self._folder)
            is_live = not snapshot.is_over and run_folders.is_live(self._folder, summary)
            self._snapshot = snapshot if snapshot.is_over or is_live else _lost(snapshot)
        edited = read_edits(self._folder).get("name")
        return dataclasses.replace(self._snapshot, name=str(edited)) if edited else self._snapshot

    def listed(self) -> RunSnapshot:
        """Return the summary; if it cannot be read, what the folder shows, with the reason as name."""
        try:
            return self.snapshot()
        except RunFolderError as error:
            stand_in = _seen_from_outside(self._folder, "unreadable: " + str(error).replace(f"{self._folder}/", ""))
            return stand_in if run_folders.is_live(self._folder, None) else _lost(stand_in)

    def report(self) -> RunReport:
        """Return what is known of the run in plain values, as `Run.report`."""
        from notebook_launcher.drawing.run_report import report_on

        return report_on(self, f"open_run({self.id!r})")

    def metrics_since(self, position: int) -> tuple[list[MetricPoint], int]:
        """Return the metrics after a position, and the next position. The first position is 0."""
        data = read_bytes(self._folder, run_folders.METRICS, self._offset)
        # A line without a newline is still being written, or its writer has died.
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        points = map(encoding.decode_point, whole.splitlines())
        self._points += [point for point in points if point is not None]
        return self._points[position:], max(position, len(self._points))

    def pictures_since(self, position: int) -> tuple[list[RunPicture], int]:
        """Return the pictures after a position, and the next position. The first position is 0."""
        found = read_pictures(self._folder, position)
        return found, position + len(found)

    def logs(self, rank: int) -> str:
        """Return a rank's standard output and error; if they are very long, their beginning and end."""
        return self.logs_since(rank, 0)[0]

    def logs_since(self, rank: int, position: int) -> tuple[str, int]:
        """Return the text that a rank has written after a position, and the next position. The first position is 0."""
        check_rank(rank, self.snapshot().num_processes)
        name = run_folders.log_name(rank)
        data = read_bytes(self._folder, name, position)
        if not data:
            with contextlib.suppress(OSError):
                return "", min(position, os.lstat(self._folder / name).st_size)
            return "", 0
        return data.decode("utf-8", "replace"), position + len(data)

    @property
    def size(self) -> int:
        """Bytes that the run's folder takes of the disk."""
        return run_folders.size_of(self._folder)

    def delete(self) -> None:
        """Remove the run's folder; files that the user put into it stay.

        Raises:
            CallOrderError: The run is not over.
        """
        if not (run := self.listed()).is_over:
            raise CallOrderError(f"the run {self.id} is {run.state}, so its folder cannot be deleted. Stop it first.")
        run_folders.remove(self._folder)

    def log_order(self, num_pieces: int) -> list[tuple[int, int]]:
        """Return the rank and the end of the newest pieces of output of all ranks, in the order of their arrival."""
        return read_log_order(self._folder, num_pieces)

    def _tail(self, rank: int) -> str:
        start = max(0, self.logs_since(rank, 1 << 40)[1] - TAIL)
        text, _ = self.logs_since(rank, start)
        return text.partition("\n")[2] if start else text


def check_axis(axis: str, names: Iterable[str]) -> None:
    """Refuse an axis that curves of these names do not have; raises `ConfigError`."""
    from notebook_launcher.drawing.charts import AXES, is_epoch

    if axis not in AXES:
        raise ConfigError(f"axis={axis!r}: there is no such axis. Type one of {', '.join(map(repr, AXES))}.")
    if axis == "epoch" and not any(map(is_epoch, names)):
        raise ConfigError(
            "axis='epoch': no run has reported epochs. Report them beside the other metrics, report(loss=loss, "
            "epoch=epoch), or type axis='time'."
        )


def _decode(summary: dict[str, Any] | None, folder: Path) -> RunSnapshot:
    if summary is not None:
        try:
            return encoding.decode_snapshot({**summary, "id": folder.name})
        except ValueError as error:
            path = folder / run_folders.SUMMARY
            raise RunFolderError(f"{path} is damaged: {one_line(error, 200)}.") from error
    # The kernel was killed before it wrote the first summary.
    return _seen_from_outside(folder, run_folders.name_in(folder.name))


def _seen_from_outside(folder: Path, name: str) -> RunSnapshot:
    num_logs = 0
    with contextlib.suppress(FileNotFoundError):  # The folder of a short run that said nothing goes with its end.
        num_logs = len(list(folder.glob("rank-*.log")))
    return RunSnapshot(
        id=folder.name,
        name=name,
        state="starting",
        started=run_folders.time_in(folder.name),
        seconds=0.0,
        num_processes=num_logs,
        summary="",
        seed=None,
        error="its folder has no summary",
    )


def _lost(snapshot: RunSnapshot) -> RunSnapshot:
    ended = ("returned", "failed", "stopped")
    ranks = tuple(
        rank if rank.state in ended else dataclasses.replace(rank, state="unknown", pid=None) for rank in snapshot.ranks
    )
    error = snapshot.error or "the kernel ended before the run did"
    return dataclasses.replace(snapshot, state="lost", ranks=ranks, error=error)


# --------------------------------------------------------------------------------------------------------------------
# Edits of a run by the user: its name, tags and notes, in a file of its folder.


def check_edits(name: str | None, tags: Iterable[str] | None, notes: str | None) -> dict[str, Any]:
    """Return the edits that are given, checked; None leaves a part as it is.

    Raises:
        ConfigError: The name or a tag is not text.
    """
    words = (tags,) if isinstance(tags, str) else tuple(tags or ())
    checked = LaunchConfig(name=name, tags=words)
    given = {"name": name, "tags": None if tags is None else list(checked.tags), "notes": notes}
    return {key: value for key, value in given.items() if value is not None}


def read_edits(folder: Path) -> dict[str, Any]:
    """Return the edits in a run's folder."""
    return read_json(folder, run_folders.EDITS) or {}


def write_edits(folder: Path, edits: Mapping[str, Any]) -> None:
    """Add edits to those in a run's folder; raises `RunFolderError`."""
    path, data = folder / run_folders.EDITS, encoding.encode({**read_edits(folder), **edits})
    try:
        run_files.replace(path, data.encode("ascii"), path.with_suffix(".json.part"))
    except RunFolderError:
        raise
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {error.strerror}.") from error
