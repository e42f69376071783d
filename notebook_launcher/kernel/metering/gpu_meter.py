"""Memory and utilization of the GPUs of a run's ranks."""

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
"""Seconds for which a reading is used: NVML does not update a GPU's utilisation more often."""


@dataclasses.dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at one moment; None: unknown."""

    memory: int | None = None
    """Bytes that all processes together use."""
    utilization: float | None = None
    """0 to 1."""


class GpuMeter:
    """Reads the GPUs of one run when asked, at most once a second; from any thread.

    NVML stays open from the first reading to `close`, because opening it may take longer than all readings together.

    Args:
        gpus: NVML indices or UUIDs of the GPUs, in the order in which the ranks take them; empty: there is nothing to
            read.
    """

    def __init__(self, gpus: Sequence[int | str]) -> None:
        self._gpus = tuple(gpus)
        self._lock = threading.Lock()
        """Held during a reading."""
        self._library: nvml.Library | None = None
        """NVML, open from the first reading to `close`."""
        self._is_closed = not gpus
        """True if there is nothing more to read."""
        self._looked_at = float("-inf")
        """Time of the last reading, by `time.monotonic()`."""
        self._readings: dict[int | str, GpuReading] = {}
        """By NVML index or UUID: the last reading; after `close` the peak memory."""
        self._peaks: dict[int | str, int] = {}
        """By NVML index or UUID: the most memory that was read, in bytes."""

    def read(self, rank: int) -> GpuReading:
        """Return the latest reading of a rank's GPU; once the meter is closed, the peak memory."""
        if not self._gpus:
            return GpuReading()
        with self._lock:
            now = time.monotonic()
            if not self._is_closed and now - self._looked_at >= INTERVAL:
                self._looked_at = now
                self._look()
            return self._readings.get(self._gpus[rank % len(self._gpus)], GpuReading())

    def close(self) -> None:
        """Close NVML; idempotent."""
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
                self._readings[gpu] = self._read(self._library, gpu)
                self._peaks[gpu] = max(self._readings[gpu].memory or 0, self._peaks.get(gpu, 0))
        except OSError:
            self._is_closed = True  # NVML worked when the run was planned. A run must not fail without it.

    def _read(self, library: nvml.Library, gpu: int | str) -> GpuReading:
        try:
            memory = library.memory(gpu)
            return GpuReading(None if memory is None else memory[2], library.utilization(gpu))
        except nvml.Unusable:  # The driver has lost the GPU since.
            return GpuReading()
