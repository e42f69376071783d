"""This machine's cores and GPUs, found without touching CUDA.

A kernel in which CUDA was initialised can no longer be forked for GPU work. NVIDIA's GPUs are therefore counted with
NVML, its management library, which does not initialise CUDA, and AMD's in a process of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.wording import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


# --------------------------------------------------------------------------------------------------------------------
# NVML, NVIDIA's management library: the GPUs, their memory and utilisation, without initialising CUDA.
#
# The functions are described in the NVML API reference, https://docs.nvidia.com/deploy/nvml-api/.


SUCCESS = 0
NO_PERMISSION, LOST = 4, 15
"""NVML_ERROR_NO_PERMISSION, as in a container without the device; NVML_ERROR_GPU_IS_LOST, until the next boot."""
REASONS = {NO_PERMISSION: "no permission", LOST: "lost by the driver"}
TEXT_SIZE = 96
"""NVML_DEVICE_NAME_V2_BUFFER_SIZE and NVML_DEVICE_UUID_V2_BUFFER_SIZE."""


class Unusable(OSError):  # noqa: N818 - a state of a GPU, which callers expect
    """A GPU that NVML counts, but that this process may not use. The message has the reason."""


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
    with contextlib.suppress(OSError), contextlib.closing(Library()) as library:
        return [name for index in range(library.count()) for name in library.slices(index)]
    return []


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
        return self._text("nvmlSystemGetDriverVersion")

    def name(self, gpu: int | str) -> str:
        """Return the GPU's name."""
        return self._text("nvmlDeviceGetName", self._handle(gpu))

    def uuid(self, gpu: int | str) -> str:
        """Return the GPU's UUID, which `CUDA_VISIBLE_DEVICES` may name."""
        return self._text("nvmlDeviceGetUUID", self._handle(gpu))

    def capability(self, gpu: int | str) -> tuple[int, int] | None:
        """Return the CUDA compute capability, such as (9, 0); None: unknown."""
        found = self._ask("nvmlDeviceGetCudaComputeCapability", (gpu,), ctypes.c_int(), ctypes.c_int())
        return (found[0].value, found[1].value) if found else None

    def memory(self, gpu: int | str) -> tuple[int, int, int] | None:
        """Return the GPU's total, free and used memory in bytes, over all processes; None: unknown."""
        found = self._ask("nvmlDeviceGetMemoryInfo", (gpu,), (ctypes.c_ulonglong * 3)())
        return tuple(found[0]) if found else None

    def utilization(self, gpu: int | str) -> float | None:
        """Return the share of the last 1/6 s to 1 s in which a CUDA kernel ran on the GPU, 0 to 1; None: unknown."""
        found = self._ask("nvmlDeviceGetUtilizationRates", (gpu,), (ctypes.c_uint * 2)())  # The other is the memory's.
        return found[0][0] / 100 if found else None

    def processes(self, gpu: int | str) -> list[int]:
        """Return the ids of processes that compute on the GPU; processes of another container may have no id here."""
        count, found = ctypes.c_uint(MAX_PROCESSES), (_Process * MAX_PROCESSES)()
        known = self._call("nvmlDeviceGetComputeRunningProcesses_v3", self._handle(gpu), ctypes.byref(count), found)
        return [process.pid for process in found[: count.value]] if known == 0 else []

    def distance(self, gpu: int | str, other: int | str) -> str:
        """Return the way between two GPUs in words."""
        found = self._ask("nvmlDeviceGetTopologyCommonAncestor", (gpu, other), ctypes.c_uint())
        return DISTANCES.get(found[0].value, "unknown") if found else "unknown way"

    def peer_access(self, gpu: int | str, other: int | str) -> bool | None:
        """Return True if a GPU can read another's memory directly; None: unknown."""
        status, pair = ctypes.c_uint(), (self._handle(gpu), self._handle(other))
        known = self._call("nvmlDeviceGetP2PStatus", *pair, NVML_P2P_CAPS_INDEX_READ, ctypes.byref(status)) == SUCCESS
        return status.value == 0 if known else None

    def stays_loaded(self, gpu: int | str) -> bool | None:
        """Return True if the driver keeps the GPU ready while it is unused (persistence mode); None: unknown."""
        with contextlib.suppress(OSError):  # This NVML has no such function.
            if found := self._ask("nvmlDeviceGetPersistenceMode", (gpu,), ctypes.c_uint()):
                return bool(found[0].value)
        return None

    def slices(self, gpu: int | str) -> list[str]:
        """Return the UUIDs of the slices that a GPU is partitioned into (MIG); none for a whole GPU."""
        with contextlib.suppress(OSError):  # This NVML has no such function, or the GPU cannot be used.
            if found := self._ask("nvmlDeviceGetMaxMigDeviceCount", (gpu,), ctypes.c_uint()):
                return [name for index in range(found[0].value) if (name := self._slice(gpu, index))]
        return []

    def _slice(self, gpu: int | str, index: int) -> str:
        handle = ctypes.c_void_p()
        if self._call("nvmlDeviceGetMigDeviceHandleByIndex", self._handle(gpu), index, ctypes.byref(handle)) != SUCCESS:
            return ""
        return self._text("nvmlDeviceGetUUID", handle)

    def _handle(self, gpu: int | str) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        if isinstance(gpu, str):
            code = self._call("nvmlDeviceGetHandleByUUID", gpu.encode(), ctypes.byref(handle))
        else:
            code = self._call("nvmlDeviceGetHandleByIndex_v2", gpu, ctypes.byref(handle))
        if code != SUCCESS:
            raise Unusable(f"GPU {gpu}: {REASONS.get(code, f'NVML error {code}')}")
        return handle

    def _ask(self, function: str, gpus: tuple[int | str, ...], *places: Any) -> tuple[Any, ...]:
        """Return these places, into which a function writes what it knows of the GPUs; nothing if it knows nothing."""
        where = map(ctypes.byref, places)
        return places if self._call(function, *map(self._handle, gpus), *where) == SUCCESS else ()

    def _text(self, function: str, *handle: ctypes.c_void_p) -> str:
        text = ctypes.create_string_buffer(TEXT_SIZE)
        self._call(function, *handle, text, TEXT_SIZE)
        return text.value.decode(errors="replace")

    def _call(self, function: str, *args: Any) -> int:
        """Return the code of an NVML call, 0 for a success."""
        try:
            code: int = getattr(self._library, function)(*args)
        except AttributeError:
            raise OSError(f"this NVML has no {function}") from None
        return code


