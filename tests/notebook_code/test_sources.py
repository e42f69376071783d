"""A function's source, the names that it reads from its notebook, and the values that a script needs."""

from __future__ import annotations

import ast
import linecache
import sys
import types
import xml.etree.ElementTree  # noqa: F401, ICN001 - the code of the tests uses it
from typing import Any

import pytest
import torch

from notebook_launcher.errors import ConfigError
from notebook_launcher.kernel.calls.origin import source_with_needs
from notebook_launcher.notebook_code import attribute_chains, literal_of, names_at_definition, names_in, source_of

CELL = '''"""class Net: a text"""
first = 1

@print
class Net: old = True

# The newest one counts.
@(
    lambda each: each
)
@str.format
class Net(dict):
    """A class."""
    class Net: pass

    size = xml.etree.ElementTree
# After it.

def class_Net(): pass

if first:
    class Net: pass
'''


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> str:
    """A cell of a notebook, as IPython keeps it."""
    name = "<ipython-input-1-feed>"
    monkeypatch.setitem(linecache.cache, name, (len(CELL), None, CELL.splitlines(keepends=True), name))
    return CELL


def test_names_are_those_that_are_global_and_chains_those_of_the_code_and_of_its_f_strings():
    source = (
        "@wrap\ndef f(x, y=DEFAULT):\n    global count\n    count = 1\n    local = used + x\n"
        "    return [g(z) for z in local]\n"
    )
    assert names_in(source) == {"wrap", "DEFAULT", "count", "used", "g"}
    assert names_at_definition(source) == {"wrap", "DEFAULT"}
    assert attribute_chains("def f(): return a.b.c(d.e)") >= {"a.b.c", "d.e"}
    source = (
        'def f(x):\n    """a.text"""\n    x().not_a.name  # a.comment\n    x = 1.5\n'
        '    return f"{in_text.of.f}" + (\n        over.two  # lines\n        .lines)\n'
    )
    assert attribute_chains(source) == {"in_text.of.f", "over.two.lines"}


def test_source_of_a_class_is_its_newest_definition_with_its_decorators(cell: str):
    newest = type("Net", (), {"__module__": "in_no_file"})
    assert source_of(newest) == cell[cell.index("@(") : cell.index("# After it.")]
    with pytest.raises(ConfigError, match="Gone cannot be exported: its source was not found"):
        source_of(type("Gone", (), {"__module__": "in_no_file"}))


@pytest.mark.usefixtures("cell")
def test_cell_that_python_cannot_read_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    broken = ["class Net:\n", "  a\n", " b = '\n", "class Net: pass ("]
    monkeypatch.setitem(linecache.cache, "<broken>", (1, None, broken, "<broken>"))
    assert "size = xml" in source_of(type("Net", (), {"__module__": "in_no_file"}))


def namespace_of(text: str, **names: object) -> dict[str, Any]:
    """Run a cell of a notebook; return its global names."""
    name = f"<ipython-input-{hash(text)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), names)
    return names


@pytest.mark.usefixtures("cell")
def test_no_tree_of_python_objects_is_made(monkeypatch: pytest.MonkeyPatch):
    # Another thread, IPython's, may make one at the same time: two at a time fail on some Pythons.
    net = type("Net", (), {"__module__": "__main__"})
    text = "def train(rate=RATE):\n    return Net(), xml.etree.ElementTree, rate\n"
    main = types.ModuleType("__main__")
    names = {"__name__": "__main__", "Net": net, "RATE": [0.1, (None,)], "xml": sys.modules["xml"]}
    vars(main).update(namespace_of(text, **names))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "__main__", main)
        patch.setattr(ast, "parse", None)
        source = source_with_needs(vars(main)["train"])
    head = "import xml\nimport xml.etree.ElementTree\n\n\nRATE = [0.1, (None,)]\n\n\n@(\n"
    assert source.startswith(head)
    assert source.endswith("\n\n\n" + text)


HOLDS_ITSELF: list[object] = []
HOLDS_ITSELF.append(HOLDS_ITSELF)


class Level(int):
    """A number of a class of the user's."""


LITERALS = [1, -2.5, -0.0, "a'b", [1, (2,)], {"a": {1}}, {1: [{2}]}, None, True, b"x", set(), (1 + 2j)]
WITHOUT = [
    float("nan"), float("inf"), complex(-0.0, 1), (10**5000,), "x" * 3000, object(), [torch.ones(1)], HOLDS_ITSELF,
    Level(1),
]  # fmt: skip


def test_literals_are_read_back_as_they_were_and_other_values_have_none():
    for value in LITERALS:
        text = literal_of(value)
        assert text is not None
        assert eval(text) == value
        assert repr(eval(text)) == repr(value)
    for value in WITHOUT:
        assert literal_of(value) is None
