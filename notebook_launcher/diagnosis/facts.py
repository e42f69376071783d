"""Limits of this process: cores, memory, shared memory, open files, processes."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import notebook_launcher
from notebook_launcher.diagnosis.finding import Finding, warning
from notebook_launcher.installed import BROKEN_IPYKERNELS, version_of
from notebook_launcher.kernel.calls.checks import try_fork
from notebook_launcher.kernel.launch import inherited_imports
from notebook_launcher.machine import devices
from notebook_launcher.machine.memory import SHARED_MEMORY
from notebook_launcher.settings import accelerate_yaml
from notebook_launcher.tracebacks import PACKAGE_FOLDER
from notebook_launcher.travel.parcel import available_memory
from notebook_launcher.wording import format_bytes, format_seconds, is_secret, plural

LIMITS = "limits"
FILES_PER_RANK = 6
"""Descriptors that a kernel needs for each rank while it starts."""
FEW_RANKS = 16
"""A limit that leaves room for fewer ranks is worth a warning."""
SMALL_SHM = 1_000_000_000
"""Bytes of /dev/shm under which data-loader workers run out of room; Docker gives 64 MB by itself."""


def look_at_limits() -> list[Finding]:
    """Return what this process may take of the machine."""
    machine = devices.detect()
    cores = plural(machine.num_cores, "core")
    if (every := os.cpu_count() or 0) > machine.num_cores:
        cores += f" of {every}: the rest is taken away by affinity or by a control group"
    import psutil

    memory = f"{format_bytes(available_memory())} free of {format_bytes(psutil.virtual_memory().total)}"
    return [
        Finding(LIMITS, "cores", cores),
        Finding(LIMITS, "memory", memory),
        shared_memory(str(SHARED_MEMORY)),
        open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        _processes(),
        Finding(LIMITS, "locked memory (ulimit -l)", _amount(resource.RLIMIT_MEMLOCK)),
    ]


def shared_memory(folder: str) -> Finding:
    """Return the size of the file system through which data-loader workers send their batches."""
    name = f"{folder}, for data-loader workers"
    try:
        room = os.statvfs(folder)
    except OSError as error:
        advice = "mount it: mount -t tmpfs tmpfs /dev/shm; or DataLoader(..., num_workers=0)"
        return Finding(LIMITS, name, error.strerror or "missing", "problem", advice)
    free, size = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    fact = f"{format_bytes(free)} free of {format_bytes(size)}"
    advice = "docker run --shm-size=8g ..., or DataLoader(..., num_workers=0); `df -h /dev/shm` shows who fills it"
    return warning(LIMITS, name, fact, advice if free < SMALL_SHM else "")


def open_files(soft: int, hard: int) -> Finding:
    """Return the limit on open files as a number of ranks."""
    name = "open files (ulimit -n)"
    if soft == resource.RLIM_INFINITY:
        return Finding(LIMITS, name, "unlimited")
    taken = len(list(Path("/proc/self/fd").iterdir()))
    room = max(0, soft - taken) // FILES_PER_RANK
    fact = f"{soft:,}, {taken:,} in use: room for {plural(room, 'rank')}"
    if room >= FEW_RANKS:
        return Finding(LIMITS, name, fact)
    raised = "unlimited" if hard == resource.RLIM_INFINITY else hard
    advice = f"ulimit -n {raised} in the shell that starts Jupyter"
    return Finding(LIMITS, name, fact, "problem" if room < 2 else "warning", advice)


def _processes() -> Finding:
    name, fact = "processes (ulimit -u)", _amount(resource.RLIMIT_NPROC, size=False)
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/pids.max").read_text("ascii"))
        now = int(Path("/sys/fs/cgroup/pids.current").read_text("ascii"))
        fact += f"; the container has {now:,} of {limit:,}"
        if limit - now < FEW_RANKS:
            return warning(LIMITS, name, fact, f"docker run --pids-limit={2 * limit} ..., or stop other processes")
    return Finding(LIMITS, name, fact)


def _amount(kind: int, *, size: bool = True) -> str:
    soft, _ = resource.getrlimit(kind)
    if soft == resource.RLIM_INFINITY:
        return "unlimited"
    return format_bytes(soft) if size else f"{soft:,}"


# --------------------------------------------------------------------------------------------------------------------
# GPUs by NVML: driver, memory, the processes that use them, and access of one GPU to another's memory.


GPUS = "GPUs"
SLOW_LOOK = 0.5
"""Seconds that finding the GPUs may take; with loaded GPUs it takes some hundredths."""
MOSTLY_TAKEN = 0.5
"""Part of a GPU's memory; if others have taken more, a launch may run out of it."""


