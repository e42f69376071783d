"""The result of `run.profile(...)`: the top operators of each rank, and the files with the traces."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from notebook_launcher.drawing.tables import Column, folded, joined, note_html, table_html, table_text
from notebook_launcher.errors import check_rank
from notebook_launcher.kernel.latch import Latch
from notebook_launcher.messaging import messages
from notebook_launcher.tracebacks import for_caller
from notebook_launcher.wording import bounded, escape, format_bytes, format_count, format_seconds, plural

if TYPE_CHECKING:
    from notebook_launcher.history.recorder import Recorder
    from notebook_launcher.kernel.run.commands import RankRequests


SHOWN = 12
"""Operators of a rank that a table shows."""
VIEWER = "Open it at ui.perfetto.dev, or in chrome://tracing."


class _Operator(NamedTuple):
    """An operator of a profile, as in `messages.Profiled.operators`."""

    name: str
    calls: int
    cpu: float
    cpu_with_calls: float
    gpu: float
    gpu_with_calls: float


class Profile(tuple["messages.Profiled", ...]):
    """The time of some updates, operator by operator; a cell shows a table for each rank.

    Each element is the result of one rank.
    """

    __slots__ = ()

    @property
    def table(self) -> str:
        """The operators that took most time, as text, by rank."""
        return "\n\n".join(
            "\n".join([_head(record), *table_text(operator_columns(record)), *_notes(record)]) for record in self
        )

    @property
    def traces(self) -> dict[int, Path]:
        """By rank: the file with its trace, compressed, for the viewer at ui.perfetto.dev."""
        return {record.rank: Path(record.trace) for record in self if record.trace}

    def plain_tables(self) -> list[dict[str, Any]]:
        """Return a table for each rank as data for a page: its head, names of columns, rows, and notes."""
        tables = []
        for record in self:
            columns = [column for column in operator_columns(record) if any(column.cells)]
            rows = [list(row) for row in zip(*(column.cells for column in columns), strict=True)]
            names = [column.name for column in columns]
            tables.append(
                {"head": _head(record), "columns": names, "rows": rows, "trace": record.trace, "notes": _notes(record)}
            )
        return tables

    def __str__(self) -> str:
        return self.table

    def __repr__(self) -> str:
        return bounded(str(self), "print() shows all")

    def _repr_html_(self) -> str:
        parts = [_rank_html(record) for record in self]
        return joined(
            [parts[0], *(folded(_head(record), part) for record, part in zip(self[1:], parts[1:], strict=True))]
        )


def operator_columns(record: messages.Profiled) -> list[Column]:
    """Return the columns of a rank's table; the columns of the GPU are empty without a GPU."""
    operators = [_Operator(*row) for row in record.operators]
    rows = operators[:SHOWN]
    uses_gpu = any(row.gpu for row in rows)
    own = [row.gpu if uses_gpu else row.cpu for row in operators]
    total = sum(own) or 1.0
    gpu = [format_seconds(row.gpu) if uses_gpu else "" for row in rows]
    return [
        Column("operator", [row.name[:80] for row in rows]),
        Column("calls", [format_count(row.calls) for row in rows], kind="number"),
        Column("share", [f"{100 * seconds / total:.1f} %" for seconds in own[:SHOWN]], kind="number"),
        Column("GPU", gpu, kind="number"),
        Column("CPU", [format_seconds(row.cpu) for row in rows], kind="number"),
        Column("CPU with calls", [format_seconds(row.cpu_with_calls) for row in rows], kind="number"),
    ]


def _head(record: messages.Profiled) -> str:
    return f"rank {record.rank}: {plural(record.updates, 'update')} from update {record.first_update} on"


def _notes(record: messages.Profiled) -> list[str]:
    left = record.num_operators - SHOWN
    more = [f"and {plural(left, 'more operator')}"] if left > 0 else []
    trace = [f"trace: {record.trace}"] if record.trace else []
    return [*more, *trace, *([record.problem] if record.problem else [])]


def _rank_html(record: messages.Profiled) -> str:
    table = table_html(operator_columns(record), caption=_head(record))
    if not record.trace:
        return table + note_html(record.problem)
    path = Path(record.trace)
    size = format_bytes(path.stat().st_size) if path.exists() else "removed"
    # As IPython's FileLink: front ends find a path relative to the notebook.
    link = f'<a href="{escape(os.path.relpath(path))}" download>{escape(path.name)}</a>'
    return f"{table}<div>Trace: {link} ({size}). {VIEWER}</div>{note_html(record.problem)}"


# --------------------------------------------------------------------------------------------------------------------
# Requests for a profile of a run: one at a time, until all its ranks have delivered.


MAX_PROFILED = 100
"""Updates of a profile: the trace of a large model takes a megabyte or more for each."""


def check_profile(updates: object, ranks: object, num_processes: int) -> tuple[int, ...]:
    """Return the ranks to profile, each once, in the order in which they were named; raises as `Run.profile`."""
    if isinstance(updates, bool) or not isinstance(updates, int) or not 1 <= updates <= MAX_PROFILED:
        msg = f"profile(updates={updates!r}): updates must be a whole number from 1 to {MAX_PROFILED}."
        raise for_caller(ValueError(msg))
    typed = f"profile(ranks={ranks!r})"
    named = list(ranks) if isinstance(ranks, Iterable) else []
    if not named:
        msg = f"{typed}: ranks must be a list of one or more ranks. Write ranks=[0]."
        raise for_caller(ValueError(msg))
    return tuple(dict.fromkeys(check_rank(rank, num_processes, typed=typed) for rank in named))


class ProfileRequests:
    """The profile of a run that was asked for and is not complete; used in the run's thread alone."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._answer: Latch[Profile | str] | None = None
        """Set once all ranks have delivered; None while no profile is under way."""
        self._ranks: tuple[int, ...] = ()
        self._records: dict[int, messages.Profiled] = {}

    def begin(self, updates: int, ranks: tuple[int, ...], requests: RankRequests) -> Latch[Profile | str]:
        """Ask the ranks for a profile; return where it will be, or the reason why there is none.

        The reason is empty if no Accelerator is at work yet.
        """
        answer: Latch[Profile | str] = Latch()
        if self._answer is not None:
            answer.set("this run is being profiled already. Wait for that profile, then call run.profile() again.")
            return answer
        folder = None if self._recorder.folder is None else str(self._recorder.folder)
        order = messages.ProfileOrder(ranks=ranks, updates=updates, folder=folder)
        if requests.ask_to_change("profile", profile=order):
            self._answer, self._ranks, self._records = answer, ranks, {}
        else:
            answer.set("")
        return answer

    def note(self, record: messages.Profiled) -> None:
        """Add the result of a rank, and give the answer once all are there."""
        if self._answer is None:
            return
        self._records[record.rank] = record
        if self._records.keys() != set(self._ranks):
            return
        answer, self._answer = self._answer, None
        if any(result.operators for result in self._records.values()):
            answer.set(Profile(self._records[rank] for rank in sorted(self._records)))
        else:
            first = self._records[self._ranks[0]]
            answer.set(f"rank {first.rank}: {first.problem or 'nothing was recorded'}")

    def give_up(self) -> None:
        """Answer that the profile stays incomplete, because the ranks ended."""
        if self._answer is not None:
            self._answer.set("the ranks ended before the profile was complete")
            self._answer = None
