"""Tables that a training logs: columns and rows, as CSV and as Markdown."""

from __future__ import annotations

import csv
import dataclasses
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_BYTES = 1_000_000
"""Bytes of a table in the run's folder."""


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """A table of any values."""

    columns: tuple[str, ...]
    """Names of the columns; empty: they have none."""
    rows: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, columns: Sequence[str] | None, data: Sequence[Sequence[Any]] | None, dataframe: Any) -> Table:
        """Return the table that was given as columns and rows, or as a frame of pandas.

        Raises:
            ValueError: Neither rows nor a frame are given, or both, or a row does not fit the columns.
        """
        if (data is None) == (dataframe is None):
            raise ValueError("log_table: pass data=[[...], ...] with columns=[...], or dataframe=, and not both.")
        if dataframe is not None:
            rows = tuple(tuple(row) for row in dataframe.itertuples(index=False))
            return cls(tuple(str(name) for name in dataframe.columns), rows)
        names = tuple(str(name) for name in columns or ())
        rows = tuple(tuple(row) for row in data or ())
        for number, row in enumerate(rows):
            if names and len(row) != len(names):
                raise ValueError(
                    f"log_table: row {number} has {len(row)} values, and there are {len(names)} columns: "
                    f"{', '.join(names)}."
                )
        return cls(names, rows)

    def to_csv(self) -> str:
        """Return the table as CSV, the names of the columns first."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([self.columns, *self.rows] if self.columns else self.rows)
        return text.getvalue()

    def to_bounded_csv(self) -> bytes:
        """Return the table as CSV of at most about a megabyte; a last row counts the rows that are left out."""
        data = self.to_csv().encode("utf-8", "replace")
        if len(data) <= MAX_BYTES:
            return data
        kept = len(self.rows)
        while kept and len(data) > MAX_BYTES:
            kept = min(kept - 1, int(kept * MAX_BYTES / len(data)))
            data = Table(self.columns, self.rows[:kept]).to_csv().encode("utf-8", "replace")
        return data + f"[{len(self.rows) - kept:,} more rows]\n".encode()

    def to_markdown(self) -> str:
        """Return the table as Markdown."""
        width = len(self.columns) or max(map(len, self.rows), default=0)
        lines = [self.columns or ("",) * width, ("---",) * width, *self.rows]
        return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")
