"""Run folders: location, contents, and which are deleted to make room."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import time
from pathlib import Path
from typing import Any

from notebook_launcher.history.folder_files import belongs_to_another, open_folder, read_json

VARIABLE = "NOTEBOOK_LAUNCHER_RUNS"
"""Environment variable that names the folder of all runs; with the value `off`, no run leaves a folder."""
MAX_RUNS = 500
"""Run folders that are kept; a new run replaces the oldest."""
MAX_BYTES = 1_000_000_000
"""Bytes that the folders may hold together. One holds at most about 130 MB (`run_files.py`)."""

CONFIG = "config.json"
METRICS = "metrics.jsonl"
LOG_ORDER = "log-order.txt"
SUMMARY = "summary.json"
SOURCE = "function.py"
ENVIRONMENT = "environment.json"
EDITS = "edits.json"
CHANGES = "changes.diff"
PICTURES = "pictures.jsonl"
RANDOM = "random.json"
"""The random states with which the ranks began, unless they had a seed."""
PART = "summary.json.part"
"""Name of a summary that is being written; the file is renamed when it is whole."""
RESERVE = "reserve"
"""Room for the end of a run, in case the disk is full by then."""

YOUNG = 60.0
"""Seconds for which a folder without a summary counts as the folder of a run that is starting."""

_ID = re.compile(r"(\d{8}-\d{6})-([\w-]+)-[0-9a-f]{6}", re.ASCII)
_OURS = re.compile(
    r"(config|edits|environment|random)\.json|function\.py|changes\.diff|picture-\d+\.(png|svg|csv)|(metrics|pictures)\.jsonl"
    r"|log-order\.txt|summary\.json(\.part)?|reserve|(host|session)\.sock|(ending|output)\.pickle(\.part)?|value-\d+\.parcel|error\.parcel|rank-\d+\.log|trace_\w+\.json\.gz",
    re.ASCII,
)


def log_name(rank: int) -> str:
    """Return the name of the file with a rank's output."""
    return f"rank-{rank}.log"


def find_home(chosen: str | os.PathLike[str] | None = "auto") -> Path | None:
    """Return the folder of all runs, which need not exist; None if runs leave no folder.

    Args:
        chosen: `LaunchConfig.runs_folder`. `"auto"`: the folder that the environment variable
            `NOTEBOOK_LAUNCHER_RUNS` names (`off`: none), else `$XDG_STATE_HOME/notebook-launcher/runs`, else
            `~/.local/state/notebook-launcher/runs`.

    Raises:
        RuntimeError: No home folder is known, or it is not a full path.
    """
    if chosen is None:
        return None
    if chosen != "auto":
        return Path(chosen).expanduser().absolute()
    if named := os.environ.get(VARIABLE):
        if named == "off":
            return None
        return Path(named).expanduser().absolute()
    # The specification ignores a relative path: https://specifications.freedesktop.org/basedir-spec/latest/
    # Text until the end: a call of a session asks for this folder and seldom needs it, and `Path` would take 90 µs.
    state = os.environ.get("XDG_STATE_HOME", "")
    if not state.startswith("/"):
        state = f"{os.path.expanduser('~')}/.local/state"  # noqa: PTH111 - as above
    if not state.startswith("/"):
        raise RuntimeError(
            f"no home folder is known (HOME={os.environ.get('HOME')!r}): set the variable HOME to a full path, or pass "
            "runs_folder='a/folder'"
        )
    return Path(f"{state}/notebook-launcher/runs")


def list_ids(home: Path) -> list[str]:
    """Return the names of the run folders, the newest second first; none if `home` does not exist."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted((name for name in os.listdir(home) if _ID.fullmatch(name)), reverse=True)  # noqa: PTH208 - names
    return []


def new_id(name: str, started: float) -> str:
    """Return an identifier of a run that was launched at a time of `time.time()`; it names the run's folder, too."""
    slug = re.sub(r"\W+", "-", name, flags=re.ASCII).strip("-")[:40] or "run"
    return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(started))}-{slug}-{secrets.token_hex(3)}"


def name_in(run_id: str) -> str:
    """Return the function's name from a run's id; the whole id if it has none."""
    match = _ID.fullmatch(run_id)
    return match[2] if match else run_id


def time_in(run_id: str) -> float:
    """Return the time of a run's launch from its id, in seconds since the epoch; 0 if the id has none."""
    with contextlib.suppress(ValueError, OverflowError):
        return time.mktime(time.strptime(run_id[: len("20261121-142501")], "%Y%m%d-%H%M%S"))
    return 0.0


def is_run(folder: Path) -> bool:
    """Return True if a folder belongs to a run, by its name or by its contents."""
    return bool(_ID.fullmatch(folder.name)) or (folder / SUMMARY).exists()


