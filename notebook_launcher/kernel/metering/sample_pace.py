"""Rate at which the samples of a run are trained on, as one rank's Accelerator counts them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher.kernel.metering.pace import Pace

if TYPE_CHECKING:
    from notebook_launcher.messaging import messages

__all__ = ["SamplePace"]


class SamplePace:
    """The pace of one rank's samples, measured over elapsed time."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._num_samples = 0.0
        self._has_records = False

    def note(self, record: messages.Phases) -> None:
        """Add the samples of a record."""
        end = record.time
        if record.spans:
            (_, start, _), (_, last, seconds) = record.spans[0], record.spans[-1]
            end = last + seconds  # A rank sends the last record at the end of its function.
            if not self._has_records:
                self._pace.note(min(start, record.since), 0.0)
        self._has_records = True
        self._num_samples += record.samples
        self._pace.note(end, self._num_samples)

    def rate(self) -> float | None:
        """Return the samples per second of the last seconds."""
        return self._pace.rate()

    def mean(self) -> float | None:
        """Return the samples per second of the whole training."""
        return self._pace.mean()
