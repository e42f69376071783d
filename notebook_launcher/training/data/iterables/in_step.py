"""Steps of ranks that read different streams: before each round they exchange the counts of their batches."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from notebook_launcher.training.data.completing import uneven_error
from notebook_launcher.training.data.position import Position
from notebook_launcher.training.data.rounds import Round
from notebook_launcher.training.operations import broadcast_object_list
from notebook_launcher.training.operations.checking import gather_numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from notebook_launcher.training.data.iterables.streams import Receipt

__all__ = ["OWN_SHARDS", "Common", "InStep", "Readings", "wrong_readers"]

OWN_SHARDS = -1
"""The value of `Position.stream` where every rank reads streams of its own."""


class Common(NamedTuple):
    """A round in which all ranks take part."""

    batch: Any
    round: Round
    is_last: bool
    read: list[tuple[int, int] | None]
    """For each rank: the stream of its batch, and the samples of that stream so far; None without a batch."""


class _Report(NamedTuple):
    """A rank's report of the batch that it has read; all zero at its end."""

    rows: int
    """Samples of the batch."""
    real: int
    """Samples that no rank has had before."""
    weight: int
    """The batch's weight in a window's mean."""
    stream: int
    """The stream that the batch comes from."""
    consumed: int
    """Samples of that stream so far."""


NOTHING = _Report(0, 0, 0, 0, 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InStep:
    """Yields batches that ranks read for themselves, equally many on every rank.

    Ranks that have read everything before the others repeat their first batch: with `even_batches` it counts, with
    `uneven="weigh"` it has weight 0. With `drop_last` and `uneven="stop"` the first round that lacks a batch is left
    out, and ends the epoch. Every rank must ask for each round.
    """

    process_index: int
    """This rank."""
    drop_last: bool
    """True if the first round that lacks a batch is left out."""
    even_batches: bool
    """True if a repeated batch counts."""
    uneven: str
    """Without `even_batches`, the conduct of a rank that has read everything."""

    def rounds(self, batches: Iterable[tuple[Any, Receipt]]) -> Iterator[Common]:
        """Yield this rank's batches with the rounds of all ranks.

        Raises:
            ValueError: With `uneven="error"`, on every rank, where some ranks have a batch and others have none.
        """
        own = iter(batches)
        batch, reports = self._read(own)
        first, rows_of_first = self._example(batch, reports)
        while not self._is_over(reports):
            following, reports_of_following = self._read(own)
            missing = [not report.rows for report in reports]
            if any(missing) and self.uneven == "error" and not self.even_batches:
                lacking = ", ".join(str(rank) for rank, lacks in enumerate(missing) if lacks)
                raise uneven_error(f"rank {lacking} has read everything, others have more")
            yield Common(
                first if missing[self.process_index] else batch,
                self._round(reports, rows_of_first),
                self._is_over(reports_of_following),
                [(report.stream, report.consumed) if report.rows else None for report in reports],
            )
            batch, reports = following, reports_of_following

    def _read(self, own: Iterator[tuple[Any, Receipt]]) -> tuple[Any, list[_Report]]:
        """Read this rank's next batch, and exchange its counts."""
        batch, mine = None, NOTHING
        if (found := next(own, None)) is not None:
            batch, receipt = found
            assert receipt.round is not None
            counts = receipt.round
            mine = _Report(counts.rows[0], counts.real[0], counts.weights[0], receipt.stream, receipt.consumed)
        return batch, [_Report(*numbers) for numbers in gather_numbers(mine)]

    def _example(self, batch: Any, reports: list[_Report]) -> tuple[Any, list[int]]:
        """Return this rank's first batch, or another rank's if it has none, and the rows of all first batches."""
        rows = [report.rows for report in reports]
        owner = next((rank for rank, count in enumerate(rows) if count), None)
        if owner is None or all(rows):
            return batch, rows
        example = [batch if self.process_index == owner else None]
        broadcast_object_list(example, from_process=owner)
        return batch if rows[self.process_index] else example[0], [count or rows[owner] for count in rows]

    def _is_over(self, reports: list[_Report]) -> bool:
        have = [report.rows > 0 for report in reports]
        stops = self.drop_last or (self.uneven == "stop" and not self.even_batches)
        return not any(have) or (stops and not all(have))

    def _round(self, reports: list[_Report], rows_of_first: list[int]) -> Round:
        rows = tuple(report.rows or first for report, first in zip(reports, rows_of_first, strict=True))
        repeated = rows if self.even_batches else (0,) * len(rows)
        weights = tuple(
            report.weight if report.rows else again for report, again in zip(reports, repeated, strict=True)
        )
        return Round(rows, tuple(report.real for report in reports), weights)


class Readings:
    """The position of every rank in its own streams.

    The streams begin at `start`.

    Raises:
        ValueError: Other ranks or workers read when `start` was saved.
    """

    def __init__(self, start: Position, num_processes: int, num_streams: int) -> None:
        numbers, width = start.streams or (0,) * (num_processes * (1 + num_streams)), 1 + num_streams
        if start and (start.stream != OWN_SHARDS or len(numbers) != num_processes * width):
            raise wrong_readers(len(numbers), f"{num_processes} ranks read shards with {num_streams} streams each")
        # By rank: the stream of its last batch, and the samples that it has consumed of each of its streams.
        self._ranks = [list(numbers[rank * width : (rank + 1) * width]) for rank in range(num_processes)]

    def of_rank(self, rank: int) -> list[int]:
        """Return the stream of a rank's last batch, and the samples that the rank has consumed of each stream."""
        return list(self._ranks[rank])

    def note(self, read: list[tuple[int, int] | None]) -> None:
        """Count one round."""
        for numbers, reading in zip(self._ranks, read, strict=True):
            if reading is not None:
                numbers[0], numbers[1 + reading[0]] = reading

    def position(self, epoch: int) -> Position:
        """Return the position of all ranks."""
        samples = sum(sum(numbers[1:]) for numbers in self._ranks)
        return Position(epoch, samples, tuple(number for numbers in self._ranks for number in numbers), OWN_SHARDS)


def wrong_readers(num_numbers: int, now: str) -> ValueError:
    """Return the error for a position at which other ranks or workers read; `now` names the readers."""
    return ValueError(
        f"This position was saved where data were read by other ranks or workers ({num_numbers} numbers), and here "
        f"{now}. Load it with the same number of ranks and num_workers, or restart the epoch with set_epoch()."
    )
