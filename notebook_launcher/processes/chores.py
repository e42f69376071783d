"""Work of the fork server that makes later launches faster: imports, and huge pages for its heap.

The chores take 1 to 4 s. Launches that come meanwhile are served by the server's deputy, and imports wait for them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import mmap
import struct
import sys
import time
from typing import TYPE_CHECKING

from notebook_launcher.processes import huge_pages, inherited

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LaunchClock", "do_chores", "garbage_left", "import_compiler", "making_way"]

COMPILER = "torch._dynamo"
PREPARED = (
    COMPILER,
    "torch.utils.data",
    "notebook_launcher.training.accelerator",
    "notebook_launcher.detached.host",
)
"""Modules that later processes are likely to import. Without this, torch would import its compiler in every rank, at
the first optimizer. Names alone: nothing here uses the modules, and a name that is not found is skipped."""
COURTESY = 0.1
"""Seconds for which the chores wait after a launch has begun: on two cores, two ranks take 60 ms to start, and 90 to
103 ms beside an import."""
MAX_COURTESY = 5.0
"""Seconds for which the chores wait in all, so that they are also done if launches never stop."""


def import_compiler() -> None:
    """Import torch's compiler before the ranks are forked, which would all import it at the same time."""
    if COMPILER in sys.modules:
        return
    with garbage_left():
        _import_for_ranks(COMPILER)
        _empty_tables()
        inherited.forget_exit_handlers()


def _import_for_ranks(name: str) -> None:
    with contextlib.suppress(Exception):  # A rank imports a module by itself if the import fails here.
        importlib.import_module(name)


def do_chores(launches: LaunchClock) -> None:
    """Do the work that makes later launches faster and takes too long for a launch to wait for."""
    with garbage_left(), making_way(launches):
        for name in PREPARED:
            _import_for_ranks(name)
        _empty_tables()
        inherited.forget_exit_handlers()
    huge_pages.collapse()


def _empty_tables() -> None:
    """Empty tables that torch's compiler has filled at its import, as each making of a process group does.

    A rank would copy 340 of the server's pages for that.
    """
    with contextlib.suppress(Exception):  # The module is not imported, or has no such function.
        sys.modules["torch._dynamo.trace_rules"].clear_lru_cache()


class LaunchClock:
    """Time of the newest launch, in memory that the server shares with its deputy."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def note(self) -> None:
        """Set the time to now."""
        struct.pack_into("d", self._memory, 0, time.monotonic())

    def seconds_since(self) -> float:
        """Return the seconds since the newest launch, a large number if there was none."""
        (newest,) = struct.unpack_from("d", self._memory)
        return float(time.monotonic() - newest)


class _CourteousFinder:
    """A finder that finds no module: it delays each import until `COURTESY` seconds after the newest launch."""

    def __init__(self, launches: LaunchClock) -> None:
        self._launches = launches
        self._left = MAX_COURTESY

    def find_spec(self, *_: object) -> None:
        """Wait for at most `COURTESY` seconds after a launch."""
        wait = min(COURTESY - self._launches.seconds_since(), self._left)
        if wait > 0:
            self._left -= wait
            time.sleep(wait)


@contextlib.contextmanager
def making_way(launches: LaunchClock) -> Iterator[None]:
    """Hold imports back inside this block while a launch starts, because they would take a core from its ranks."""
    finder = _CourteousFinder(launches)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextlib.contextmanager
def garbage_left() -> Iterator[None]:
    """Collect no garbage inside this block: during imports the collector would take half of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
