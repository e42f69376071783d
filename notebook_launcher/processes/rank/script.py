"""A program for Python (a file, a folder, a zip file or a module), run by a rank as `python` would run it."""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import pkgutil
import sys
import zipfile
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.errors import ConfigError
from notebook_launcher.wording.choices import did_you_mean
from notebook_launcher.wording.text import first_few

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

__all__ = ["Script"]


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
    """Return True if there is a module of this name on the path, or in one of the folders."""
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
