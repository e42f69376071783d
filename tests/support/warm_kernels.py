"""A kernel that has launched once, and a check that a launch leaves it unchanged."""

from __future__ import annotations

import ast
import contextlib
import json
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.support.kernels import Kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.kernels import Outcome

PATIENCE = 2.0
"""Seconds for threads and shared memory alone: the thread of a detached run may still be drawing its picture, and the
supervisor of a test in a parallel worker may still be removing what its killed ranks left."""
# Runs in the kernel. Prints the kernel's surroundings as JSON.
LOOK = """
def _look():
    import json, os, re, signal, sys, threading, psutil
    def kind(fd):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            return None
        if "history.sqlite" in target or "profile_default" in target:
            return None  # IPython's own, opened and closed as it likes.
        if "eventfd" in target:
            return None  # ipykernel has a socket for every thread that prints, and drops it within 10 s of its end.
        return "".join(c for c in target if not c.isdigit())
    mine = psutil.Process()
    def command(process):
        try:
            return " ".join(process.cmdline())
        except psutil.ZombieProcess:
            return "zombie"
        except psutil.NoSuchProcess:
            return "gone"
    def session(process):
        try:
            return os.getsid(process.pid)
        except ProcessLookupError:
            return None
    servers = [p for p in mine.children() if "processes.forkserver" in command(p)]
    # A server's deputy is in the server's session, and is gone once the server's chores are done.
    theirs = {session(p) for p in servers}
    def lasts(process):
        try:
            return session(process) not in theirs
        except psutil.NoSuchProcess:
            return False
    below = [f"{p.pid} {command(p)}" for p in mine.children(recursive=True) if lasts(p)]
    ours = {mine.pid, *(p.pid for p in mine.children(recursive=True))}
    def may_be_ours(name):
        # Live processes elsewhere on the machine, such as those of a parallel worker's tests, have files of their own.
        maker = re.match(r"torch_(\\d+)_", name)
        return "notebook" in name or maker and (int(maker[1]) in ours or not psutil.pid_exists(int(maker[1])))
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    print(json.dumps({
        "processes": below,
        "servers": len(servers),
        "threads": sorted(t.name for t in threading.enumerate()),
        "descriptors": sorted(filter(None, map(kind, os.listdir("/proc/self/fd")))),
        "environment": {k: v for k, v in os.environ.items() if not k.startswith(("JPY", "TORCHINDUCTOR"))},
        "handlers": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "group": bool(c10d and c10d.is_initialized()),
        "folder": os.getcwd(),
        "shm": sorted(filter(may_be_ours, os.listdir("/dev/shm"))),
    }))
_look()
"""

FIRST = """
import ctypes, os, signal, sys, time
from notebook_launcher import *
def ready():
    import torch.distributed as dist
    dist.barrier()
notebook_launch(ready, 2, output="none")
print("x" * 100_000)  # pyzmq starts a thread of its own at the first large message.
"""


def run_cell(kernel: Kernel, code: str) -> Outcome:
    """Run a cell that must not raise, and return what it has shown."""
    outcome = kernel.execute(code)
    assert outcome.error is None, outcome.traceback
    return outcome


def look(kernel: Kernel) -> dict[str, Any]:
    """Return the kernel's processes, threads, descriptors, environment, handlers and so on."""
    surroundings: dict[str, Any] = json.loads(run_cell(kernel, LOOK).stdout)
    return surroundings


@contextlib.contextmanager
def warm_kernel(cwd: Path | None = None, env: dict[str, str] | None = None) -> Iterator[Kernel]:
    """Start a kernel and launch once, so that all lasting parts (the fork server) exist."""
    with Kernel(cwd=cwd, env=env) as kernel:
        run_cell(kernel, FIRST)
        yield kernel


@contextlib.contextmanager
def unchanged(kernel: Kernel) -> Iterator[None]:
    """Check that the kernel is afterwards as it was before."""
    before = look(kernel)
    # What was there before may go at any time: it may be a parallel worker's.
    earlier, before["shm"] = before["shm"], []
    yield
    after, now = _detect_again(kernel, earlier), time.monotonic()
    while (after["threads"] != before["threads"] or after["shm"]) and time.monotonic() < now + PATIENCE:
        after = _detect_again(kernel, earlier)
    changed = {key: _difference(value, after[key]) for key, value in before.items() if after[key] != value}
    assert not changed, f"changed (gone, new): {changed}"


def _detect_again(kernel: Kernel, earlier: list[str]) -> dict[str, Any]:
    """Look, and leave out the shared memory that was there earlier."""
    after = look(kernel)
    after["shm"] = [name for name in after["shm"] if name not in earlier]
    return after


def evaluate(kernel: Kernel, code: str) -> Any:
    """Run a cell and return the value of its last expression."""
    outcome = run_cell(kernel, code)
    assert outcome.result is not None, outcome.stdout
    return ast.literal_eval(outcome.result)


def _difference(before: Any, after: Any) -> Any:
    if not isinstance(before, list):
        return before, after
    return list((Counter(before) - Counter(after)).elements()), list((Counter(after) - Counter(before)).elements())


def final(outcome: Outcome) -> dict[str, dict[str, Any]]:
    """Return what each display with an id shows in the end."""
    shown = {}
    for content in outcome.of("display_data", "update_display_data"):
        if display_id := content["transient"].get("display_id"):
            shown[display_id] = content["data"]
    return shown


def takes_less_than(limit: float, attempt: Callable[[], float], tries: int = 3) -> bool:
    """Return True if one of a few attempts, each of which returns its seconds, stays below a limit.

    Another program on the machine makes an attempt slower by seconds at times; nothing makes it faster.
    """
    return any(attempt() < limit for _ in range(tries))
