"""Errors of ranks that look as if something were missing there which the notebook has: an entry, an attribute, a codec.

Guesses, from the text of the error: the entry or attribute is looked for in the kernel's own modules.
"""

from __future__ import annotations

import codecs
import re
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["describe_missing"]

FRAME = re.compile(r'^  File "([^"]+)", line \d+, in .*\n(?:    (.*))?', re.MULTILINE)
OF_MODULE = re.compile(r"AttributeError: module '([\w.]+)' has no attribute '(\w+)'")
OF_CLASS = re.compile(r"AttributeError: (?:type object )?'(\w+)' (?:object )?has no attribute '(\w+)'")
ENCODING = re.compile(r"LookupError: unknown encoding: (\S+)")
LOOKED_UP = re.compile(r"(?:\w*KeyError|ValueError|LookupError): ")
QUOTED = re.compile(r"""['"`]([^'"`\n]{1,100})['"`]""")
NAME = re.compile(r"[^\W\d]\w*")


def describe_missing(summary: str, traceback: str) -> list[str]:
    """Return a line about what the notebook has and a rank has not; none if nothing of the kind explains the error.

    Args:
        summary: The error in one line: `KeyError: 'big'`.
        traceback: The rank's traceback.
    """
    found = _attribute(summary) or _encoding(summary) or next(_entries(summary, traceback), "")
    if not found:
        return []
    has = f"The notebook has {found}, and this rank has not: a cell or an import has put it there."
    return [f"{has} Run it by `%%everywhere`, so that each rank runs it before the function."]


def _attribute(summary: str) -> str:
    if match := OF_MODULE.match(summary):
        module = sys.modules.get(match[1])
        return f"{match[1]}.{match[2]}" if match[2] in getattr(module, "__dict__", {}) else ""
    if match := OF_CLASS.match(summary):
        for module in list(sys.modules.values()):
            cls: Any = getattr(module, "__dict__", {}).get(match[1])
            if not isinstance(cls, type) or cls.__module__ == "__main__":
                continue
            if any(match[2] in vars(base) for base in cls.__mro__):
                return f"{match[1]}.{match[2]}"
    return ""


def _encoding(summary: str) -> str:
    match = ENCODING.match(summary)
    try:
        return f"the codec {match[1]!r}" if match and codecs.lookup(match[1]) else ""
    except LookupError:
        return ""


def _entries(summary: str, traceback: str) -> Iterator[str]:
    """Yield the entries with a key that the error names, in modules at whose code it was raised."""
    frames = FRAME.findall(traceback)
    if not (LOOKED_UP.match(summary) and frames):
        return
    keys = QUOTED.findall(summary)
    for module in _modules_at(*frames[-1]):
        for path, table in _tables(module):
            for key in keys:
                if dict.__contains__(table, key):
                    yield f"{path}[{key!r}]"


def _modules_at(filename: str, line: str) -> list[types.ModuleType]:
    """Return the module of a file; for a cell, the modules that its line names."""
    loaded = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
    own = [module for module in loaded if getattr(module, "__dict__", {}).get("__file__") == filename]
    notebook = vars(sys.modules["__main__"])
    named = [value for name in NAME.findall(line) if isinstance(value := notebook.get(name), types.ModuleType)]
    return own or [*named, *(sys.modules[name] for name in NAME.findall(line) if name in sys.modules)]


def _tables(module: types.ModuleType) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield the dictionaries of a module, and those of its objects."""
    for name, value in list(vars(module).items()):
        path = f"{module.__name__}.{name}"
        if name.startswith("__") or isinstance(value, types.ModuleType):
            continue
        if isinstance(value, dict):
            yield path, value
        for inner, table in list(getattr(value, "__dict__", {}).items()):
            if isinstance(table, dict):
                yield f"{path}.{inner}", table