def look_at_gpus() -> list[Finding]:
    """Return what NVML knows of each visible GPU; one fact if there is none."""
    began = time.monotonic()
    machine = devices.detect()
    seconds = time.monotonic() - began
    if not machine.gpus:
        return [Finding(GPUS, "GPUs", machine.why_no_gpu)]
    findings = []
    if machine.why_no_gpu:
        advice = "install a torch that is built for CUDA: https://pytorch.org/get-started/locally"
        findings = [Finding(GPUS, "GPUs", machine.why_no_gpu, "problem", advice)]
    with contextlib.suppress(OSError), contextlib.closing(devices.Library()) as library:
        findings.append(Finding(GPUS, "driver", library.driver() or "unknown"))
        findings += _start(library, machine.gpus[0], seconds)
        findings += [_gpu(library, place, gpu) for place, gpu in enumerate(machine.gpus)]
        whole = [gpu for gpu in machine.gpus if not gpu.is_slice]  # Slices of a GPU have no access to each other.
        findings += [_pair(library, gpu.index, other.index) for gpu, other in itertools.combinations(whole, 2)]
    findings += [Finding(GPUS, "left out", reason, "warning") for reason in machine.left_out]
    return findings


def _start(library: devices.Library, gpu: devices.GPU, seconds: float) -> list[Finding]:
    """Return a warning if each launch has to wait for the driver to load the GPUs first."""
    if seconds < SLOW_LOOK or library.stays_loaded(gpu.key) is not False:
        return []
    fact = f"finding them took {format_seconds(seconds)}, as it will at each launch: persistence mode is off"
    advice = "sudo nvidia-smi -pm 1, or start nvidia-persistenced: the driver then keeps unused GPUs loaded"
    return [warning(GPUS, "start", fact, advice)]


def _gpu(library: devices.Library, place: int, gpu: devices.GPU) -> Finding:
    others = [pid for pid in library.processes(gpu.key) if pid != os.getpid()]
    users = ", ".join(f"{pid} ({_command(pid)})" for pid in others)
    fact = f"{gpu.name}, {format_bytes(gpu.free_memory)} free of {format_bytes(gpu.total_memory)}"
    name = f"GPU {place}"
    fact += f"; used by {users}" if others else ""
    is_taken = others and gpu.free_memory < MOSTLY_TAKEN * gpu.total_memory
    return warning(
        GPUS, name, fact, f"end process {others[0]}, or choose other GPUs with devices=[...]" if is_taken else ""
    )


def _pair(library: devices.Library, one: int, other: int) -> Finding:
    name, path = f"GPU {one} to {other}", library.distance(one, other)
    reachable = library.peer_access(one, other)
    if reachable is None:
        return Finding(GPUS, name, f"{path}; peer access unknown")
    if reachable or os.environ.get("NCCL_P2P_DISABLE") == "1":
        return Finding(GPUS, name, f"{path}; peer access {'works' if reachable else 'is switched off'}")
    fact = f"{path}; no peer access, so data goes through the host's memory"
    return warning(GPUS, name, fact, 'if a launch with NCCL hangs or fails: env={"NCCL_P2P_DISABLE": "1"}')


def _command(pid: int) -> str:
    import psutil

    try:
        return " ".join(psutil.Process(pid).cmdline())[:60] or "a process without a command"
    except psutil.Error:
        return "of another user or container"


# --------------------------------------------------------------------------------------------------------------------
# Names of this machine, looked up as libraries do while a process group starts.


NETWORK = "names"
SLOW = 0.5
"""Seconds of a look-up that are worth a warning: each rank waits for it."""
LOOKUP_PATIENCE = 20
LOOK_UP = "import socket, sys, time; t = time.monotonic()\n{call}\nprint(time.monotonic() - t)"
CALLS = {
    "name of 127.0.0.1": "try: socket.gethostbyaddr('127.0.0.1')\nexcept OSError: pass",
    "address of this host": "try: socket.getaddrinfo(socket.gethostname(), None)\nexcept OSError: pass",
}


def look_at_names() -> list[Finding]:
    """Return the seconds that the look-up of each name takes."""
    return [_name(name, call) for name, call in CALLS.items()]


def _name(name: str, call: str) -> Finding:
    # In a process of its own: a look-up cannot be interrupted, and may take a minute.
    command = [sys.executable, "-I", "-c", LOOK_UP.format(call=call)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LOOKUP_PATIENCE)
        seconds = float(done.stdout)
    except subprocess.TimeoutExpired:
        seconds = LOOKUP_PATIENCE
    fact = f"looked up in {format_seconds(seconds)}"
    if seconds < SLOW:
        return Finding(NETWORK, name, fact)
    line = "127.0.0.1 localhost" if "127.0.0.1" in name else f"127.0.1.1 {socket.gethostname()}"
    advice = f"add the line `{line}` to /etc/hosts: a name server that does not answer delays the start of ranks"
    return warning(NETWORK, name, fact, advice)


# --------------------------------------------------------------------------------------------------------------------
# This process, which would be forked by `start_method="fork"`: torch, CUDA, and variables that change a launch.


