"""Adapts this package's docstrings to Sphinx.

An indented block after a paragraph is an example, and becomes a block of code. A colon in a sentence does not separate
a type. A name in backticks becomes a link if the reference has the name. Names of other packages stay text, because
their references are not available without a network.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from docutils import nodes
from docutils.utils import unescape
from public_names import PACKAGES, public_name_of
from sphinx.addnodes import pending_xref

if TYPE_CHECKING:
    from docutils.parsers.rst.states import Inliner
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

SECTION = re.compile(r"^\w[\w ]*:$")
LIST_ITEM = re.compile(r"^\s*([-*.]|\d+\.) ")
COLON = "\N{MODIFIER LETTER COLON}"


def mark_examples(_app: Any, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Put a code directive before each indented block of the text, in place."""
    marked: list[str] = []
    in_section = in_block = False
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        if SECTION.match(line) and after.startswith(" "):
            in_section = True
        elif line and not line.startswith(" "):
            in_section = in_block = False
        elif line and not (in_section or in_block or before.strip() or LIST_ITEM.match(line)):
            marked += [f".. code-block:: {'json' if line.lstrip().startswith('{') else 'python'}", ""]
            in_block = True
        marked.append(line)
    lines[:] = marked


def hide_colons(_app: Any, what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Replace colons in the texts of attributes and return values, where napoleon would read a type before them."""
    in_returns = what in ("attribute", "data", "property")
    for number, line in enumerate(lines):
        if line and not line.startswith(" "):
            in_returns = line in ("Returns:", "Yields:") or (number == 0 and in_returns)
        if in_returns and line not in ("Returns:", "Yields:"):
            lines[number] = line.replace(":", COLON)


def show_colons(_app: Any, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Restore the colons that `hide_colons` replaced."""
    lines[:] = [line.replace(COLON, ":") for line in lines]


def tidy_signature(
    _app: Any, _what: str, _name: str, _obj: Any, _options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Write defaults that a dataclass creates per instance as `...`."""
    return signature and signature.replace("<factory>", "..."), returns


def code_role(
    _name: str, rawtext: str, text: str, _line: int, inliner: Inliner, *_: Any
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """Turn text in single backticks into code, and into a link if it is a public name."""
    text = unescape(text)
    literal = nodes.literal(rawtext, text, classes=["xref"])
    document: Any = inliner.document
    reference = pending_xref("", literal, refdomain="", reftype="public", reftarget=text, refwarn=False)
    reference["refdoc"] = document.settings.env.current_document.docname
    return [reference], []


def link(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement) -> Any:
    """Resolve a reference that Sphinx could not resolve: by its public name, or as plain code."""
    is_backticked = node["reftype"] == "public"
    if not (is_backticked or node.get("refdomain") == "py"):
        return None
    target = node["reftarget"].lstrip("~.").removesuffix("()")
    public = public_name_of(target)
    best = _find(env, public or target)
    if best is not None:
        domain = env.domains.python_domain
        return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", best, node, content)
    # None: Sphinx warns of a public name that the reference lacks.
    return None if public is not None and not is_backticked else content


def _find(env: BuildEnvironment, wanted: str) -> str | None:
    """Return the described name that ends with `wanted`, in the order of the packages; a bare word must match whole."""
    found = []
    for name in env.domains.python_domain.objects:
        package = name.removesuffix(f".{wanted}") if name != wanted else name.rpartition(".")[0]
        if name == wanted or (name != package and package in PACKAGES):
            found.append((PACKAGES.index(package) if package in PACKAGES else len(PACKAGES), name))
    return min(found)[1] if found else None


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_role("public", code_role)
    app.connect("autodoc-process-docstring", mark_examples, priority=100)  # napoleon is at 500
    app.connect("autodoc-process-docstring", hide_colons, priority=200)
    app.connect("autodoc-process-docstring", show_colons, priority=900)
    app.connect("autodoc-process-signature", tidy_signature)
    app.connect("missing-reference", link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
