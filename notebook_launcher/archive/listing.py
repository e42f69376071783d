"""The runs that have left a folder: `runs()` returns a list of them, with its table, and `open_run(...)` one."""

from __future__ import annotations

import contextlib
import datetime as dt
import difflib
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from notebook_launcher.archive.recorded import RecordedRun
from notebook_launcher.drawing import tables
from notebook_launcher.drawing.legend import RUN_STATES
from notebook_launcher.errors import ConfigError
from notebook_launcher.history import run_folders
from notebook_launcher.history.folder_files import belongs_to_another, read_json
from notebook_launcher.history.run_folders import is_hosted, is_session, is_stopped
from notebook_launcher.tracebacks import for_caller
from notebook_launcher.wording import (
    bounded,
    did_you_mean,
    escape,
    first_few,
    format_bytes,
    format_metrics,
    format_seconds,
    one_line,
    plural,
    type_of,
    unknown,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from notebook_launcher.history.schema import RunKind


RUN_KINDS: tuple[RunKind, ...] = ("run", "call", "cell", "session")
DISPENSABLE = ("when", "disk", "ranks", "notes", "holds", "tags", "last metrics", "time")
"""Columns that a narrow terminal does without, the first of them first; the id has the time of the launch, too."""
MAX_NAME = 100
"""Characters of a name, which is the reason where a run cannot be read."""
MAX_ROWS = 16


class RunList(Sequence[RecordedRun]):
    """Runs, the newest first, which a notebook shows as a table. A run is read when one of its attributes is used."""

    # `stop_hosted` ends the hosts of some folders and returns their number. It comes from outside, because it needs the
    # handles of a kernel, and folders are read without a kernel.
    def __init__(self, home: Path, items: Sequence[RecordedRun], stop_hosted: Callable[[Sequence[Path]], int]) -> None:
        self._home = home
        self._items = tuple(items)
        self._stop_hosted = stop_hosted

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> RecordedRun: ...
    @overload
    def __getitem__(self, index: slice) -> RunList: ...
    def __getitem__(self, index: int | slice) -> RecordedRun | RunList:
        return self._with(self._items[index]) if isinstance(index, slice) else self._items[index]

    def _with(self, items: Sequence[RecordedRun]) -> RunList:
        return RunList(self._home, items, self._stop_hosted)

    def __repr__(self) -> str:
        return bounded(self.as_text(width=tables.terminal_width()), "print(runs().as_text()) shows all")

    @property
    def home(self) -> Path:
        """Folder that holds the runs' folders."""
        return self._home

    @property
    def size(self) -> int:
        """Bytes that the folders of these runs take of the disk."""
        return sum(run.size for run in self._items)

    def filter(
        self,
        *,
        name: str | None = None,
        state: str | None = None,
        tag: str | None = None,
        kind: RunKind | None = None,
        within: float | dt.timedelta | None = None,
        before: float | dt.timedelta | None = None,
    ) -> RunList:
        """Return the runs that fit all of these; None: any.

        Args:
            name: Part of the name of the run or of its function; upper and lower case are the same.
            state: State, such as `"done"` or `"failed"`.
            tag: One of the run's tags.
            kind: `"run"`: launches alone; `"call"` and `"cell"`: calls and cells on the ranks of sessions;
                `"session"`: detached sessions.
            within: Seconds before now, after which the run was launched; or a `timedelta`.
            before: Seconds before now, before which the run was launched; or a `timedelta`.

        Raises:
            ConfigError: No run is ever in this state, or of this kind.
        """
        newest, oldest = _seconds(before), _seconds(within)
        if state is not None and state not in RUN_STATES:
            raise ConfigError(unknown("state", state, RUN_STATES, more=" or None"), field="state")
        if kind not in (None, *RUN_KINDS):
            raise ConfigError(unknown("kind", kind, RUN_KINDS, more=" or None"), field="kind")
        now = time.time()

        def fits(run: RecordedRun) -> bool:
            snapshot = run.listed()
            age = now - snapshot.started
            return (
                (name is None or name.casefold() in snapshot.name.casefold())
                and (tag is None or tag in run.tags)
                and (state is None or snapshot.state == state)
                and (kind is None or snapshot.kind == kind)
                and (oldest is None or age <= oldest)
                and (newest is None or age > newest)
            )

        return self._with([run for run in self._items if fits(run)])

    def delete(self) -> int:
        """Remove the folders of these runs; return their number. A run that is not over stays."""
        over = [run for run in self._items if run.listed().is_over]
        for run in over:
            run.delete()
        return len(over)

    def stop_all(self) -> int:
        """Stop the detached runs in progress and close the open detached sessions among these; return their number.

        Waits for their ends. A run that is not detached belongs to its kernel, and continues.
        """
        return self._stop_hosted([run.folder for run in self._items if not run.listed().is_over])

    def as_text(self, limit: int = MAX_ROWS, *, width: int | None = None, more: str = "") -> str:
        """Return the table as text.

        Args:
            limit: Rows at most.
            width: Characters of a line at most; None: any number.
            more: The way to see the other rows; empty: an expression of Python.
        """
        columns = self._columns(limit)
        lines = tables.table_text(columns, width, dispensable=DISPENSABLE, most=limit) if len(self) else []
        return "\n".join([self._headline(), *lines, *self._rest(limit, more)])

    def _ipython_display_(self, **_: Any) -> None:
        # An installation whose widgets cannot be imported has the table as HTML.
        with contextlib.suppress(ImportError):
            from notebook_launcher.widgets.runs import runs_table

            if runs_table.show(self):
                return
        # IPython then takes the HTML or the text.
        raise NotImplementedError("no front end draws widgets here")

    def _repr_html_(self) -> str:
        return self.as_html()

    def as_html(self) -> str:
        """Return the table as HTML, with at most 16 rows."""
        head = self._headline()
        table = tables.table_html(self._columns(), caption=head) if len(self) else f"<p>{escape(head)}</p>"
        return "".join([table, *(f"<p>{escape(line)}</p>" for line in self._rest())])

    def _columns(self, limit: int = MAX_ROWS) -> list[tables.Column]:
        shown = [run.listed() for run in self._items[:limit]]
        kinds = [run.kind for run in shown]
        sizes = [format_bytes(run.size) for run in self._items[:limit]]
        reported = [next((rank.metrics for rank in run.ranks if rank.metrics), {}) for run in shown]
        return [
            tables.Column("id", [run.id for run in shown]),
            tables.Column("kind", kinds if set(kinds) - {"run"} else []),
            tables.Column("name", [one_line(run.name, MAX_NAME) for run in shown], can_shrink=True),
            tables.Column("tags", [one_line(", ".join(run.tags), 40) for run in self._items[:limit]], can_shrink=True),
            tables.Column("when", [time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started)) for run in shown]),
            tables.Column("state", [run.state for run in shown], kind="state"),
            tables.Column("time", [format_seconds(run.seconds) for run in shown], kind="number"),
            tables.Column("ranks", [str(run.num_processes) for run in shown], kind="number"),
            tables.Column("holds", [_holdings(run) for run in self._items[:limit]], can_shrink=True),
            tables.Column("disk", sizes, kind="number"),
            tables.Column("last metrics", [format_metrics(metrics) for metrics in reported], can_shrink=True),
            tables.Column("notes", [one_line(run.notes, 60) for run in self._items[:limit]], can_shrink=True),
        ]

    def _headline(self) -> str:
        return f"{plural(len(self), 'run') if len(self) else 'no runs'} in {self._home}"

    def _rest(self, limit: int = MAX_ROWS, more: str = "") -> list[str]:
        left = len(self) - limit
        return [f"and {left} older: {more or f'runs()[{limit}:]'}"] if left > 0 else []