# --------------------------------------------------------------------------------------------------------------------
# The GPUs that `CUDA_VISIBLE_DEVICES` leaves visible, by the rules of CUDA and of torch.
#
# The list ends at the first entry that names no GPU or is of another kind than the first, and a GPU that is named
# twice hides all of them (`torch.cuda._parse_visible_devices`). An entry is an index, a UUID or the beginning of one,
# or a slice of a partitioned GPU (MIG) by its UUID.


CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"
SLICE_PREFIX = "MIG-"


@dataclasses.dataclass(frozen=True, slots=True)
class GPU:
    """One GPU, or one slice of a partitioned GPU (MIG)."""

    index: int
    """Number by which NVML knows it; of a slice, its place in `CUDA_VISIBLE_DEVICES`."""
    name: str
    total_memory: int
    """Bytes."""
    free_memory: int
    """Bytes."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability, such as (9, 0); None: unknown."""
    uuid: str = ""
    """Empty: unknown."""
    selector: str = ""
    """Name under which ranks get it in `CUDA_VISIBLE_DEVICES`: as the user wrote it there, else the UUID. CUDA may
    count other than NVML does (the fastest card first), so an index of NVML's would be another card to it."""

    @property
    def is_slice(self) -> bool:
        """True for a slice of a partitioned GPU."""
        return self.selector.startswith(SLICE_PREFIX)

    @property
    def key(self) -> int | str:
        """Index or UUID, by which `nvml.Library` finds it."""
        return self.selector if self.is_slice else self.index


def choose_visible(
    gpus: Sequence[GPU], variable: str | None, find_slice: Callable[[str, int], GPU | None]
) -> tuple[tuple[GPU, ...], str]:
    """Return the visible ones of a machine's GPUs, and why the variable hides all of them, unless it does on purpose.

    `find_slice` looks up a slice by its name, for a place in the list, and returns None if there is no such slice.
    """
    if variable is None:
        return tuple(dataclasses.replace(gpu, selector=gpu.uuid or str(gpu.index)) for gpu in gpus), ""
    chosen: list[GPU] = []
    items = [item.strip() for item in variable.split(",")]
    for item in items:
        if _kind(item) != _kind(items[0]):
            break
        gpu = find_slice(item, len(chosen)) if item.startswith(SLICE_PREFIX) else _find(gpus, item)
        if gpu is None:
            break
        if any(gpu.key == other.key for other in chosen):
            return (), f"{CUDA_VARIABLE}={variable!r} names a GPU twice, which hides all of them"
        chosen.append(gpu)
    if not chosen and gpus and variable.strip() not in ("", "-1"):
        return (), f"{CUDA_VARIABLE}={variable!r} begins with an entry that names no GPU"
    return tuple(chosen), ""


def _kind(item: str) -> str:
    return "index" if item.isdecimal() else item[: len(SLICE_PREFIX)]


def _find(gpus: Sequence[GPU], item: str) -> GPU | None:
    if item.isdecimal():
        found = [gpu for gpu in gpus if gpu.index == int(item)]
    else:
        found = [gpu for gpu in gpus if item and gpu.uuid.startswith(item)]
    return dataclasses.replace(found[0], selector=item) if len(found) == 1 else None


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """The hardware that ranks can use."""

    num_cores: int
    """CPU cores, within the limits of the process and its control group."""
    gpus: tuple[GPU, ...]
    """The GPUs that `CUDA_VISIBLE_DEVICES` leaves visible, in its order."""
    why_no_gpu: str
    """The reason why no GPU can be used, as a clause for the user; empty if GPUs can be used."""
    left_out: tuple[str, ...] = ()
    """GPUs that the driver counts and does not let this process use, each with the reason."""
    driver: str = ""
    """Version of NVIDIA's driver; empty: unknown."""
    variable: str = CUDA_VARIABLE
    """The environment variable that chooses the GPUs of a process."""


