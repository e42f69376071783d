"""The process around a rank: its signals, its standard streams, and its exit."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.processes import inherited
from notebook_launcher.processes.libraries import set_library_threads, signal_at_parents_death

if TYPE_CHECKING:
    from notebook_launcher.messaging import messages


def begin() -> None:
    """Lead a session, die with the parent, and handle signals in the default way."""
    os.setsid()
    parent = os.getppid()
    signal_at_parents_death(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    # A fork of the kernel inherits its handlers, its blocked signals and asyncio's wake-up pipe.
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_DFL)


def redirect_output(start: RankStart) -> None:
    """Make the rank's pipes its standard output and error, and its standard input empty."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (start.stdout_fd, 1), (start.stderr_fd, 2)):
        os.dup2(source, target, inheritable=True)
        os.close(source)
    if start.setup.start_method != "forkserver":  # Its forks have inherited such streams.
        open_streams()


def open_streams() -> None:
    """Replace the standard streams by ones that write whole lines, and point logging handlers at the new ones.

    The fork server does this once for all ranks: in each rank, it would copy 380 pages of the server's memory.
    """
    old = sys.stdout, sys.stderr
    # Line buffering, so that the last lines before a crash reach the pipe.
    form: dict[str, Any] = {"buffering": 1, "encoding": "utf-8", "errors": "backslashreplace", "closefd": False}
    streams = [open(fd, "w", **form) for fd in (1, 2)]  # noqa: SIM115 - they stay open for the rank's life
    for name, stream in zip(("stdout", "stderr"), streams, strict=True):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    inherited.move_log_handlers(dict(zip(map(id, old), streams, strict=True)))


def flush() -> None:
    """Flush the standard streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def mend_output() -> None:
    """Flush the standard streams, and open /dev/null in place of a standard descriptor that user code closed.

    Otherwise the next file that is opened would get the descriptor's number, and `print` would write into that file.
    """
    flush()
    with contextlib.suppress(OSError):  # If no descriptor is free, no standard one is closed.
        while (null := os.open(os.devnull, os.O_RDWR)) <= 2:  # `open` returns the lowest free number.
            os.set_inheritable(null, True)
        os.close(null)


def leave() -> int:
    """Exit as the interpreter does: wait for threads, then run exit handlers."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    inherited.finish_multiprocessing()
    flush()
    return 0


# --------------------------------------------------------------------------------------------------------------------
# The start of one rank, as the supervisor hands it over.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """Everything that a rank gets when it is started."""

    rank: int
    setup: messages.Setup
    """The settings that all ranks of the tree share."""
    channel_fd: int
    stdout_fd: int
    stderr_fd: int
    board_fd: int


# --------------------------------------------------------------------------------------------------------------------
# Makes a rank's own forks, above all of data-loader workers, safe from its threads on older Pythons.
#
# Before Python 3.10.15 and 3.11.10 a forked child copied the lock on the list of threads in its parent's state
# (https://github.com/python/cpython/issues/112275). A thread of gloo that drops the last tensor of a collective holds
# that lock for a moment, so workers that were forked right after a collective could wait forever: about once in 20
# epochs of three workers on two ranks.


# Usually two looks in 0.2 ms suffice; a thread that computes for longer than 50 ms is not waited for.
PATIENCE_S = 0.05
BETWEEN_LOOKS_S = 0.0001


def settle_before_a_fork() -> None:
    """Wait once until other threads rest, if this Python needs it."""
    if has_the_defect(sys.version_info[:3]):
        let_threads_settle()


def settle_before_forks() -> None:
    """Wait until other threads rest before each fork of this process, if this Python needs it."""
    if has_the_defect(sys.version_info[:3]):
        os.register_at_fork(before=let_threads_settle)


def has_the_defect(version: tuple[int, int, int]) -> bool:
    """Return True if a fork of this Python version, given as (major, minor, micro), may copy a lock that is held."""
    return version < (3, 10, 15) or (3, 11) <= version < (3, 11, 10)


def let_threads_settle() -> None:
    """Wait until no other thread of this process runs, for 50 ms at most.

    Sleeping releases the interpreter's lock, so that threads that wait for the lock continue and come to rest too.
    """
    tasks = Path("/proc/self/task")
    this_one = str(threading.get_native_id())
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        time.sleep(BETWEEN_LOOKS_S)
        if not any(_runs(thread) for thread in tasks.iterdir() if thread.name != this_one):
            return


def _runs(thread: Path) -> bool:
    with contextlib.suppress(OSError):  # The thread has ended.
        # "tid (name) state ...": a name may hold spaces and brackets.
        return (thread / "stat").read_bytes().rpartition(b")")[2].split()[0] in (b"R", b"D")
    return False


# --------------------------------------------------------------------------------------------------------------------
# A rank's threads and GPU.


def set_threads(num_threads: int) -> None:
    """Set the intra-op threads of torch and of each library that is loaded; later ones read the environment."""
    import torch

    torch.set_num_threads(num_threads)
    set_library_threads(num_threads)


def choose_gpu(rank: int, local_rank: int) -> None:
    """Make this rank's GPU the current one.

    Raises:
        RuntimeError: torch sees no GPU in this process, though the kernel saw some.
    """
    import torch

    count = torch.cuda.device_count()
    if not count:
        variable = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
        raise RuntimeError(
            f"rank {rank} sees no GPU, though the driver names some to the kernel ({variable}="
            f"{os.environ.get(variable)!r} here). Does nvidia-smi work, is the driver new enough for torch "
            f"{torch.__version__}, and has the container all of /dev/nvidia*? devices='cpu' runs without GPUs."
        )
    torch.cuda.set_device(local_rank % count)
