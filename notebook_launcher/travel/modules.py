"""Modules beside the notebook that changed on disk since the kernel imported them.

They travel by name, so the ranks run the file as it is now while the kernel still runs it as it was.
A change is told by the compiled file, which records the size and time of the source that it was made
from, and, where another process has compiled it anew since, by the code of the functions.
"""

from __future__ import annotations

import importlib.util
import json
import os
import site
import sys
import sysconfig
import types
from pathlib import Path
from typing import TYPE_CHECKING

from notebook_launcher.travel.parcel import read_notes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["notes_of_modules", "stale_modules"]

PYC_HEADER_SIZE = 16


def notes_of_modules(names: Iterable[str]) -> bytes:
    """Return what a parcel records of the modules that it refers to."""
    return json.dumps(sorted(names)).encode()


def stale_modules(fd: int | None) -> list[str]:
    """Return the files that a packed call uses and that changed since this process imported them.

    Only files outside the interpreter's own and installed packages are looked at, and those that they
    import in turn. `fd` is the descriptor from `pack_call`, which stays open; None stands for a call that
    a fork inherits, which may use whatever this process has imported.
    """
    seen: dict[str, types.ModuleType] = {}
    names = list(sys.modules) if fd is None else list(json.loads(read_notes(fd) or b"[]"))
    installed = _installed_folders()
    while names:
        name = names.pop()
        module = sys.modules.get(name)
        if name not in seen and module is not None and _is_local(module, installed):
            seen[name] = module
            names += _modules_used_by(module)
    return sorted(str(module.__file__) for module in seen.values() if _has_changed(module))


def _installed_folders() -> tuple[str, ...]:
    installed = [*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()]
    own = str(Path(__file__).parent.parent)
    scripts = {sysconfig.get_path("scripts"), sysconfig.get_path("data")}
    return tuple(folder + os.sep for folder in {*installed, own} - scripts)


def _is_local(module: types.ModuleType, installed: tuple[str, ...]) -> bool:
    # Not getattr: some of torch's modules import others when asked for an attribute.
    path = getattr(module, "__dict__", {}).get("__file__")
    if not isinstance(path, str) or not path.endswith(".py") or module.__name__ == "__main__":
        return False
    return not path.startswith(installed)


def _modules_used_by(module: types.ModuleType) -> Iterator[str]:
    for value in list(vars(module).values()):
        if isinstance(value, types.ModuleType):
            yield value.__name__
        elif isinstance(name := getattr(value, "__module__", None), str):
            yield name


def _has_changed(module: types.ModuleType) -> bool:
    path = str(module.__file__)
    try:
        stat = Path(path).stat()
        with open(path, "rb") as file:
            source = file.read()
    except OSError:
        return True
    try:
        with open(importlib.util.cache_from_source(path), "rb") as file:
            header = file.read(PYC_HEADER_SIZE)
    except (OSError, NotImplementedError):
        header = b""
    # Bytes 4-8 are zero for a compiled file that records time and size, and not a hash.
    if len(header) == PYC_HEADER_SIZE and header[4:8] == bytes(4):
        mtime, size = (int.from_bytes(header[i : i + 4], "little") for i in (8, 12))
        if (mtime, size) != (int(stat.st_mtime) & 0xFFFFFFFF, stat.st_size & 0xFFFFFFFF):
            return True
    try:
        present = compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return True
    codes = set(_nested_codes(present))
    functions = [f for f in vars(module).values() if isinstance(f, types.FunctionType)]
    return any(f.__code__ not in codes for f in functions if f.__code__.co_filename == path)


def _nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield const
            yield from _nested_codes(const)
