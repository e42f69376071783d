"""The call of the user's function, in a process that the function may fork."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.util
import io
import os
import pkgutil
import sys
import threading
import time
import traceback
import types
import zipfile
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from notebook_launcher.errors import ConfigError
from notebook_launcher.processes.rank.rank_process import flush
from notebook_launcher.travel.changed_modules import is_local
from notebook_launcher.wording import did_you_mean, first_few

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec


def call_function(function: Any, args: Any, kwargs: Any) -> Any:
    """Call the function. A child process that the function forked exits here once it leaves the function."""
    pid = os.getpid()
    try:
        value = function(*args, **kwargs)
    except BaseException as error:
        if os.getpid() != pid:
            _end_fork(error)
        raise
    if os.getpid() != pid:
        _end_fork(None)
    return value


def _end_fork(error: BaseException | None) -> NoReturn:
    """End a process that the function forked and that has now left the function, as a script ends after its last line.

    The process must not continue as a second rank. Its exit handlers do not run, because they are the rank's.
    """
    code = 1
    try:
        if error is None or isinstance(error, SystemExit):
            code = (exit_code(error) or 0) if error is not None and error.code is not None else 0
        else:
            own = error.__traceback__.tb_next if error.__traceback__ is not None else None
            traceback.print_exception(type(error), error, own)
        flush()
    finally:
        os._exit(code & 0xFF)


def exit_code(error: BaseException) -> int | None:
    """Return the exit code of a `SystemExit`, whose text is printed; None for another exception."""
    if not isinstance(error, SystemExit):
        return None
    if isinstance(error.code, str):
        with contextlib.suppress(Exception):
            sys.stderr.write(f"{error.code}\n")  # As the interpreter does at its end.
    return int(error.code) if isinstance(error.code, int) else 1


# --------------------------------------------------------------------------------------------------------------------
# A program for Python (a file, a folder, a zip file or a module), run by a rank as `python` would run it.


class Script:
    """A program as a function that ranks can call; its arguments are the words of the program's command line.

    Args:
        target: The path of a file, of a folder or zip file with a `__main__.py`, or the name of a module.
        is_module: True for a module.
    """

    def __init__(self, target: str, *, is_module: bool) -> None:
        self.target = target if is_module else str(Path.cwd() / target)
        self.is_module = is_module
        # It becomes the name of the run: `train.py`, or the module's name.
        self.__qualname__ = target if is_module else Path(self.target).name

    def check(self) -> None:
        """Raise `ConfigError` if there is no such program. A module's packages are not imported."""
        path = Path(self.target)
        if self.is_module:
            if self.target.endswith(".py") and path.is_file():
                raise ConfigError(f"-m {self.target}: this is a file. Leave -m out, or name the module: -m {path.stem}")
            if not _exists(self.target.partition(".")[0], *_first_paths(os.getcwd())):
                close = did_you_mean(self.target, (module.name for module in pkgutil.iter_modules([os.getcwd()])))
                hint = close or "Name it as after `python -m`: package.module."
                raise ConfigError(
                    f"there is no module {self.target!r} in {Path.cwd()} or among the installed packages. {hint}"
                )
        elif not path.exists():
            hint = "To run a module by its name, write -m before it." if _exists(path.name) else _near(path)
            raise ConfigError(f"there is no file {path}. {hint}")
        elif path.is_dir() and not (path / "__main__.py").exists():
            programs = _programs(path)
            hint = f"Name a file in it, such as {path / programs[0]}." if programs else "No Python file is in it."
            raise ConfigError(f"{path} is a folder without a __main__.py, so Python cannot run it. {hint}")

    def __call__(self, *words: str) -> None:
        """Run the program in this rank's `__main__`, with its own `sys.argv` and `sys.path[0]`."""
        if self.is_module:
            self._run_module(self.target, os.getcwd(), words)
        elif Path(self.target).is_dir() or zipfile.is_zipfile(self.target):
            self._run_module("__main__", self.target, words)
        else:
            self._run_file(words)

    def _run_file(self, words: tuple[str, ...]) -> None:
        _set_first_path(str(Path(self.target).resolve().parent))
        sys.argv[:] = [self.target, *words]
        with io.open_code(self.target) as file:
            code = compile(file.read(), self.target, "exec", dont_inherit=True)
        _execute(code, self.target, None, SourceFileLoader("__main__", self.target))

    def _run_module(self, name: str, folder: str, words: tuple[str, ...]) -> None:
        _set_first_path(folder)
        spec = _find_program(name)
        assert spec.loader is not None
        code = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
        path = spec.origin or name
        sys.argv[:] = [self.target if name == "__main__" else path, *words]
        _execute(code, path, spec, spec.loader)


