"""Rate at which the samples of a run are trained on, as one rank's Accelerator counts them."""

from __future__ import annotations

from notebook_launcher.kernel.metering.pace import Pace

__all__ = ["SamplePace"]

Spans = tuple[tuple[str, float, float], ...]


class SamplePace:
    """The pace of one rank's samples, measured over elapsed time."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._num_samples = 0.0
        self._has_records = False

    def note(self, time: float, num_samples: float, spans: Spans, since: float, offset: float = 0.0) -> None:
        """Add the samples of one record of phases.

        Args:
            time: Time of the record, by CLOCK_MONOTONIC of this machine.
            num_samples: Number of samples.
            spans: As `Phases.spans` and, as the next argument, `Phases.since`: by the clock of the rank's machine.
            since: Time at which the first span began.
            offset: Seconds by which the clock of this machine is ahead of that one.
        """
        end = time
        if spans:
            (_, start, _), (_, last, seconds) = spans[0], spans[-1]
            end = last + seconds + offset  # A rank sends the last record at the end of its function.
            if not self._has_records:
                self._pace.note(min(start, since) + offset, 0.0)
        self._has_records = True
        self._num_samples += num_samples
        self._pace.note(end, self._num_samples)

    def leave_out(self, since: float, until: float) -> None:
        """Leave out a pause, by CLOCK_MONOTONIC of this machine."""
        self._pace.leave_out(since, until)

    def rate(self) -> float | None:
        """Return the samples per second of the last seconds."""
        return self._pace.rate()

    def mean(self) -> float | None:
        """Return the samples per second of the whole training."""
        return self._pace.mean()
