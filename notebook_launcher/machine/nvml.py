"""NVML, NVIDIA's management library: the GPUs, their memory and utilisation, without initialising CUDA.

The functions are those of the NVML API reference, https://docs.nvidia.com/deploy/nvml-api/.
"""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["Library"]


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


DISTANCES = {
    0: "on one board",
    10: "one PCIe switch apart",
    20: "several PCIe switches apart",
    30: "one host bridge apart",
    40: "on one NUMA node",
    50: "on different NUMA nodes",
}
"""Levels of `nvmlDeviceGetTopologyCommonAncestor`."""
MAX_PROCESSES = 64
NVML_P2P_CAPS_INDEX_READ = 0


class Library:
    """The library, opened; `close` it. Several may be open at once.

    Raises:
        OSError: It is missing, or does not work.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        if self._call("nvmlInit_v2") != 0:
            msg = "NVML cannot be initialised: is the driver loaded, and as new as the library?"
            raise OSError(msg)

    def close(self) -> None:
        """Shut NVML down."""
        self._call("nvmlShutdown")

    def count(self) -> int:
        """Return the number of GPUs, visible to CUDA or not."""
        count = ctypes.c_uint()
        return count.value if self._call("nvmlDeviceGetCount_v2", ctypes.byref(count)) == 0 else 0

    def name(self, index: int) -> str:
        """Return the GPU's name."""
        return self._text("nvmlDeviceGetName", index)

    def uuid(self, index: int) -> str:
        """Return the GPU's UUID, which `CUDA_VISIBLE_DEVICES` may name."""
        return self._text("nvmlDeviceGetUUID", index)

    def capability(self, index: int) -> tuple[int, int] | None:
        """Return the CUDA compute capability, such as (9, 0); None: unknown."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        where = ctypes.byref(major), ctypes.byref(minor)
        known = self._call("nvmlDeviceGetCudaComputeCapability", self._handle(index), *where) == 0
        return (major.value, minor.value) if known else None

    def memory(self, index: int) -> tuple[int, int, int] | None:
        """Return the GPU's total, free and used memory in bytes, over all processes; None: unknown."""
        memory = _Memory()
        known = self._call("nvmlDeviceGetMemoryInfo", self._handle(index), ctypes.byref(memory)) == 0
        return (memory.total, memory.free, memory.used) if known else None

    def utilization(self, index: int) -> float | None:
        """Return the share of the last 1/6 s to 1 s in which a CUDA kernel ran on the GPU, 0 to 1; None: unknown."""
        rates = _Utilization()
        known = self._call("nvmlDeviceGetUtilizationRates", self._handle(index), ctypes.byref(rates)) == 0
        return rates.gpu / 100 if known else None

    def driver(self) -> str:
        """Return the version of the driver; empty if unknown."""
        text = ctypes.create_string_buffer(96)
        return text.value.decode(errors="replace") if self._call("nvmlSystemGetDriverVersion", text, 96) == 0 else ""

    def processes(self, index: int) -> list[int]:
        """Return the ids of processes that compute on the GPU; those of another container may have no id here."""
        count, found = ctypes.c_uint(MAX_PROCESSES), (_Process * MAX_PROCESSES)()
        known = self._call("nvmlDeviceGetComputeRunningProcesses_v3", self._handle(index), ctypes.byref(count), found)
        return [process.pid for process in found[: count.value]] if known == 0 else []

    def distance(self, index: int, other: int) -> str:
        """Return the way between two GPUs in words."""
        level = ctypes.c_uint()
        where = self._handle(index), self._handle(other), ctypes.byref(level)
        known = self._call("nvmlDeviceGetTopologyCommonAncestor", *where) == 0
        return DISTANCES.get(level.value, "unknown") if known else "unknown way"

    def peer_access(self, index: int, other: int) -> bool | None:
        """Return True if a GPU can read another's memory directly; None: unknown."""
        status = ctypes.c_uint()
        pair = self._handle(index), self._handle(other)
        known = self._call("nvmlDeviceGetP2PStatus", *pair, NVML_P2P_CAPS_INDEX_READ, ctypes.byref(status)) == 0
        return status.value == 0 if known else None

    def _handle(self, index: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
        return handle

    def _text(self, function: str, index: int) -> str:
        text = ctypes.create_string_buffer(96)  # NVML_DEVICE_NAME_V2_BUFFER_SIZE
        self._call(function, self._handle(index), text, 96)
        return text.value.decode(errors="replace")

    def _call(self, function: str, *args: Any) -> int:
        """Return the code of an NVML call, 0 for a success."""
        try:
            code: int = getattr(self._library, function)(*args)
        except AttributeError:
            msg = f"this NVML has no {function}"
            raise OSError(msg) from None
        return code
