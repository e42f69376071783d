"""`gpu-check-<date>.json`: the outcomes with the facts of the machine, to attach to a report of a problem.

Names that identify a person or a place are replaced by hashes: UUIDs, the host's name, paths.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime as dt
import hashlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher import __version__
from notebook_launcher.installed import version_of
from notebook_launcher.machine import devices, nvml
from notebook_launcher.machine.shared_memory import SHARED_MEMORY

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from notebook_launcher.gpu_check.check_run import Outcome

__all__ = ["collect_facts", "hide_names", "report_file", "write_report"]

UNSAID = "NVIDIA_REQUIRE_CUDA"
"""A variable of NVIDIA's container images: pages of drivers that the image accepts."""
VARIABLES = ("CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "HIP_", "ROCR_", "HSA_", "NVIDIA_", "OMP_NUM_THREADS", "GLOO_")
UUID = re.compile(r"\b(GPU|MIG)-[0-9a-fA-F-]{8,}")
PATH = re.compile(r"(?<![\w./])(?<!http:)(?<!https:)/+(?:[\w.@+~-]+/)+[\w.@+~-]*")
"""A path of two parts at least, without spaces; web addresses are left."""
QUOTED_PATH = re.compile(r"(?<=[\"'])/[^\"'\n]+/[^\"'\n]*(?=[\"'])")
"""The same in quotation marks, where it may have spaces."""
KEPT_PATHS = (str(SHARED_MEMORY), "/dev/nvidia")
PATIENCE = 20.0


def report_file(folder: Path) -> Path:
    """Return the file of a report that begins now, which has the day in its name."""
    return folder / f"gpu-check-{dt.datetime.now(dt.timezone.utc):%Y-%m-%d}.json"


def write_report(file: Path, outcomes: Sequence[Outcome], facts: dict[str, Any]) -> None:
    """Write the outcomes so far into the file of the report, in place of its contents."""
    now = dt.datetime.now(dt.timezone.utc)
    report = {"written": now.isoformat(timespec="seconds"), "facts": facts, "checks": list(map(_row, outcomes))}
    # Before JSON escapes what is not ASCII, and quotation marks.
    file.write_text(json.dumps(_hidden(report), indent=2) + "\n", encoding="utf-8")


def _row(outcome: Outcome) -> dict[str, Any]:
    return {**dataclasses.asdict(outcome), "seconds": round(outcome.seconds, 1)}


def _hidden(value: Any) -> Any:
    if isinstance(value, str):
        return hide_names(value)
    if isinstance(value, dict):
        return {name: _hidden(entry) for name, entry in value.items()}
    return list(map(_hidden, value)) if isinstance(value, list | tuple) else value


def hide_names(text: str) -> str:
    """Return the text with hashes in place of UUIDs, paths and the host's name; equal names have equal hashes."""
    text = UUID.sub(lambda found: f"{found[1]}-{_hash(found[0])}", text)
    for kind in (QUOTED_PATH, PATH):
        text = kind.sub(lambda found: _hide_path(found[0]), text)
    for host in sorted(_host_names(), key=len, reverse=True):
        text = text.replace(host, _hash(host))
    return text


def _hide_path(path: str) -> str:
    return path if path.startswith(KEPT_PATHS) else f"/{_hash(path)}"


def _hide_setting(value: str) -> str:
    """Return the value of a variable, which may be one path or several with colons in between, spaces included."""
    return ":".join(_hide_path(part) if part.count("/") > 1 and part[0] == "/" else part for part in value.split(":"))


def _host_names() -> set[str]:
    """Return this host's name, with and without its domain, if it is too long to be part of any word by chance."""
    name = socket.gethostname()
    return {form for form in (name, name.partition(".")[0]) if len(form) > 3}


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def collect_facts() -> dict[str, Any]:
    """Return what a reader of a report has to know of the machine."""
    began = time.monotonic()
    machine = devices.detect()
    look_seconds = time.monotonic() - began  # Without persistence mode the driver wakes up every GPU first.
    shm = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    return {
        "notebook_launcher": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": machine.num_cores,
        "driver": machine.driver,
        "look_seconds": round(look_seconds, 3),
        "gpus": [
            {"name": gpu.name, "memory": gpu.total_memory, "capability": gpu.capability, "slice": gpu.is_slice}
            for gpu in machine.gpus
        ],
        "slices": len(nvml.find_slices()),
        "why_no_gpu": machine.why_no_gpu,
        "left_out": machine.left_out,
        "torch": _torch_facts(),
        "shm_bytes": None if shm is None else {"total": shm.total, "free": shm.free},
        "shm_nccl_files": _nccl_files(),
        "topology": _printed("nvidia-smi", "topo", "-m"),
        "variables": {
            name: _hide_setting(value)
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLES) and name != UNSAID
        },
        "accelerate": version_of("accelerate"),
        "lightning-fabric": version_of("lightning-fabric"),
    }


def _torch_facts() -> dict[str, Any]:
    import torch

    nccl = None
    with contextlib.suppress(Exception):  # Only builds with NCCL have it.
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": nccl,
        "nccl_loaded": _loaded_nccl(),
        "devices": torch.cuda.device_count(),
    }


def _loaded_nccl() -> int | None:
    """Return the version of the NCCL that this process has loaded, such as 23102; torch tells its build's."""
    number = ctypes.c_int()
    try:
        # Torch has loaded it already, and the loader knows it by this name. RTLD_NOLOAD: not another one.
        status = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return number.value if status == 0 else None


def _nccl_files() -> int:
    with contextlib.suppress(OSError):
        return len(list(SHARED_MEMORY.glob("nccl-*")))
    return 0


def _printed(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout
    return "failed"
