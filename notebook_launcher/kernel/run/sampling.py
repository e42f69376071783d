"""Sampling: the stacks of all ranks, many times in a while, at the request of the user's thread."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from notebook_launcher.kernel.inspection.samples import Samples
from notebook_launcher.kernel.run.commands import EndSamplingCommand, SampleCommand
from notebook_launcher.tracebacks import for_caller

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.kernel.latch import Latch
    from notebook_launcher.kernel.run.commands import AskingCommand

__all__ = ["check_sampling", "take_samples"]

MAX_SAMPLING, MAX_RATE = 60.0, 100.0
"""Seconds of sampling, and samples a second: each sample of a rank takes some kilobytes of memory."""


def check_sampling(seconds: object, rate: object) -> None:
    """Raise `ValueError` if stacks cannot be sampled for so long, or so often."""
    if not (_is_within(seconds, MAX_SAMPLING) and _is_within(rate, MAX_RATE)):
        msg = (
            f"sample(seconds={seconds!r}, rate={rate!r}): seconds must be a number, more than 0 and up to "
            f"{MAX_SAMPLING:g}, and rate more than 0 and up to {MAX_RATE:g} per second."
        )
        raise for_caller(ValueError(msg))


def take_samples(ask: Callable[[AskingCommand[Any]], Any], over: Latch[None], seconds: float, rate: float) -> Samples:
    """Sample the stacks of all ranks, until the time is up or the run is over.

    Args:
        ask: Sends a command to the run's thread, and returns the answer.
        over: Set when the run is over.
        seconds: Duration.
        rate: Samples per second.
    """
    starts, end = ask(SampleCommand()), time.monotonic() + seconds
    while time.monotonic() < end and not over.wait(1 / rate):
        ask(SampleCommand())
    texts: dict[int, str] = ask(EndSamplingCommand(starts))
    return Samples.parse(texts)


def _is_within(value: object, most: float) -> bool:
    """Return True if a value is a number above 0, up to a limit."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= most
