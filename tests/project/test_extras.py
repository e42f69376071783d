"""Extras of pyproject.toml: each command of the Makefile has the imports of its programs in its own extra."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterator

tomllib = pytest.importorskip("tomllib", reason="came with Python 3.11")

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ("notebook_launcher/**/*.py", "widgets/**/*.py")
PROGRAMS = {
    "notebooks": (*PACKAGE, "notebooks/demo.py", "notebooks/01_*.ipynb"),
    "lab": (*PACKAGE, "notebooks/*.ipynb"),
    "docs": (*PACKAGE, "docs/*.py", "docs/_ext/*.py", "notebooks/*.ipynb"),
    "bench": (*PACKAGE, "benchmarks/**/*.py"),
    "test": (*PACKAGE, "tests/**/*.py", "docs/*.py", "docs/_ext/*.py", "notebooks/*"),
}
"""Each extra that a command of the Makefile installs, with the files that it runs."""
OPTIONAL = {"tqdm", "accelerate", "lightning_fabric", "mlflow", "numpy", "ray", "swanlab", "transformers"}
"""Modules that the package or a test uses only if they are installed."""
DRAWN_FROM = ("notebook_launcher", "support", "tests")
"""Folders whose modules are found by name when a program imports them; `support` is that of the benchmarks."""


@cache
def project() -> dict[str, Any]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return dict(tomllib.loads(text)["project"])


def requirements_of(extra: str) -> Iterator[Requirement]:
    """Yield the requirements of the package with an extra; of `""`, those of the package alone."""
    lines = project()["optional-dependencies"][extra] if extra else project()["dependencies"]
    for requirement in map(Requirement, lines):
        if canonicalize_name(requirement.name) == "notebook-launcher":
            for inner in requirement.extras:
                yield from requirements_of(inner)
        else:
            yield requirement


def distributions_of(extra: str) -> set[str]:
    """Return the distributions that pip installs for an extra, by the metadata of those that are installed here."""
    found: set[str] = set()
    todo = [(each, each.extras) for each in (*requirements_of(""), *requirements_of(extra))]
    while todo:
        requirement, extras = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in found and not extras:
            continue
        found.add(name)
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # `make bench` alone installs it.
        todo += [
            (each, each.extras)
            for each in map(Requirement, lines)
            if each.marker is None or any(each.marker.evaluate({"extra": word}) for word in ("", *extras))
        ]
    return found


def code_of(path: Path) -> Iterator[str]:
    """Yield the Python code of a program, or of each cell of a notebook without its magics."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield text
    elif path.suffix == ".ipynb":
        for cell in json.loads(text)["cells"]:
            if cell["cell_type"] == "code":
                yield re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", "".join(cell["source"]))


@cache
def modules_of(path: Path) -> frozenset[str]:
    """Return the modules that a file imports, also inside functions, but not for type checkers alone."""
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(code) for code in code_of(path)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            todo += ast.iter_child_nodes(node)
    return frozenset(found)


def files_of(patterns: tuple[str, ...]) -> set[Path]:
    """Return the files of a command, and those of `tests` that they import."""
    files = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    while True:
        named = {name for path in files for name in modules_of(path)}
        ours = {ROOT / f"{name.replace('.', '/')}.py" for name in named if name.startswith("tests.")}
        ours = {path for path in ours if path.is_file()}
        if ours <= files:
            return files
        files |= ours


def foreign_modules(patterns: tuple[str, ...]) -> dict[str, str]:
    """Return the top-level modules that come from other distributions, each with a file that imports it."""
    files = files_of(patterns)
    written = {Path(name).stem for path in files for name in re.findall(r"\w+\.py\b", path.read_text(encoding="utf-8"))}
    ours = {*sys.stdlib_module_names, *DRAWN_FROM, *OPTIONAL, *written, *(path.stem for path in files)}
    return {
        top: path.relative_to(ROOT).as_posix()
        for path in sorted(files)
        for top in {name.partition(".")[0] for name in modules_of(path)} - ours
    }


@cache
def providers() -> dict[str, set[str]]:
    """Return the distributions that each installed module comes from."""
    found = importlib.metadata.packages_distributions()
    return {module: {canonicalize_name(name) for name in names} for module, names in found.items()}


def missing(extra: str, patterns: tuple[str, ...]) -> dict[str, str]:
    """Return the modules that programs import and an extra does not provide, each with a file that imports it."""
    provided = distributions_of(extra)
    return {
        module: file
        for module, file in foreign_modules(patterns).items()
        if not provided & providers().get(module, {canonicalize_name(module)})
    }


@pytest.mark.parametrize("extra", PROGRAMS)
def test_extra_provides_every_import_of_its_command(extra: str) -> None:
    assert missing(extra, PROGRAMS[extra]) == {}


def test_dependencies_provide_every_import_of_the_package() -> None:
    assert missing("", PACKAGE) == {}


def test_import_without_requirement_is_found() -> None:
    assert missing("", PROGRAMS["notebooks"])["matplotlib"].endswith(".ipynb")