def detect() -> Machine:
    """Return the hardware of this machine."""
    gpus: tuple[GPU, ...] = ()
    why = driver = ""
    left_out: list[str] = []
    with contextlib.suppress(OSError), contextlib.closing(Library()) as library:
        usable: list[GPU] = []
        for index in range(library.count()):
            try:
                usable.append(_gpu(library, index, index))
            except Unusable as reason:  # noqa: PERF203 - for each GPU by itself
                left_out.append(str(reason))
        gpus, why = choose_visible(usable, os.environ.get(CUDA_VARIABLE), functools.partial(_find_slice, library))
        driver = library.driver()
    # A look at torch's files takes a quarter of all that a launch does before it asks for processes.
    platform, _ = torch_build() if gpus or has_driver() else ("", "")
    if platform == "hip":
        gpus, why, driver, left_out = detect_with_torch(), "", "", []
    if not gpus:
        why = why or "no GPU found" + "".join(f" ({reason})" for reason in left_out[:1])
        if "TPU_NAME" in os.environ or os.environ.get("PJRT_DEVICE") == "TPU":
            why += " (a TPU is asked for by TPU_NAME or PJRT_DEVICE, and TPUs are not supported)"
    elif not platform:
        why = f"{plural(len(gpus), 'GPU')} found, but this torch is built without CUDA"
    return Machine(
        num_cores=max(1, math.ceil(min(len(os.sched_getaffinity(0)), _cgroup_quota()))),
        gpus=gpus,
        why_no_gpu=why,
        left_out=tuple(left_out),
        driver=driver,
        variable=ROCM_VARIABLE if platform == "hip" else CUDA_VARIABLE,
    )


def _cgroup_quota() -> float:
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        folder = Path("/sys/fs/cgroup/cpu")
        quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
        period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
        if int(quota) > 0:
            return int(quota) / int(period)
    return math.inf


def torch_build() -> tuple[str, str]:
    """Return `cuda` or `hip`, for which torch is built, and the version of it; empty for neither."""
    # Read from torch's file, because the kernel may not have imported torch and need not.
    with contextlib.suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
            found = re.search(r"^(cuda|hip)\b[^=\n]*= *'([^']*)", text, re.MULTILINE)
            return ("", "") if found is None else (found[1], found[2])
    return "", ""


def _gpu(library: Library, key: int | str, index: int) -> GPU:
    total, free, _ = library.memory(key) or (0, 0, 0)
    return GPU(
        index=index,
        name=library.name(key),
        total_memory=total,
        free_memory=free,
        capability=library.capability(key),
        uuid=library.uuid(key),
        selector=key if isinstance(key, str) else "",
    )


def _find_slice(library: Library, name: str, place: int) -> GPU | None:
    try:
        return _gpu(library, name, place)
    except Unusable:
        return None


# --------------------------------------------------------------------------------------------------------------------
# AMD GPUs, as a throw-away process with torch counts them; NVML knows of NVIDIA's only.


ROCM_VARIABLE = "HIP_VISIBLE_DEVICES"
DRIVER = Path("/dev/kfd")
PATIENCE = 60.0
"""Seconds. The import of torch takes two, and from a cold disk many more."""
PROGRAM = """
import json, torch
found = []
for at in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(at)
    found.append([torch.cuda.get_device_name(at), total, free])
print(json.dumps(found))
"""


def has_driver() -> bool:
    """Return True if this machine has a ROCm driver."""
    return DRIVER.exists()


def detect_with_torch() -> tuple[GPU, ...]:
    """Return the GPUs that torch sees in a process of its own; none if there is no ROCm driver.

    The kernel itself must not initialise HIP: it could not be forked for GPU work any more.
    """
    if not has_driver():
        return ()
    try:
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return ()
    named = _names(len(found))
    return tuple(
        GPU(index=at, name=name, total_memory=total, free_memory=free, selector=named[at])
        for at, (name, total, free) in enumerate(found)
    )


def _names(count: int) -> list[str]:
    """Return the entry of `HIP_VISIBLE_DEVICES` for each visible GPU: as the user wrote it, else its number.

    HIP reads `CUDA_VISIBLE_DEVICES` where its own variable is not set.
    """
    variable = os.environ.get(ROCM_VARIABLE, os.environ.get("CUDA_VISIBLE_DEVICES"))
    items = [] if variable is None else [item.strip() for item in variable.split(",")]
    return items if len(items) >= count else [str(at) for at in range(count)]
