"""Measured samples, the contenders and their limits."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from support.process import FailedError
from support.report import median, milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LABELS = {
    "ours": ("notebook_launch", "group up, results back"),
    "ours-fork": ("notebook_launch, start_method=fork", "group up, results back"),
    "session": ("Session.run", "ranks and group stay; results back"),
    "bare": ("os.fork + os._exit, torch imported", "reference: no group, no results"),
    "bare-compiler": ("the same, torch's compiler imported too", "reference: no group, no results"),
    "bare-huge": ("the same, in huge pages (as our fork server)", "reference: no group, no results"),
    "torch-fork": ("torch start_processes, fork", "group made by hand; no results"),
    "torch-spawn": ("torch start_processes, spawn", "group made by hand; no results"),
    "accelerate": ("accelerate notebook_launcher", "fork; group made by PartialState(cpu=True); no results"),
    "torchrunx": ("torchrunx Launcher", "group up, results back"),
    "nbdistributed": ("nbdistributed %%distributed", "ranks and group stay; values come back as text"),
}
EVERYBODY = list(LABELS)
SLOW = 1.0
"""Seconds; a contender with slower calls is measured only `SLOW_REPEATS` times."""
SLOW_REPEATS = 3
LIMIT = 90.0
"""Longest time of an answer, in seconds."""
GONE_LIMIT = 10.0
PAUSE = 0.03
"""Seconds between two measurements, for the work that the last one has left."""


class Measurements:
    """Samples by (table, contender, quantity), and the reasons for missing samples."""

    def __init__(self, repeats: int, only: list[str] | None) -> None:
        self.repeats = repeats
        self.samples: dict[tuple[Any, ...], list[float]] = {}
        self.reasons: dict[tuple[Any, ...], str] = {}
        self.texts: dict[tuple[Any, ...], str] = {}
        self._only = only

    def chosen(self, names: list[str]) -> list[str]:
        return [name for name in names if self._only is None or name in self._only]

    def add(self, value: float, *key: Any) -> None:
        self.samples.setdefault(key, []).append(value)

    def cell(self, *key: Any, form: Callable[[list[float]], str] = milliseconds) -> str:
        if key in self.reasons:
            return f"failed: {self.reasons[key][:160]}"
        return form(self.samples[key]) if key in self.samples else "-"

    def median(self, *key: Any) -> float | None:
        return median(self.samples[key]) if key in self.samples else None

    @contextlib.contextmanager
    def guarded(self, *key: Any) -> Iterator[None]:
        """Keep the reason of a failure, for the row of the table."""
        try:
            yield
        except FailedError as error:
            self.reasons[key] = str(error)
            say(f"  {key}: {error}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
