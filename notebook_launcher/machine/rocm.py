"""AMD GPUs, as a throw-away process with torch counts them; NVML knows of NVIDIA's only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from notebook_launcher.machine.visible_gpus import GPU

__all__ = ["ROCM_VARIABLE", "detect_with_torch", "has_driver"]

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
