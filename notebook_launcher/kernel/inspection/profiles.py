"""The result of `run.profile(...)`: the top operators of each rank, and the files with the traces."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from notebook_launcher.drawing.tables import Column, folded, joined, note_html, table_html, table_text
from notebook_launcher.wording.counts import plural
from notebook_launcher.wording.text import bounded, escape
from notebook_launcher.wording.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from notebook_launcher.messaging import messages

__all__ = ["Profile"]

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
