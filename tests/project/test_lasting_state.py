"""The modules with state of their own, instead of a run's or an Accelerator's, are those that architecture.md lists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "notebook_launcher"
FILE = re.compile(r"`([\w/]+\.py)`")
CHANGERS = {"add", "append", "clear", "pop", "setdefault", "update"}
HOLDERS = {"ContextVar", "Lock", "RLock", "WeakKeyDictionary", "WeakSet", "WeakValueDictionary", "count", "local"}
"""Classes of the standard library whose instances are made to change."""


def holds_state(source: str) -> bool:
    """Return True if a module has a name, or a class an attribute, that the module changes after it was imported."""
    tree = ast.parse(source)
    names = {
        ast.unparse(target)
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    made = {ast.unparse(node.value.func).rpartition(".")[2] for node in tree.body if _is_made(node)}  # type: ignore[attr-defined]
    bodies = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    changes = any(_changes(node, names, classes) for body in bodies for node in ast.walk(body))
    return changes or bool(made & HOLDERS) or any(_is_kept_by_process(body) for body in bodies)


def _is_made(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call)


def _changes(node: ast.AST, names: set[str], classes: set[str]) -> bool:
    match node:
        case ast.Global():
            return True
        case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
            return name in names
        case ast.Attribute(value=ast.Name(id=name), ctx=ast.Store()):
            return name in classes
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)):
            return name in names and method in CHANGERS
    return False


def _is_kept_by_process(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True for a cached function that takes the number of its process: what it returns is the process's."""
    is_cached = any("cache" in ast.unparse(decorator) for decorator in function.decorator_list)
    return is_cached and [argument.arg for argument in function.args.args] == ["_pid"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("A = {}\ndef f(): A['x'] = 1", True),
        ("A = []\ndef f(): A.append(1)", True),
        ("class A:\n    x = 1\ndef f(): A.x = 2", True),
        ("import itertools\n_numbers = itertools.count(1)", True),
        ("@lru_cache\ndef f(_pid): return object()", True),
        ("A = {'x': 1}\ndef f(): return A['x']", False),
        ("A = {}\ndef f():\n    a = {}\n    a['x'] = 1", False),
        ("@lru_cache\ndef f(name): return name", False),
    ],
)
def test_state_is_found(source, expected):
    assert holds_state(source) is expected


def test_modules_with_lasting_state_are_listed():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [row for row in text.partition("## Lasting state of a process")[2].splitlines() if row.startswith("| `")]
    listed = {name.rpartition("/")[2] for row in rows for name in FILE.findall(row.split("|")[1])}
    compat = {"state.py"}  # Its classes share one dictionary, which their instances have as `__dict__`.
    found = {path.name for path in PACKAGE.rglob("*.py") if holds_state(path.read_text(encoding="utf-8"))}
    assert found | compat == listed
