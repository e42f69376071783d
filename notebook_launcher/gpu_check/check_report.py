"""`gpu-check-<date>.json`: the outcomes with the facts of the machine, to attach to a report of a problem.

Names that identify a person or a place are replaced by hashes: UUIDs, the host's name, paths.
"""

from __future__ import annotations

import contextlib
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.installed import version_of
from notebook_launcher.machine import devices, nvml

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.gpu_check.check_run import Outcome

__all__ = ["collect_facts", "hide_names", "write_report"]

VARIABLES = ("CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "HIP_", "ROCR_", "HSA_", "NVIDIA_", "OMP_NUM_THREADS", "GLOO_")
UUID = re.compile(r"\b(GPU|MIG)-[0-9a-fA-F-]{8,}")
PATH = re.compile(r"(?<![\w./])/(?:[\w.@+-]+/)+[\w.@+-]*")
KEPT_PATHS = ("/dev/shm", "/dev/nvidia")  # noqa: S108 - named, not used
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written to
PATIENCE = 20.0


def write_report(folder: Path, outcomes: Sequence[Outcome], facts: dict[str, Any]) -> Path:
    """Write the report into a folder, and return its file, which has the day in its name."""
    now = dt.datetime.now(dt.timezone.utc)
    file = folder / f"gpu-check-{now:%Y-%m-%d}.json"
    report = {"written": now.isoformat(timespec="seconds"), "facts": facts, "checks": list(map(_row, outcomes))}
    file.write_text(hide_names(json.dumps(report, indent=2)) + "\n", encoding="utf-8")
    return file


def _row(outcome: Outcome) -> dict[str, Any]:
    return {**dataclasses.asdict(outcome), "seconds": round(outcome.seconds, 1)}


def hide_names(text: str) -> str:
    """Return the text with hashes in place of UUIDs, paths and the host's name; equal names have equal hashes."""
    text = UUID.sub(lambda found: f"{found[1]}-{_hash(found[0])}", text)
    text = PATH.sub(lambda found: found[0] if found[0].startswith(KEPT_PATHS) else f"/{_hash(found[0])}", text)
    host = socket.gethostname()
    return text.replace(host, _hash(host)) if len(host) > 3 else text


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def collect_facts() -> dict[str, Any]:
    """Return what a reader of a report has to know of the machine."""
    began = time.monotonic()
    machine = devices.detect()
    look_seconds = time.monotonic() - began  # Without persistence mode the driver wakes up every GPU first.
    shm = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    return {
        "notebook_launcher": version_of("notebook-launcher"),
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
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
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
        "devices": torch.cuda.device_count(),
    }


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
