"""This process, which would be forked by `start_method="fork"`: torch, CUDA, and variables that change a launch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from notebook_launcher.diagnosis.finding import Finding
from notebook_launcher.kernel.calls.fork_check import try_fork
from notebook_launcher.kernel.launch import inherited_imports
from notebook_launcher.wording.counts import plural
from notebook_launcher.wording.secret_text import is_secret

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["cuda_findings", "find_opener", "look_at_process", "modules_in_order"]

AREA = "this process"
CUDA_FILE = "/dev/nvidia-uvm"
"""A process that has started CUDA has this file open; one that only asked NVML has not."""
VARIABLES = re.compile(
    r"(NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|ACCELERATE)_\w+|CUDA_\w+|MASTER_(ADDR|PORT)|(LOCAL_)?RANK|WORLD_SIZE"
)
PATIENCE = 120
FORKSERVER = 'omit start_method="fork": the default, "forkserver", does not depend on what this process did'
# Imports modules one after the other, until one has opened the file.
IMPORTS = """
import importlib, os, sys
path, *names = sys.argv[1:]
def is_open():
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}") == path: return True
        except OSError: pass
for name in names:
    try: importlib.import_module(name)
    except BaseException: pass
    if is_open():
        sys.__stdout__.write("\\nopener: " + name); sys.__stdout__.flush()
        os._exit(0)
"""


def look_at_process() -> list[Finding]:
    """Return what a fork of this process can do, what started CUDA, and variables that change a launch."""
    names = sorted(name for name in os.environ if VARIABLES.fullmatch(name) and not is_secret(name))
    values = ", ".join(f"{name}={os.environ[name]}" for name in names)
    return [
        *_fork(),
        *cuda_findings(),
        *_imports(),
        Finding(area=AREA, name="variables", fact=values or "none that changes a launch"),
    ]


def _fork() -> list[Finding]:
    name = "fork"
    if "torch" not in sys.modules:
        return [Finding(area=AREA, name=name, fact="torch is not imported here; nothing prevents a fork")]
    health = try_fork()
    if health.cuda and health.parallel:
        return [Finding(area=AREA, name=name, fact="tried: a fork can run parallel operations", verdict="good")]
    lost = [*([] if health.parallel else ["parallel operations"]), *([] if health.cuda else ["CUDA"])]
    fact = f"tried: a fork of this process cannot run {' or '.join(lost)}, because this process has used them"
    return [Finding(area=AREA, name=name, fact=fact, verdict="warning", advice=FORKSERVER)]


def _imports() -> list[Finding]:
    """Return what ranks inherit of this process's imports."""
    image = inherited_imports()
    if not image.num_modules and not image.left_out:
        return [
            Finding(area=AREA, name="imports", fact="nothing was launched yet that ranks could inherit imports from")
        ]
    inherited = Finding(area=AREA, name="imports", fact=f"ranks inherit {plural(image.num_modules, 'imported module')}")
    return [
        inherited,
        *(
            Finding(area=AREA, name="imports", fact=f"each rank imports {name} at each launch: {reason}")
            for name, reason in image.left_out.items()
        ),
    ]


def cuda_findings() -> list[Finding]:
    """Return the findings about CUDA in this process: its state, and what starts it."""
    if CUDA_FILE not in _open_files():
        return [Finding(area=AREA, name="CUDA", fact="not started in this process")]
    opener = find_opener(CUDA_FILE, modules_in_order())
    by = f"the import of {opener} starts it" if opener else "no import starts it, so a cell or script did"
    advice = f"{FORKSERVER}; or import {opener} inside the function" if opener else FORKSERVER
    return [Finding(area=AREA, name="CUDA", fact=f"started in this process: {by}", verdict="warning", advice=advice)]


def _open_files() -> set[str]:
    # The descriptor that lists the folder is closed by now, so its entry leads nowhere: `realpath` does not raise.
    return {os.path.realpath(entry) for entry in list(Path("/proc/self/fd").iterdir())}


def modules_in_order() -> list[str]:
    """Return the top-level modules that this process imported, in order, without Python's own."""
    own = {*sys.stdlib_module_names, "__main__", "notebook_launcher"}
    return list(dict.fromkeys(top for name in list(sys.modules) if (top := name.partition(".")[0]) not in own))


def find_opener(path: str, modules: Sequence[str]) -> str:
    """Import modules in a fresh process, in order; return the first after which it has a file open, else nothing."""
    command = [sys.executable, "-c", IMPORTS, path, *modules]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.rpartition("opener: ")[2] if "opener: " in done.stdout else ""
