"""Public names of a package, each imported when it is first used.

A package writes a public name once: as an import under `if TYPE_CHECKING:`, where type checkers and editors find it.
These lines are never executed. `LazyNames` reads them from the source, so the import of the package stays cheap.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from typing import Any, NamedTuple


class Home(NamedTuple):
    """The place where a public name is defined."""

    module: str
    name: str
    """Name of the object in that module; an alias has another name than its object."""


class LazyNames:
    """The public names of a package.

    Args:
        package: The package's `__name__`. Its source holds one block `if TYPE_CHECKING:` with the imports.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self.homes: dict[str, Home] = _read_homes(package)
        """The home of each public name."""

    def listed(self) -> list[str]:
        """Return the public names; this is the package's `__dir__`."""
        return sorted(self.homes)

    def find(self, name: str) -> Any:
        """Return the object with a public name, or raise `AttributeError`; this is the package's `__getattr__`."""
        if name not in self.homes:
            raise AttributeError(f"module {self._package!r} has no attribute {name!r}")
        home = self.homes[name]
        return getattr(importlib.import_module(home.module), home.name)


def _read_homes(package: str) -> dict[str, Home]:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    source = spec.loader.get_source(package)  # type: ignore[union-attr] # both loaders of packages have it
    homes: dict[str, Home] = {}
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    for_checkers = [block for block in blocks if isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"]
    for statement in (statement for block in for_checkers for statement in block.body):
        match statement:
            case ast.ImportFrom(module=str(module), names=names):
                homes |= {alias.asname or alias.name: Home(module, alias.name) for alias in names}
            case ast.Assign(targets=[ast.Name(id=alias)], value=ast.Name(id=name)):
                homes[alias] = homes[name]
    return homes
