"""Public names: the place where each is described, and the lists of a package's names."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from sphinx.application import Sphinx

PACKAGES = ("notebook_launcher", "notebook_launcher.training", "notebook_launcher.compat", "notebook_launcher.widgets")
"""An object is described under the first of these that has it."""


def names_in(package: str) -> list[str]:
    """Return the public names of a package; `dir()` lists those of the first, which are imported at their first use."""
    module = importlib.import_module(package)
    names = dir(module) if package == PACKAGES[0] else module.__all__
    return sorted(name for name in names if not name.startswith("__"))


def _definitions(package: str) -> Iterator[tuple[str, str]]:
    module = importlib.import_module(package)
    for name in names_in(package):
        value = getattr(module, name)
        yield f"{value.__module__}.{value.__qualname__}", name


@functools.cache
def homes() -> dict[str, str]:
    """Return the public names, by where each object is defined."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        for definition, name in _definitions(package):
            known = found.get(definition, "").rpartition(".")[0]
            if not known or (known == package and definition.endswith(f".{name}")):  # not its other name
                found[definition] = f"{package}.{name}"
    return found


def public_name_of(target: str) -> str | None:
    """Return the public name of the object defined as `target`, such as `notebook_launcher.config.LaunchConfig`."""
    if target in homes():
        return homes()[target]
    owner, _, member = target.rpartition(".")
    return f"{homes()[owner]}.{member}" if owner in homes() else None


class SharedNames(SphinxDirective):
    """`shared-names:: PACKAGE` lists the names of a package that are described in another package."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the list."""
        package = self.arguments[0]
        publics = [homes()[definition] for definition, _ in _definitions(package)]
        lines = [f"- {{py:obj}}`{public}`" for public in publics if not public.startswith(f"{package}.")]
        return self.parse_text_to_nodes("\n".join(lines))


def _defined_in(module: ModuleType) -> list[str]:
    """Return the public names that a module's own statements define."""
    statements = ast.parse(inspect.getsource(module)).body
    names = [each.name for each in statements if isinstance(each, ast.ClassDef | ast.FunctionDef)]
    names += [name.id for each in statements if isinstance(each, ast.Assign) for name in each.targets]
    return sorted(name for name in names if not name.startswith("_"))


class EveryName(SphinxDirective):
    """`every-name:: PACKAGE` describes all names of a package, and of a module those that it defines."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return autodoc's descriptions of all names."""
        package = self.arguments[0]
        module = importlib.import_module(package)
        names = getattr(module, "__all__", None) or _defined_in(module)
        lines = ["```{eval-rst}"]
        for name in names:
            value = getattr(module, name)
            kind = "class" if inspect.isclass(value) else "function" if inspect.isroutine(value) else "data"
            lines += [f".. auto{kind}:: {package}.{name}", ""]
        return self.parse_text_to_nodes("\n".join([*lines, "```"])) if names else []


class DocstringAsItIs(SphinxDirective):
    """`docstring-as-it-is:: MODULE` shows a module's docstring, laid out by hand, without changes."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the docstring as a block without colours."""
        text = inspect.getdoc(importlib.import_module(self.arguments[0])) or ""
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_directive("docstring-as-it-is", DocstringAsItIs)
    app.add_directive("every-name", EveryName)
    app.add_directive("shared-names", SharedNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