def _seconds(value: float | dt.timedelta | None) -> float | None:
    return value.total_seconds() if isinstance(value, dt.timedelta) else value


def _holdings(run: RecordedRun) -> str:
    """Return what a run in progress takes of the machine: memory of its ranks and GPUs, and its host; else nothing."""
    snapshot = run.listed()
    if snapshot.is_over:
        return ""
    memory = sum(rank.memory or 0 for rank in snapshot.ranks)
    gpus = sum(rank.gpu_memory or 0 for rank in snapshot.ranks)
    parts = [format_bytes(memory)] * bool(memory) + [f"{format_bytes(gpus)} of GPUs"] * bool(gpus)
    has_host = is_hosted(run.folder) or is_session(run.folder)
    if (owner := run_folders.owner_of(run.folder)) is not None and (has_host or is_stopped(owner)):
        words = " does not answer" if is_stopped(owner) else ""
        parts.append(f"{'host' if has_host else 'kernel'} {owner}{words}")
    return ", ".join(parts)


# --------------------------------------------------------------------------------------------------------------------
# The runs in a folder, the newest first, and the folder itself.


def require_home(folder: str | os.PathLike[str]) -> Path:
    """Return the folder that holds the runs.

    Raises:
        ConfigError: `folder` is neither text nor a path.
        LookupError: `folder` is `"auto"` and recording is off.
    """
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError(
            f"folder={folder!r} is {type_of(folder)}. Pass the path of a folder that holds runs, or 'auto'."
        )
    home = run_folders.find_home(folder)
    if home is None:
        msg = f"runs are not recorded: {run_folders.VARIABLE} is 'off'. Pass the folder that holds the runs."
        raise for_caller(LookupError(msg))
    return home


