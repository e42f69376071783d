"""The imports that ranks inherit from the fork server: its image. Making it leaves the server as clean as before.

Names alone arrive from the kernel; nothing is imported whose file depends on the notebook's folder. An import may leave
a thread, a process or a connection, none of which a fork could use. So the server looks at itself after each package;
what has left something behind is named in `Image.left_out`, and ranks import it by themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import importlib
import mmap
import os
import select
import signal
import struct
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.messaging import messages
from notebook_launcher.processes import inherited, libraries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


PREPARED = (
    "torch._dynamo",
    "torch.utils.data",
    "notebook_launcher.training.accelerator",
    "notebook_launcher.detached.host",
)
"""Modules that later processes are likely to import, whatever the kernel has imported. Without the first one, torch
would import its compiler in every rank, at the first optimizer. A name that is not found is skipped."""
THERE_ALREADY = ("torch", "numpy")
"""Packages that are in the image from the start, but for parts that no launch waits for."""
HARMLESS_THREADS = ("jemalloc_bg_thd",)
"""Threads of libraries with which a fork works. jemalloc's (pyarrow, pandas) only return free memory to the system, and
its own fork handlers start them again. Other threads are tried, by `_a_fork_works`."""
MAX_FAILURES = 8
"""Failures after which ranks import all the rest by themselves: each costs the imports before it once more."""
TRIAL_LIMIT = 10.0
"""Seconds for a fork of the server to do some work; it takes 30 ms, on a busy machine more."""


class NotCleanError(Exception):
    """Importing a package has left something in this process that its forks could not use.

    Args:
        package: Name of the package.
        reason: Words for what it has left.
    """

    def __init__(self, package: str, reason: str) -> None:
        super().__init__(package, reason)
        self.package = package
        self.reason = reason


class Image:
    """The modules of this process that its forks inherit, beside those that it has from its start."""

    def __init__(self) -> None:
        self._wanted: dict[str, None] = {}
        """Names of the kernel's modules, in the order of its imports."""
        self._local: dict[str, str] = {}
        """By top-level name: files of modules of the notebook's folders. Here the name must not mean another module."""
        self._environ: dict[str, str] = {}
        self._tried: set[str] = set()
        """Names whose import was tried; each is tried once."""
        self._num_failures = 0
        self.left_out: dict[str, str] = {}
        """By package, why it is left to the ranks."""
        self._progress = mmap.mmap(-1, mmap.PAGESIZE)
        """Memory that this process shares with its deputy: the number of the name that is being imported, and since
        when."""

    def want(self, imports: messages.Imports) -> None:
        """Note what the kernel has imported since it last said so."""
        self._wanted.update(dict.fromkeys(imports.names))
        self._local.update(imports.local)
        self._environ = imports.environ

    def chores(self) -> list[str]:
        """Return names that are left to be imported: first those for which a launch may come to wait."""
        return self.to_do(None) or [name for name in (*PREPARED, *self._wanted) if self._is_missing(name)]

    def to_do(self, packages: Iterable[str] | None) -> list[str]:
        """Return the kernel's names that ranks need and that are left to be imported.

        Args:
            packages: The packages or modules that they need. None: all for which a launch had better wait.
        """
        if packages is None:
            no_wait = {*THERE_ALREADY, *sys.stdlib_module_names}
            return [name for name in self._wanted if _package(name) not in no_wait and self._is_missing(name)]
        packages = frozenset(packages)
        named = [name for name in packages if "." in name and self._is_missing(name)]
        return named + [name for name in self._wanted if _package(name) in packages and self._is_missing(name)]

    def _is_missing(self, name: str) -> bool:
        return name not in sys.modules and name not in self._tried and not self.left_out.keys() & {name, _package(name)}

    def add(self, names: list[str]) -> None:
        """Import these modules, which `to_do` or `chores` has returned.

        Raises:
            NotCleanError: This process cannot be forked any more. A fork from before can take its place.
        """
        with garbage_left(), _environment(self._environ), _exit_handlers_kept(), _warnings_unshown():
            before, package = Surroundings.look(), ""
            for number, name in enumerate(names):
                if package and _package(name) != package and package not in sys.stdlib_module_names:
                    self._check(before, package)
                package = _package(name)
                if self.left_out.keys() & {name, package}:
                    continue
                self.note_progress(number)
                self._tried.add(name)
                try:
                    importlib.import_module(name)
                except BaseException as error:  # some packages call sys.exit() at their import
                    if name not in PREPARED:  # A rank imports the module by itself, and so shows the error.
                        self.left_out[name] = f"its import fails here: {type(error).__name__}: {error}"[:300]
            self._check(before, package)
            # Tables that torch's compiler fills at its import, as each making of a process group does: a rank would
            # copy 340 of the server's pages for them.
            with contextlib.suppress(Exception):  # The module is not imported, or has no such function.
                sys.modules["torch._dynamo.trace_rules"].clear_lru_cache()
        libraries.open_now()

    def _check(self, before: Surroundings, package: str) -> None:
        for name, file in self._local.items():
            if getattr(sys.modules.get(name), "__file__", file) != file:
                raise NotCleanError(package, f"it imports {name}, which is {file} for the kernel")
        now = Surroundings.look()
        if reason := now.what_is_new(before):
            for pid in now.children - before.children:
                os.kill(pid, signal.SIGKILL)
            raise NotCleanError(package, reason)

    def give_up(self, names: list[str]) -> None:
        """Leave these names to the ranks."""
        self._tried.update(names, PREPARED)

    def note_progress(self, number: int) -> None:
        """Note, for the deputy, that the import of this name begins."""
        struct.pack_into("qd", self._progress, 0, number, time.monotonic())

    def note_failure(self, names: list[str], failure: NotCleanError | None) -> None:
        """In the fork from before: note what is not to be tried again; None: the importing process has died."""
        if failure is None:
            number, _ = struct.unpack_from("qd", self._progress)
            name = names[number] if _package(names[number]) in THERE_ALREADY else _package(names[number])
            failure = NotCleanError(name, "its import ended the process, or took too long")
        self.left_out[failure.package] = failure.reason
        self._num_failures += 1
        if self._num_failures == MAX_FAILURES:
            self.give_up([*names, *self._wanted])

    def seconds_at_name(self) -> float:
        """Return for how long the importing process has been at its present name."""
        return float(time.monotonic() - struct.unpack_from("qd", self._progress)[1])

    def report(self) -> messages.ImageMade:
        """Return what the kernel shows of the image."""
        return messages.ImageMade(num_modules=sum(name in sys.modules for name in self._wanted), left_out=self.left_out)


