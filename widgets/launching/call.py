"""Code for the launch that a panel shows, to be copied; values that equal their defaults are left out."""

from __future__ import annotations

import dataclasses
import enum
import json
import keyword
import sys
import types
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from notebook_launcher.engines.cluster import command_engines
from notebook_launcher.kernel.launch import notebook_launch
from notebook_launcher.widgets.launching.parameters import is_literal
from notebook_launcher.wording import is_secret

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDTH = 96
"""Characters of a line: as many as a cell of 1,000 pixels shows without scrolling."""


class Namer:
    """Finds names for objects in the user's cells, and notes the imports that the cells lack."""

    def __init__(self, namespace: Mapping[str, Any], panel: Any) -> None:
        self._namespace = dict(namespace)
        self._panel = panel
        self.imports: set[str] = set()
        self.needs_a_panel = False
        """True if the code refers to the panel, but no name of the user's cells holds the panel."""

    def name_of(self, value: Any) -> str | None:
        """Return a name whose value is this very object; None if there is none."""
        own = getattr(value, "__name__", None)
        if isinstance(own, str) and self._namespace.get(own) is value:
            return own
        if (name := self._held(value)) is not None:
            return name
        if isinstance(value, types.MethodType) and (owner := self.name_of(value.__self__)) is not None:
            return f"{owner}.{value.__name__}"
        home = getattr(value, "__module__", None)
        if not isinstance(own, str) or not isinstance(home, str) or own in self._namespace:
            return None
        # The top level of the package comes first, if it offers the same object.
        for module in (home.partition(".")[0], home):
            if module in sys.modules and getattr(sys.modules[module], own, None) is value:
                if module not in ("__main__", "builtins"):
                    self.imports.add(f"from {module} import {own}")
                return own
        return None

    def expression(self, value: Any, otherwise: str) -> str:
        """Return code for a value; `otherwise` names the panel's attribute that holds it."""
        if is_literal(value):
            return literal(value)
        if isinstance(value, PurePath):
            self.imports |= set() if self._namespace.get("Path") is Path else {"from pathlib import Path"}
            return f"Path({literal(str(value))})"
        if isinstance(value, enum.Enum) and (cls := self.name_of(type(value))) is not None:
            return f"{cls}.{value.name}"
        if (name := self.name_of(value)) is not None:
            return name
        panel = self._held(self._panel)
        self.needs_a_panel = panel is None
        return f"{panel or 'panel'}.{otherwise}"

    def _held(self, value: Any) -> str | None:
        """Return the name of an object in the user's cells."""
        fits = (name for name, held in self._namespace.items() if held is value and name.isidentifier())
        return next((name for name in fits if not name.startswith("_") and not keyword.iskeyword(name)), None)


def call_code(
    function: Any, args: Mapping[str, Any], kwargs: Mapping[str, Any], options: Mapping[str, Any], namer: Namer
) -> str:
    """Return the call of `notebook_launch` with these options, and the imports that it needs; None: no function yet."""
    given = dict(options)
    parts = ["train" if function is None else namer.expression(function, "fn")]
    if (num := given.pop("num_processes", None)) is not None:
        parts.append(str(num))
    items = {name: namer.expression(value, f"arguments[{literal(name)}]") for name, value in {**args, **kwargs}.items()}
    if args:
        parts.append(f"args=({', '.join(items[name] for name in args)}{',' * (len(args) == 1)})")
    if kwargs:
        named = [f"{literal(name)}: {items[name]}" for name in kwargs]
        parts.append("kwargs=" + _bracketed("{", named, "}", indent=4))
    setup, env = given.pop("setup", None), given.pop("env", {})
    parts += [f"{name}={literal(_plain(value))}" for name, value in given.items()]
    if env:
        # The code of a panel is saved with its notebook.
        hidden = {name for name, text in env.items() if is_secret(name, text)}
        namer.imports |= {"import os"} if hidden else set()
        items = {name: f"os.environ[{literal(name)}]" if name in hidden else literal(env[name]) for name in env}
        parts.append(f"env={{{', '.join(f'{literal(name)}: {item}' for name, item in items.items())}}}")
    if setup is not None:
        parts.append(f"setup={namer.expression(setup, 'config.setup')}")
    call = namer.name_of(notebook_launch) or "notebook_launch"
    head = [*sorted(namer.imports), ""] if namer.imports else []
    return "\n".join([*head, _bracketed(f"{call}(", parts, ")", indent=0)])


def literal(value: Any) -> str:
    """Return the value's literal, strings in double quotes."""
    if isinstance(value, str) and value.isprintable():
        return json.dumps(value, ensure_ascii=False)
    if type(value) in (list, tuple) and len(value) != 1:
        opening, closing = "[]" if isinstance(value, list) else "()"
        return opening + ", ".join(map(literal, value)) + closing
    if type(value) is dict:
        return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    return repr(value)


def _plain(value: Any) -> Any:
    """Return an option as it is written in code."""
    if isinstance(value, tuple):
        return list(value)
    if dataclasses.is_dataclass(value):  # An engine.
        return command_engines.write(value) or value  # type: ignore[arg-type]
    return dict(value) if hasattr(value, "keys") else value


def _bracketed(opening: str, parts: Sequence[str], closing: str, *, indent: int) -> str:
    """Return the parts in one line, else in a line of their own, else one below the other."""
    inside, pad = ", ".join(parts), " " * indent
    if "\n" not in inside:
        if indent + len(opening + inside + closing) <= WIDTH:
            return opening + inside + closing
        if not indent and 4 + len(inside) <= WIDTH:
            return f"{opening}\n    {inside}\n{closing}"
    return "\n".join([opening, *(f"{pad}    {part}," for part in parts), pad + closing])