def is_live(folder: Path, summary: dict[str, Any] | None) -> bool:
    """Return True if a kernel still writes to a folder whose summary was just read."""
    if summary is None:
        return _age(folder) < YOUNG
    if summary.get("state") in ("done", "failed", "stopped"):
        return False
    return is_alive(summary.get("kernel"), age=_age(folder / SUMMARY))


def prune(home: Path, *, max_runs: int, max_bytes: int | None = None) -> None:
    """Remove the oldest runs until the rest are few enough and, if `max_bytes` is given, small enough.

    The newest run stays, and so does a run that is not over, every file that no run wrote, and what belongs to another
    user, which does not count either.

    Raises:
        OSError: `home` cannot be read.
    """
    ids = [name for name in list_ids(home) if not belongs_to_another(home / name)]
    sizes = {name: size_of(home / name) for name in ids} if max_bytes is not None else {}
    num, size = len(ids), sum(sizes.values())
    for name in reversed(ids[1:]):
        if num <= max_runs and (max_bytes is None or size <= max_bytes):
            return
        folder = home / name
        if not is_live(folder, read_json(folder, SUMMARY)):
            remove(folder)
            num -= 1
            size -= sizes.get(name, 0)


def owner_of(folder: Path) -> int | None:
    """Return the process number of the kernel or host that writes a run's folder; None if it is not known."""
    kernel = (read_json(folder, SUMMARY) or {}).get("kernel")
    pid = kernel.get("pid") if isinstance(kernel, dict) else None
    return pid if isinstance(pid, int) else None


def remove(folder: Path) -> None:
    """Remove the files of a run, and its folder if nothing else is in it; errors are ignored."""
    # Another kernel may be removing the folder too, and the user may have put files of their own into it.
    with contextlib.suppress(OSError):
        fd = open_folder(folder)
        try:
            for name in os.listdir(fd):  # noqa: PTH208 - of a descriptor
                if _OURS.fullmatch(name):
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=fd)
        finally:
            os.close(fd)
        folder.rmdir()


def size_of(folder: Path) -> int:
    """Return the bytes in a run's folder; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder))
    return 0


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")


# --------------------------------------------------------------------------------------------------------------------
# Identity of the process that writes a run's folder, and a check that the process still lives.
#
# No lock is held: every process that the user forks would inherit its descriptor, and would keep the lock after the
# kernel's death. A process id and the time of its start identify a process of this machine until it reboots.


SILENCE = 60.0
"""Seconds without a new summary after which a kernel of another machine or container counts as dead. A kernel that
lives writes one every 5 s (`recorder.py`)."""


def identify() -> dict[str, Any]:
    """Return the identity of this process, as plain data for JSON."""
    pid = os.getpid()
    return {"pid": pid, "start": start_of(pid), **_machine()}


def is_alive(owner: object, *, age: float) -> bool:
    """Return True if the process that `identify` named still lives.

    Args:
        owner: The identity, as `identify` returned it in that process.
        age: Seconds since the process last wrote. They decide if the process cannot be seen from here.
    """
    if not isinstance(owner, dict):
        return False
    pid = owner.get("pid")
    if not isinstance(pid, int) or not _machine().items() <= owner.items():
        return age < SILENCE
    return start_of(pid) == owner.get("start") is not None


def start_of(pid: int) -> int | None:
    """Return the start of a process in clock ticks since the boot; None if it has ended or is a zombie."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = _stat_of(pid)
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    return None


def is_stopped(pid: int) -> bool:
    """Return True if a process of this machine was stopped (SIGSTOP), so that it does nothing until it is continued."""
    with contextlib.suppress(OSError, IndexError):
        return _stat_of(pid)[0] == b"T"
    return False


def _stat_of(pid: int) -> list[bytes]:
    """Return what proc(5) has in /proc/PID/stat after the name, which may hold anything, also parentheses."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


@functools.cache
def _machine() -> dict[str, str]:
    """Return the boot and the namespace in which a process id names a process of this machine."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - the text is not a path
    return {"boot": boot, "pid_namespace": namespace}


# --------------------------------------------------------------------------------------------------------------------
# Files of a host in the folder of its run or session, by which others see that there is a host.


SOCKET = "host.sock"
SESSION_SOCKET = "session.sock"
ENDING = "ending.pickle"
"""Name of the file with the end of a hosted run, in the same folder."""
OUTPUT = "output.pickle"
"""Name of the file with the output of a hosted run that is over, as its cell showed it."""


def is_hosted(folder: Path) -> bool:
    """Return True if the run in a folder was launched with `detached=True`."""
    # A host that was killed leaves its socket.
    return any((folder / name).exists() for name in (SOCKET, ENDING))


def goes_on(folder: Path) -> bool:
    """Return True if a hosted run has not ended; its host keeps the folder for a while after the end."""
    return (folder / SOCKET).exists() and not (folder / ENDING).exists()


def is_session(folder: Path) -> bool:
    """Return True if the folder belongs to a session with `detached=True`, which is open, or whose host was killed."""
    return (folder / SESSION_SOCKET).exists()