def _package(name: str) -> str:
    return name.partition(".")[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Surroundings:
    """What a process has that a fork of it would not have, or would share by mistake."""

    children: frozenset[int]
    sockets: frozenset[str]
    devices: frozenset[str]
    handlers: tuple[Any, ...]
    threads: dict[int, str]
    python_threads: int

    @classmethod
    def look(cls) -> Surroundings:
        """Look at this process: 0.3 ms."""
        files = []
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                files.append(str(link.readlink()))
        threads, children = {}, set[int]()
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # The thread has ended.
                threads[int(task.name)] = (task / "comm").read_text().strip()
                children.update(map(int, (task / "children").read_text().split()))
        return cls(
            children=frozenset(children),
            sockets=frozenset(file for file in files if file.startswith("socket:")),
            devices=frozenset(file for file in files if file.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri"))),
            handlers=tuple(signal.getsignal(number) for number in signal.valid_signals()),
            threads=threads,
            python_threads=threading.active_count(),
        )

    def what_is_new(self, before: Surroundings) -> str:
        """Return words for what has come since; empty if forks of this process work as they did before."""
        faults = {
            "starts a process": self.children - before.children,
            "opens the GPU": self.devices - before.devices,
            "opens a connection": self.sockets - before.sockets,
            "handles a signal": self.handlers != before.handlers,
            "starts a thread": self.python_threads > before.python_threads,
        }
        for fault, is_there in faults.items():
            if is_there:
                return f"its import {fault}"
        names = {name for thread, name in self.threads.items() if thread not in before.threads}
        unknown = sorted(names - {*HARMLESS_THREADS})
        if unknown and not _a_fork_works():
            return f"its import starts a thread ({', '.join(unknown)}) without which a fork does not work"
        return ""


def _a_fork_works() -> bool:
    """Try if a fork of this process can multiply, allocate, start a thread and end, although it lacks threads."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            _work_a_little()
            os._exit(0)
        os._exit(1)
    pidfd = os.pidfd_open(pid)
    try:
        if not select.select([pidfd], [], [], TRIAL_LIMIT)[0]:
            os.kill(pid, signal.SIGKILL)
        return os.waitpid(pid, 0)[1] == 0
    finally:
        os.close(pidfd)


def _work_a_little() -> None:
    import torch

    a = torch.ones(200, 200)
    assert float((a @ a).sum()) == 200**3
    if (numpy := sys.modules.get("numpy")) is not None:
        b = numpy.ones((200, 200))
        assert float((b @ b).sum()) == 200**3
    assert len(bytearray(64 << 20)) == 64 << 20
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()


@contextlib.contextmanager
def _environment(environ: dict[str, str]) -> Iterator[None]:
    """Have the kernel's environment, by which some modules set themselves up when they are imported."""
    before = dict(os.environ)
    os.environ.update(environ)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # No pool of threads: a rank sets its own number.
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _exit_handlers_kept() -> Iterator[None]:
    """Keep the exit handlers that modules register at their import, for the ranks; this process ends without them.

    torch's are not kept, nor functions of Python itself, which would remove a file of all ranks at the end of one.
    """
    kept: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
    register = atexit.register

    def registering(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        if _package(getattr(func, "__module__", None) or "") not in ("torch", *sys.stdlib_module_names):
            kept.append((func, args, kwargs))
        return register(func, *args, **kwargs)

    atexit.register = registering
    try:
        yield
    finally:
        atexit.register = register
        inherited.forget_exit_handlers()
        for func, args, kwargs in kept:
            register(func, *args, **kwargs)


@contextlib.contextmanager
def _warnings_unshown() -> Iterator[None]:
    """Show no warnings of imports: the kernel has shown them, and here they would hide why a host did not start.

    The filters stay, because modules add some of their own.
    """
    before, unshown = warnings.showwarning, lambda *_, **__: None
    warnings.showwarning = unshown
    try:
        yield
    finally:
        if warnings.showwarning is unshown:  # Otherwise a module has replaced it.
            warnings.showwarning = before


@contextlib.contextmanager
def garbage_left() -> Iterator[None]:
    """Collect no garbage inside this block: during imports the collector would take half of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
