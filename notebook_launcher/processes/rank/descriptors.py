"""File descriptors of a rank: each call and value travels by one, and user code may have left none."""

from __future__ import annotations

import errno
import gc
import os
import resource
import traceback

from notebook_launcher.errors import ResourceError

__all__ = ["check_free", "has_free", "none_left", "release_frames"]


def has_free() -> bool:
    """Return True if this process can open one more file."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return True


def check_free() -> None:
    """Raise `ResourceError` if this process cannot open one more file, so that no value could leave it."""
    if not has_free():
        raise none_left("the function has returned, but its value cannot travel")


def none_left(what: str) -> ResourceError:
    """Return the error that this process has no descriptor left; `what`: a clause about what failed therefore."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ResourceError(
        errno.EMFILE,
        f"{what}: this rank has no file descriptor left (its limit is {limit:,}). Close files, sockets and memory maps "
        "that the function opens, or raise `ulimit -n` in the shell that starts Jupyter.",
    )


def release_frames(error: BaseException) -> None:
    """Clear the variables of an exception's frames, which may hold open files; the exception can no longer be debugged.

    Line numbers stay, so that the traceback is complete.
    """
    traceback.clear_frames(error.__traceback__)
    gc.collect()
