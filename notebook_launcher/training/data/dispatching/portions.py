"""Portions: the ranks' parts of the batches that rank 0 reads for all."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from notebook_launcher.training.data.completing import uneven_error
from notebook_launcher.training.data.dispatching.counted import CountedBatch, counted
from notebook_launcher.training.data.rounds import Round
from notebook_launcher.training.data.rows import join_batches, values_of_batch
from notebook_launcher.wording.text import type_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["Portions"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Portions:
    """Deals batches out, round by round.

    A round is a batch for every rank, or with `split` a slice of one batch for every rank. A batch in the
    middle that does not divide evenly is cut into parts that differ by one sample. The last round, where it is
    less than a batch for every rank or cannot be cut evenly:

    - `drop_last`: is left out, if it has less than a batch for every rank;
    - `even`: its samples, and as many from the epoch's start as are missing, are dealt out evenly;
    - otherwise each rank gets what there is, and with `uneven="weigh"` ranks for which there is nothing get some
      other rank's samples with weight 0; `"stop"` leaves the round out and `"error"` raises ValueError then.
    """

    num_processes: int
    """Ranks that share the batches."""
    split: bool = False
    """True if each batch is cut for all ranks."""
    even: bool = True
    """True if the last round is filled with samples from the start."""
    uneven: str = "weigh"
    """Without `even`, the conduct of a rank for which no batch is left."""
    drop_last: bool = False
    """True if a last round without a batch for every rank is left out."""
    slice_fn: Callable[..., Any] | None = None
    """Cuts a rank's part out of a batch: `slice_fn(batch, slice, process_index=..., num_processes=...)`."""

    def deal(
        self, batches: Iterable[tuple[Any, int]], first: Sequence[Any] = ()
    ) -> Iterator[tuple[list[Any], Round, int]]:
        """Deal out batches that come with the number of samples up to their end.

        Args:
            batches: Batches, counted or not, each with the number of samples up to its end.
            first: The first round of the epoch, if `batches` are the rest of one.

        Yields:
            Every rank's batch, what all of them count, and the number of samples up to the round's end.
        """
        per_round = 1 if self.split else self.num_processes
        group: list[CountedBatch] = []
        start = list(map(counted, first))
        if start and not self._is_even(start):
            start = []
        samples = 0
        for batch, samples_with_it in batches:
            if len(group) == per_round:
                yield *self._middle(group), samples
                group = []
            group.append(counted(batch))
            samples = samples_with_it
            if len(group) == per_round and self._is_even(group):
                if not start and self.fills:
                    start = group
                yield *self._middle(group), samples
                group = []
        if group and (last := self._last(group, start)) is not None:
            yield *last, samples

    @property
    def fills(self) -> bool:
        """True if a short last round gets samples from the epoch's start."""
        return self.even and not self.drop_last

    def _is_even(self, group: Sequence[CountedBatch]) -> bool:
        if self.split:
            return group[0].rows % self.num_processes == 0
        return len({batch.rows for batch in group}) == 1

    def _middle(self, group: list[CountedBatch]) -> tuple[list[Any], Round]:
        if self.slice_fn is not None and self._is_even(group):
            joined = _joined(group)
            rows = (joined.rows // self.num_processes,) * self.num_processes
            return self._slices(joined, rows), Round(rows, rows, rows)
        return self._apart(group[0]) if self.split else _whole(group)

    def _last(self, group: list[CountedBatch], start: list[CountedBatch]) -> tuple[list[Any], Round] | None:
        missing = 0 if self.split else self.num_processes - len(group)
        if self.drop_last and missing:
            return None
        if self.even:
            return self._evened(group, start)
        total = sum(batch.rows for batch in group)
        small = missing > 0 or (self.split and total < self.num_processes)
        if small and self.uneven == "stop":
            return None
        if small and self.uneven == "error":
            raise uneven_error(f"{total} samples are left for {self.num_processes} ranks")
        return self._apart(group[0]) if self.split else _whole(group, missing)

    def _evened(self, group: list[CountedBatch], start: list[CountedBatch]) -> tuple[list[Any], Round]:
        try:
            return self._evened_by_samples(group, start)
        except (RuntimeError, TypeError):
            # Batches of different widths, for instance, or that cannot be cut: some ranks repeat a whole one.
            if self.split:
                raise
            parts, drawn = _whole(group, self.num_processes - len(group))
            return parts, dataclasses.replace(drawn, weights=drawn.rows)

    def _evened_by_samples(self, group: list[CountedBatch], start: list[CountedBatch]) -> tuple[list[Any], Round]:
        for batch in group:
            if not batch.can_be_cut:
                raise TypeError(
                    f"the last batch cannot be cut evenly for the ranks: {type_of(batch.batch)} has no rows to "
                    "count. Let collate_fn return tensors or lists with a row for each sample, or pass "
                    "dispatch_batches=False so that every rank reads the data itself."
                )
        values = [values_of_batch(batch.batch, batch.rows, batch.lists) for batch in group]
        if any(others != values[0] for others in values):
            raise TypeError("numbers of the batches as a whole, such as of their tokens, differ.")
        total = sum(batch.rows for batch in group)
        size = -(-total // self.num_processes)
        filler = itertools.cycle(self._first_samples(start or group))
        joined = _joined([*group, *itertools.islice(filler, size * self.num_processes - total)])
        rows = (size,) * self.num_processes
        real = tuple(min(size, max(0, total - rank * size)) for rank in range(self.num_processes))
        return self._slices(joined, rows), Round(rows, real, rows)

    def _first_samples(self, group: list[CountedBatch]) -> list[CountedBatch]:
        """Return up to one sample for every rank, as batches of one."""
        found: list[CountedBatch] = []
        for batch in group:
            wanted = min(batch.rows, self.num_processes - len(found))
            found += [batch._replace(batch=batch.take(row, row + 1), rows=1) for row in range(wanted)]
        return found

    def _apart(self, batch: CountedBatch) -> tuple[list[Any], Round]:
        """Cut a batch into parts that differ by one sample at most; ranks without a part repeat the first."""
        small, more = divmod(batch.rows, self.num_processes)
        real = tuple(small + (rank < more) for rank in range(self.num_processes))
        return self._slices(batch, real), Round(tuple(max(1, count) for count in real), real, real)

    def _slices(self, batch: CountedBatch, sizes: Iterable[int]) -> list[Any]:
        ends = itertools.accumulate(sizes)
        bounds = [slice(end - size, end) if size else slice(0, 1) for size, end in zip(sizes, ends, strict=True)]
        if self.slice_fn is None:
            return [batch.take(bound.start, bound.stop) for bound in bounds]
        return [
            self.slice_fn(batch.batch, bound, process_index=rank, num_processes=self.num_processes)
            for rank, bound in enumerate(bounds)
        ]


def _joined(batches: list[CountedBatch]) -> CountedBatch:
    lists = frozenset[str]().union(*(batch.lists for batch in batches))
    joined = join_batches([batch.batch for batch in batches], lists)
    return CountedBatch(joined, sum(batch.rows for batch in batches), can_be_cut=True, lists=lists)


def _whole(group: list[CountedBatch], missing: int = 0) -> tuple[list[Any], Round]:
    """Give each rank a batch; ranks without a batch repeat one, with weight 0."""
    dealt = [*group, *itertools.islice(itertools.cycle(group), missing)]
    real = (*(batch.rows for batch in group), *[0] * missing)
    return [batch.batch for batch in dealt], Round(tuple(batch.rows for batch in dealt), real, real)
