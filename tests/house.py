"""Count the house: `make house` prints the size of the package and of its tests as docs/architecture.md shows it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "notebook_launcher"


def sources(*folders: str) -> dict[str, str]:
    """Return the source of each module below some folders, by its dotted name."""
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    named = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    return {
        name if name.startswith((PACKAGE, "tests")) else f"{PACKAGE}.{name}": path.read_text(encoding="utf-8")
        for name, path in named.items()
    }


def imported(tree: ast.AST, modules: dict[str, str]) -> Iterator[str]:
    """Yield the modules of the package that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules else node.module


def import_lines(tree: ast.AST) -> int:
    """Return the number of lines that imports and `__all__` take."""
    return sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        or (isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets))
    )


def inner_imports(tree: ast.AST) -> int:
    """Return the number of imports in functions."""
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    found = (inner for node in functions for inner in ast.walk(node) if isinstance(inner, (ast.Import, ast.ImportFrom)))
    return len({(node.lineno, node.col_offset) for node in found})


def forwards(node: ast.AST) -> bool:
    """Return True for a function that only hands its own arguments, in their order, to another one."""
    if not isinstance(node, ast.FunctionDef):
        return False
    body = [item for item in node.body if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))]
    call = getattr(body[0], "value", None) if len(body) == 1 else None
    if not isinstance(call, ast.Call) or not isinstance(body[0], (ast.Return, ast.Expr)) or not call.args:
        return False
    mine = [argument.arg for argument in node.args.args if argument.arg not in ("self", "cls")]
    return mine == [getattr(argument, "id", None) for argument in call.args] and not call.keywords


def main() -> None:
    """Print the table."""
    modules = sources(PACKAGE, "widgets")
    trees = {name: ast.parse(source) for name, source in modules.items()}
    importers: dict[str, set[str]] = {name: set() for name in modules}
    for name, tree in trees.items():
        for other in imported(tree, modules):
            if other in importers and other != name:
                importers[other].add(name)
    text = "\n".join(modules.values())
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    bases = [ast.unparse(base) for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases]
    rows = {
        "Python lines, package and widgets": text.count("\n"),
        "modules": len(modules),
        "modules with exactly one importer": sum(len(found) == 1 for found in importers.values()),
        "modules under 40 lines": sum(source.count("\n") < 40 for source in modules.values()),
        "lines of imports and `__all__`": sum(map(import_lines, trees.values())),
        "imports inside functions": sum(map(inner_imports, trees.values())),
        "`noqa`": len(re.findall(r"#\s*noqa", text)),
        "`type: ignore`": len(re.findall(r"#\s*type: ignore", text)),
        "Protocol classes": sum(base.split("[")[0] == "Protocol" for base in bases),
        "pure forwarders": sum(map(forwards, nodes)),
        "lines of tests": "\n".join(sources("tests").values()).count("\n"),
        "lines of JavaScript": sum(
            path.read_text(encoding="utf-8").count("\n")
            for path in (ROOT / "widgets" / "static").rglob("*.js")
            if ".min." not in path.name and ".iife." not in path.name
        ),
        "terms in the vocabulary": len(
            re.findall(r"(?m)^\| (?!term )", (ROOT / "docs" / "vocabulary.md").read_text(encoding="utf-8"))
        ),
    }
    for name, number in rows.items():
        print(f"{name:<36}{number:>9,}")


if __name__ == "__main__":
    main()