def _near(path: Path) -> str:
    """Return the Python files that the path of a missing file may stand for."""
    if not path.parent.is_dir():
        return f"There is no folder {path.parent} either."
    programs = _programs(path.parent)
    listed = f"Python files there: {first_few(programs, 5)}."
    return did_you_mean(path.name, programs) or (listed if programs else "No Python file is in this folder.")


def _programs(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.py"))


def _exists(name: str, *folders: str) -> bool:
    try:
        return bool(importlib.util.find_spec(name) or PathFinder.find_spec(name, folders))
    except (ImportError, ValueError, AttributeError):
        return False


def _set_first_path(folder: str) -> None:
    # The launcher's own first entry is its working directory, or the folder of its console script.
    found = _first_paths(folder)
    sys.path[: len(found)] = found


def _first_paths(folder: str) -> list[str]:
    """Return the first entry of a program's path; with PYTHONSAFEPATH there is none, as the launcher has none."""
    return [] if getattr(sys.flags, "safe_path", False) else [folder]


def _find_program(name: str) -> ModuleSpec:
    """Return the spec of a module, or of a package's `__main__`; imports the packages around it, as `python -m`."""
    # Of "__main__", `importlib.util.find_spec` would return the spec of the module that runs now.
    find = importlib.util.find_spec if name != "__main__" else PathFinder.find_spec
    spec = find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.loader is None or not hasattr(spec.loader, "get_code"):
        raise ImportError(f"{name} cannot be run as a module: the module, or its __main__, was not found.", name=name)
    return spec


def _execute(code: Any, path: str, spec: ModuleSpec | None, loader: Any) -> None:
    main = vars(sys.modules["__main__"])
    main.update(
        __name__="__main__",
        __file__=path,
        __doc__=None,
        __builtins__=builtins,
        __cached__=None if spec is None else spec.cached,
        __loader__=loader,
        __package__=None if spec is None else spec.parent,
        __spec__=spec,
    )
    exec(code, main)  # noqa: S102 - this is what the user asked for


# --------------------------------------------------------------------------------------------------------------------
# Waits for the work that a call has queued on GPUs before the call counts as returned; finds a lost CUDA context.
#
# A kernel that fails (a device-side assert, an illegal address) leaves its error to the next CUDA call, wherever that
# is, and every later CUDA call of the process fails too.


LOOK_EVERY = 1e-3
"""Seconds between two looks at a stream."""
LAST_KERNELS = 0.1
"""Longest wait in seconds for queued work, after the function has failed: the work may wait in NCCL for a peer that
never comes, and the rank must report its failure."""


def finish() -> None:
    """Wait until all streams of all GPUs that this process uses are done: their errors are the function's.

    Raises:
        RuntimeError: A kernel failed; `torch.AcceleratorError` in newer versions of torch.
    """
    if not (devices := _devices_in_use()):
        return
    import torch

    ends = [torch.cuda.Event(blocking=True) for _ in devices]
    for device, end in zip(devices, ends, strict=True):
        end.record(torch.cuda.current_stream(device))

    def wait() -> None:
        for device, end in zip(devices, ends, strict=True):
            end.synchronize()  # It has nearly all the work, and this wait, unlike the next, leaves the core to others.
            torch.cuda.synchronize(device)  # All streams of the device: nobody can list them.

    run_apart(wait)


def run_apart(wait: Callable[[], object]) -> None:
    """Run a function in a thread, and return or raise as it does. An interrupt ends this wait, not the function."""
    is_over = threading.Lock()
    is_over.acquire()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            wait()
        except BaseException as error:  # raised in the thread that waits
            errors.append(error)
        finally:
            is_over.release()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    is_over.acquire()  # Below no frame of Python's own: a stack then shows that the function has ended.
    thread.join()
    if errors:
        raise errors.pop()


def is_broken() -> bool:
    """Return True if no CUDA call of this process can succeed any more; called after a failure."""
    if not (devices := _devices_in_use()):
        return False
    import torch

    until = time.monotonic() + LAST_KERNELS
    try:
        for device in devices:
            while not torch.cuda.current_stream(device).query() and time.monotonic() < until:
                time.sleep(LOOK_EVERY)
    except RuntimeError:
        return True
    return False


def _devices_in_use() -> list[int]:
    """Return the GPUs on which this process has a context; to ask another one for anything would make one there."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    has_context = torch._C._cuda_hasPrimaryContext
    return [device for device in range(torch.cuda.device_count()) if has_context(device)]


# --------------------------------------------------------------------------------------------------------------------
# The user's modules in the ranks of a session: after a file was edited, its module is imported again.


class LocalModules:
    """The modules that no package installs, with the state of their files at the end of the last call.

    Args:
        folder: The notebook's folder, from which the edited files are named.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        # Modules that were there before the first call are the launcher's own, or were inherited from the kernel.
        self._known = set(sys.modules)
        self._seen: dict[str, tuple[int, int]] = {}
        self._remembered: tuple[int, str] | None = None
        """Number of modules, and the newest one, when `remember` last looked at all; None: it must look again."""

    def forget_edited(self) -> list[str]:
        """Forget all local modules if one was edited, so that they are imported again; return the edited files.

        All of them, because a module that was not edited may hold names of an edited one.
        """
        edited = [file for file, stamp in self._seen.items() if _stamp(file) != stamp]
        if edited:
            for name in self._names():
                del sys.modules[name]
                self._known.discard(name)
            importlib.invalidate_caches()
            self._seen.clear()
            self._remembered = None  # The same modules may be imported again, in the same order.
        inside = os.path.join(self._folder, "")
        return [file.removeprefix(inside) for file in edited]

    def remember(self) -> None:
        """Record the state of the files of newly imported modules.

        Call it before the end of the call is reported, because the user may edit a file as soon as the cell returns.
        """
        # Python adds a new module at the end. Comparing all 2,000 names took a third of a short call in a rank.
        present = len(sys.modules), next(reversed(sys.modules))
        if present == self._remembered:
            return
        self._remembered = present
        for name in sys.modules.keys() - self._known:
            self._known.add(name)
            file = self._local_file(sys.modules[name])
            if file is not None and (stamp := _stamp(file)) is not None:
                self._seen[file] = stamp

    def _names(self) -> list[str]:
        return [name for name in self._known if self._local_file(sys.modules.get(name)) in self._seen]

    def _local_file(self, module: Any) -> str | None:
        return str(module.__file__) if isinstance(module, types.ModuleType) and is_local(module) else None


def _stamp(file: str) -> tuple[int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


# --------------------------------------------------------------------------------------------------------------------
# The import path of a session's rank, which follows what the kernel adds to its own.


def add_folders(first: Sequence[str], last: Sequence[str]) -> None:
    """Put folders at the beginning and at the end of `sys.path`, except those that it has; what it has stays."""
    new_first = [folder for folder in first if folder not in sys.path]
    new_last = [folder for folder in last if folder not in sys.path]
    if new_first or new_last:
        sys.path[:] = [*new_first, *sys.path, *new_last]
        importlib.invalidate_caches()  # A folder may not have been there when Python last looked.
