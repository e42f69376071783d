"""NVML, NVIDIA's management library: the GPUs, their memory and utilisation, without initialising CUDA.

The functions are described in the NVML API reference, https://docs.nvidia.com/deploy/nvml-api/.
"""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["Library", "Unusable", "find_slices"]

SUCCESS = 0
NO_PERMISSION, LOST = 4, 15
"""NVML_ERROR_NO_PERMISSION, as in a container without the device; NVML_ERROR_GPU_IS_LOST, until the next boot."""
REASONS = {NO_PERMISSION: "no permission", LOST: "lost by the driver"}
TEXT_SIZE = 96
"""NVML_DEVICE_NAME_V2_BUFFER_SIZE and NVML_DEVICE_UUID_V2_BUFFER_SIZE."""


class Unusable(OSError):  # noqa: N818 - a state of a GPU, which callers expect
    """A GPU that NVML counts, but that this process may not use. The message has the reason."""


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


def find_slices() -> list[str]:
    """Return the UUIDs of all slices of this machine's partitioned GPUs; none without NVML."""
    try:
        library = Library()
    except OSError:
        return []
    try:
        return [name for index in range(library.count()) for name in library.slices(index)]
    finally:
        library.close()


class Library:
    """The library, opened; `close` it. Several may be open at once.

    A GPU is named by its index or by its UUID, a slice of a partitioned GPU (MIG) by its UUID.

    Raises:
        OSError: It is missing, or does not work.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        if self._call("nvmlInit_v2") != SUCCESS:
            raise OSError("NVML cannot be initialised: is the driver loaded, and as new as the library?")

    def close(self) -> None:
        """Shut NVML down."""
        self._call("nvmlShutdown")

    def count(self) -> int:
        """Return the number of GPUs, visible to CUDA or not, usable or not."""
        count = ctypes.c_uint()
        return count.value if self._call("nvmlDeviceGetCount_v2", ctypes.byref(count)) == SUCCESS else 0

    def driver(self) -> str:
        """Return the version of the driver, such as `535.183.01`; empty: unknown."""
        text = ctypes.create_string_buffer(TEXT_SIZE)
        known = self._call("nvmlSystemGetDriverVersion", text, TEXT_SIZE) == SUCCESS
        return text.value.decode(errors="replace") if known else ""

    def name(self, gpu: int | str) -> str:
        """Return the GPU's name."""
        return self._text("nvmlDeviceGetName", gpu)

    def uuid(self, gpu: int | str) -> str:
        """Return the GPU's UUID, which `CUDA_VISIBLE_DEVICES` may name."""
        return self._text("nvmlDeviceGetUUID", gpu)

    def capability(self, gpu: int | str) -> tuple[int, int] | None:
        """Return the CUDA compute capability, such as (9, 0); None: unknown."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        where = ctypes.byref(major), ctypes.byref(minor)
        known = self._call("nvmlDeviceGetCudaComputeCapability", self._handle(gpu), *where) == SUCCESS
        return (major.value, minor.value) if known else None

    def memory(self, gpu: int | str) -> tuple[int, int, int] | None:
        """Return the GPU's total, free and used memory in bytes, over all processes; None: unknown."""
        memory = _Memory()
        known = self._call("nvmlDeviceGetMemoryInfo", self._handle(gpu), ctypes.byref(memory)) == SUCCESS
        return (memory.total, memory.free, memory.used) if known else None

    def utilization(self, gpu: int | str) -> float | None:
        """Return the share of the last 1/6 s to 1 s in which a CUDA kernel ran on the GPU, 0 to 1; None: unknown."""
        rates = _Utilization()
        known = self._call("nvmlDeviceGetUtilizationRates", self._handle(gpu), ctypes.byref(rates)) == SUCCESS
        return rates.gpu / 100 if known else None

    def processes(self, gpu: int | str) -> list[int]:
        """Return the ids of processes that compute on the GPU; processes of another container may have no id here."""
        count, found = ctypes.c_uint(MAX_PROCESSES), (_Process * MAX_PROCESSES)()
        known = self._call("nvmlDeviceGetComputeRunningProcesses_v3", self._handle(gpu), ctypes.byref(count), found)
        return [process.pid for process in found[: count.value]] if known == 0 else []

    def distance(self, gpu: int | str, other: int | str) -> str:
        """Return the way between two GPUs in words."""
        level = ctypes.c_uint()
        where = self._handle(gpu), self._handle(other), ctypes.byref(level)
        known = self._call("nvmlDeviceGetTopologyCommonAncestor", *where) == 0
        return DISTANCES.get(level.value, "unknown") if known else "unknown way"

    def peer_access(self, gpu: int | str, other: int | str) -> bool | None:
        """Return True if a GPU can read another's memory directly; None: unknown."""
        status = ctypes.c_uint()
        pair = self._handle(gpu), self._handle(other)
        known = self._call("nvmlDeviceGetP2PStatus", *pair, NVML_P2P_CAPS_INDEX_READ, ctypes.byref(status)) == 0
        return status.value == 0 if known else None

    def stays_loaded(self, gpu: int | str) -> bool | None:
        """Return True if the driver keeps the GPU ready while it is unused (persistence mode); None: unknown."""
        mode = ctypes.c_uint()
        try:
            known = self._call("nvmlDeviceGetPersistenceMode", self._handle(gpu), ctypes.byref(mode)) == SUCCESS
        except OSError:  # This NVML has no such function.
            return None
        return bool(mode.value) if known else None

    def slices(self, gpu: int | str) -> list[str]:
        """Return the UUIDs of the slices that a GPU is partitioned into (MIG); none for a whole GPU."""
        number = ctypes.c_uint()
        try:
            if self._call("nvmlDeviceGetMaxMigDeviceCount", self._handle(gpu), ctypes.byref(number)) != SUCCESS:
                return []
            return [name for index in range(number.value) if (name := self._slice(gpu, index))]
        except OSError:  # This NVML has no such function, or the GPU cannot be used.
            return []

    def _slice(self, gpu: int | str, index: int) -> str:
        handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(TEXT_SIZE)
        if self._call("nvmlDeviceGetMigDeviceHandleByIndex", self._handle(gpu), index, ctypes.byref(handle)) != SUCCESS:
            return ""
        self._call("nvmlDeviceGetUUID", handle, text, TEXT_SIZE)
        return text.value.decode(errors="replace")

    def _handle(self, gpu: int | str) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        if isinstance(gpu, str):
            code = self._call("nvmlDeviceGetHandleByUUID", gpu.encode(), ctypes.byref(handle))
        else:
            code = self._call("nvmlDeviceGetHandleByIndex_v2", gpu, ctypes.byref(handle))
        if code != SUCCESS:
            raise Unusable(f"GPU {gpu}: {REASONS.get(code, f'NVML error {code}')}")
        return handle

    def _text(self, function: str, gpu: int | str) -> str:
        text = ctypes.create_string_buffer(TEXT_SIZE)
        self._call(function, self._handle(gpu), text, TEXT_SIZE)
        return text.value.decode(errors="replace")

    def _call(self, function: str, *args: Any) -> int:
        """Return the code of an NVML call, 0 for a success."""
        try:
            code: int = getattr(self._library, function)(*args)
        except AttributeError:
            raise OSError(f"this NVML has no {function}") from None
        return code
