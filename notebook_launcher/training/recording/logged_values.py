"""What a training logs beside numbers: tables, as CSV and as Markdown, and histograms of tensors."""

from __future__ import annotations

import csv
import dataclasses
import io
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.pictures import Histogram

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


def histogram(values: Any, bins: int = 64) -> Histogram:
    """Return the histogram of a tensor's values, which `report(weights=histogram(tensor))` shows in the monitor.

    The histogram is computed where the tensor is, and only the counts leave the device.

    Args:
        values: A tensor, an array, or a list of numbers.
        bins: Number of bins from the lowest to the highest finite value.

    Raises:
        ValueError: `bins` is not from 1 to 1000.
    """
    if not 1 <= bins <= 1000:
        raise ValueError(f"histogram(bins={bins!r}): the number of bins can be 1 to 1000.")
    flat = torch.as_tensor(values).detach().reshape(-1).float()
    finite = flat[flat.isfinite()]
    if not len(finite):
        return Histogram(0.0, 0.0, (0,) * bins, len(flat))
    low, high = finite.min().item(), finite.max().item()
    counts = torch.histc(finite, bins, low, high) if high > low else torch.zeros(bins)
    whole = [int(count) for count in counts.tolist()]
    if high == low:
        whole[bins // 2] = len(finite)
    return Histogram(low, high, tuple(whole), len(flat) - len(finite))