HERE = "this process"
CUDA_FILE = "/dev/nvidia-uvm"
"""A process that has started CUDA has this file open; one that only asked NVML has not."""
VARIABLES = re.compile(
    r"(NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|ACCELERATE)_\w+|CUDA_\w+|MASTER_(ADDR|PORT)|(LOCAL_)?RANK|WORLD_SIZE"
)
FORKSERVER = 'omit start_method="fork": the default, "forkserver", does not depend on what this process did'


def look_at_process() -> list[Finding]:
    """Return what a fork of this process can do, what started CUDA, and variables that change a launch."""
    names = sorted(name for name in os.environ if VARIABLES.fullmatch(name) and not is_secret(name))
    values = ", ".join(f"{name}={os.environ[name]}" for name in names)
    return [
        *_fork(),
        cuda_finding(),
        *_imports(),
        Finding(HERE, "variables", values or "none that changes a launch"),
    ]


def _fork() -> list[Finding]:
    name = "fork"
    if "torch" not in sys.modules:
        return [Finding(HERE, name, "torch is not imported here; nothing prevents a fork")]
    health = try_fork()
    if health.cuda and health.parallel:
        return [Finding(HERE, name, "tried: a fork can run parallel operations", "good")]
    lost = [*([] if health.parallel else ["parallel operations"]), *([] if health.cuda else ["CUDA"])]
    fact = f"tried: a fork of this process cannot run {' or '.join(lost)}, because this process has used them"
    return [warning(HERE, name, fact, FORKSERVER)]


def _imports() -> list[Finding]:
    """Return what ranks inherit of this process's imports."""
    image = inherited_imports()
    if not image.num_modules and not image.left_out:
        fact = "nothing was launched yet that ranks could inherit imports from"
        return [Finding(HERE, "imports", fact)]
    facts = [f"ranks inherit {plural(image.num_modules, 'imported module')}"]
    facts += [f"each rank imports {name} at each launch: {reason}" for name, reason in image.left_out.items()]
    return [Finding(HERE, "imports", fact) for fact in facts]


def cuda_finding() -> Finding:
    """Return the finding about CUDA in this process."""
    # The descriptor that lists the folder is closed by now, so its entry leads nowhere: `realpath` does not raise.
    if CUDA_FILE not in {os.path.realpath(entry) for entry in list(Path("/proc/self/fd").iterdir())}:
        return Finding(HERE, "CUDA", "not started in this process")
    return warning(HERE, "CUDA", "started in this process, by a cell or an import", FORKSERVER)


# --------------------------------------------------------------------------------------------------------------------
# Versions: Python, torch and the libraries around a launch, read from their metadata without an import.


SOFTWARE = "software"
BESIDE = (
    *("accelerate", "anywidget", "datasets", "ipython", "ipywidgets", "jupyterlab", "lightning", "notebook", "numpy"),
    *("pandas", "transformers"),
)
"""Packages whose versions a report of a problem needs."""


def look_at_software() -> list[Finding]:
    """Return the versions, and a problem for each that does not work."""
    file = accelerate_yaml.default_path()
    installed = importlib.metadata.distributions()
    nccl = {f"{each.version} ({each.name})" for each in installed if (each.name or "").startswith("nvidia-nccl")}
    return [
        Finding(SOFTWARE, "Python", f"{platform.python_version()} at {sys.executable}"),
        Finding(SOFTWARE, "system", platform.platform()),
        Finding(SOFTWARE, "notebook-launcher", f"{notebook_launcher.__version__} at {PACKAGE_FOLDER}"),
        torch_finding(version_of("torch")),
        Finding(SOFTWARE, "NCCL", ", ".join(sorted(nccl)) or "not installed as a package"),
        ipykernel_finding(version_of("ipykernel")),
        Finding(SOFTWARE, "beside it", ", ".join(f"{name} {v}" for name in BESIDE if (v := version_of(name)))),
        Finding(SOFTWARE, "settings file", str(file) if file.is_file() else f"none ({file})"),
    ]


def torch_finding(version: str | None) -> Finding:
    """Return the finding about a version of torch; None or an empty text: not installed."""
    if not version:
        advice = "pip install torch"
        return Finding(SOFTWARE, "torch", "not installed", "problem", advice)
    kind, number = devices.torch_build()
    built = f"built for CUDA {number}" if kind == "cuda" else "built without CUDA"
    return Finding(SOFTWARE, "torch", f"{version}, {built}")


def ipykernel_finding(version: str | None) -> Finding:
    """Return the finding about a version of ipykernel; None: not installed."""
    if version in BROKEN_IPYKERNELS:
        fact = f"{version}, which cannot show rich output that comes from a thread"
        advice = "%pip install 'ipykernel>=7.1' and restart the kernel"
        return Finding(SOFTWARE, "ipykernel", fact, "problem", advice)
    return Finding(SOFTWARE, "ipykernel", version or "not installed")
