"""Names that a function's source reads from its notebook."""

from __future__ import annotations

from notebook_launcher.notebook_code.sources import attribute_chains, names_at_definition, names_in


def test_names_are_those_that_are_global():
    source = (
        "@wrap\ndef f(x, y=DEFAULT):\n    global count\n    count = 1\n    local = used + x\n"
        "    return [g(z) for z in local]\n"
    )
    assert names_in(source) == {"wrap", "DEFAULT", "count", "used", "g"}
    assert names_at_definition(source) == {"wrap", "DEFAULT"}
    assert attribute_chains("def f(): return a.b.c(d.e)") >= {"a.b.c", "d.e"}
