"""How full and how busy the GPUs of a run's ranks are."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from typing import TYPE_CHECKING

from notebook_launcher.machine import nvml

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["GpuMeter", "GpuReading"]

INTERVAL = 1.0
"""Seconds for which a reading is good: NVML renews a GPU's utilisation no more often."""


@dataclasses.dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at one moment; None: unknown."""

    memory: int | None = None
    """Bytes that all processes together use."""
    utilization: float | None = None
    """0 to 1."""


class GpuMeter:
    """The GPUs of one run, looked at when somebody asks, at most once a second; from any thread.

    NVML stays open from the first look to `close`: opening it may take longer than all looks together.

    Args:
        gpus: Their NVML indices, in the order in which the ranks take them; none: there is nothing to read.
    """

    def __init__(self, gpus: Sequence[int]) -> None:
        self._gpus = tuple(gpus)
        self._lock = threading.Lock()
        self._library: nvml.Library | None = None
        self._is_closed = not gpus
        self._looked_at = float("-inf")
        self._readings: dict[int, GpuReading] = {}
        self._peaks: dict[int, int] = {}

    def read(self, rank: int) -> GpuReading:
        """Return what is known of a rank's GPU; once closed, the most memory that was seen."""
        if not self._gpus:
            return GpuReading()
        with self._lock:
            now = time.monotonic()
            if not self._is_closed and now - self._looked_at >= INTERVAL:
                self._looked_at = now
                self._look()
            return self._readings.get(self._gpus[rank % len(self._gpus)], GpuReading())

    def close(self) -> None:
        """Let go of NVML; idempotent."""
        with self._lock:
            self._is_closed = True
            library, self._library = self._library, None
            self._readings = {gpu: GpuReading(memory) for gpu, memory in self._peaks.items()}
        if library is not None:
            with contextlib.suppress(OSError):
                library.close()

    def _look(self) -> None:
        try:
            self._library = self._library or nvml.Library()
            for gpu in set(self._gpus):
                memory = self._library.memory(gpu)
                used = None if memory is None else memory[2]
                self._readings[gpu] = GpuReading(used, self._library.utilization(gpu))
                self._peaks[gpu] = max(used or 0, self._peaks.get(gpu, 0))
        except OSError:
            self._is_closed = True  # It was there when the run was planned; it is not worth failing for.