def stored_runs(home: Path) -> list[RecordedRun]:
    """Return the runs in a folder, the newest first, without folders of other users and links."""
    items = []
    # A name holds the second of the launch; runs of one second are sorted by their summaries.
    for _, names in itertools.groupby(run_folders.list_ids(home), key=lambda name: name[: len("20261121-142501")]):
        same = list(_still_there(home, names))
        items += same if len(same) < 2 else sorted(same, key=_launched, reverse=True)
    return items


def _still_there(home: Path, names: Iterable[str]) -> Iterator[RecordedRun]:
    for name in names:
        # Another kernel may be making room.
        with contextlib.suppress(LookupError):
            if not belongs_to_another(home / name):
                yield RecordedRun(home / name)


def _launched(run: RecordedRun) -> float:
    """Return the time of a run's launch, of which alone the summary is read."""
    started = (read_json(run.folder, run_folders.SUMMARY) or {}).get("started")
    return started if isinstance(started, float) else run.listed().started


# --------------------------------------------------------------------------------------------------------------------
# `open_run(...)`: a run by its id, the beginning of its id, or `"last"`.


LAST = "last"


def open_run(run: str | os.PathLike[str], folder: str | os.PathLike[str] = "auto") -> RecordedRun:
    """Return a run that has left a folder.

    Args:
        run: The run's id, the beginning of its id, the path of its folder, or `"last"` for the latest run.
        folder: The folder that holds the runs' folders. `"auto"`: see `LaunchConfig.runs_folder`.

    Raises:
        LookupError: There is no such run, the beginning fits several runs, or `folder` is `"auto"` and recording of
            runs is off.
        ConfigError: `run` is neither text nor a path.
    """
    if not isinstance(run, str | os.PathLike):
        msg = f"run={run!r} is {type_of(run)}. Pass a run's id, as runs() shows it, or the path of its folder."
        raise ConfigError(msg)
    if isinstance(run, os.PathLike) or os.sep in run:
        return RecordedRun(Path(run).expanduser().absolute())
    home = require_home(folder)
    ids = run_folders.list_ids(home)
    found = [name for name in ids if name == run] or [name for name in ids if run and name.startswith(run)]
    if not found and run == LAST and (every := stored_runs(home)):
        return every[0]
    if len(found) == 1:
        return RecordedRun(home / found[0])
    # Of runs of one second the ids do not show which is the latest.
    in_order = ids if found else [stored.id for stored in stored_runs(home)]
    raise for_caller(LookupError(_why_not_one(run, home, in_order, found)))


def _why_not_one(run: str, home: Path, ids: list[str], found: list[str]) -> str:
    if found:
        return f"{len(found)} runs in {home} begin with {run!r}: {first_few(found)}. Type more of the id."
    if not ids:
        return (
            f"there is no run {run!r}: no run has left a folder in {home}. A launch of more than a second leaves one, "
            "and runs(folder) lists another folder."
        )
    hint = did_you_mean(run, ids) or _near_name(run, ids) or f"The latest is {ids[0]}."
    lists = f"runs(), in a terminal `notebook-launcher runs`, lists all {len(ids)}."
    return f"there is no run {run!r} in {home}. {hint} {lists}"


def _near_name(run: str, ids: list[str]) -> str:
    """Return the latest run of each function whose name is close to the text, as a question; empty if none is."""
    latest: dict[str, str] = {}
    for run_id in ids:
        latest.setdefault(run_folders.name_in(run_id), run_id)
    close = difflib.get_close_matches(run, latest)
    return f"Did you mean {' or '.join(latest[name] for name in close)}?" if close else ""
