"""Formulas as MathML, written when the documentation is built: a page needs neither a script nor a network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util.math import get_node_equation_number

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.writers.html5 import HTML5Translator


def write_inline(translator: HTML5Translator, node: nodes.math) -> NoReturn:
    """Write a formula inside a sentence."""
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def write_block(translator: HTML5Translator, node: nodes.math_block) -> NoReturn:
    """Write a formula on a line of its own, and its number if the text refers to it."""
    translator.body.append(translator.starttag(node, "div", CLASS="formula"))
    translator.body.append(convert(node.astext(), display="block"))
    if node["number"]:
        translator.body.append(f'<span class="eqno">({get_node_equation_number(translator, node)})</span>')
    translator.body.append("</div>")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_html_math_renderer("mathml", (write_inline, None), (write_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
