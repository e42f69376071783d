"""The list of messages, from the source of `notebook_launcher/messaging/messages.py`."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from sphinx.util.docutils import SphinxDirective

from notebook_launcher.messaging import messages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from docutils import nodes
    from sphinx.application import Sphinx

ROUTE = re.compile(r"^    (\S[^\n]*? -> \S[^\n]*?)  +((?:[\w, ]|\n {10,})+)$", re.MULTILINE)


def routes() -> Iterator[tuple[str, list[str]]]:
    """Yield each direction with the names of its records, as the module's docstring lists them."""
    for route, names in ROUTE.findall(messages.__doc__ or ""):
        yield route, re.findall(r"\w+", names)


class MessageList(SphinxDirective):
    """`message-list::` lists every record with its meaning and its fields."""

    def run(self) -> list[nodes.Node]:
        """Return a table for each direction."""
        self.env.note_dependency(messages.__file__)
        lines: list[str] = []
        for route, names in routes():
            lines += [f"**{route}**", "", "| record | meaning | fields |", "|---|---|---|"]
            lines += [_row(getattr(messages, name)) for name in names]
            lines.append("")
        return self.parse_text_to_nodes("\n".join(lines))


def _row(record: type[Any]) -> str:
    said = " ".join((record.__doc__ or "").split())
    # Most records are named tuples, the others dataclasses.
    names = record._fields if hasattr(record, "_fields") else [field.name for field in dataclasses.fields(record)]
    fields = ", ".join(f"`{name}`" for name in names)
    return f"| `{record.__name__}` | {said} | {fields or 'none'} |".replace("\n", " ")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_directive("message-list", MessageList)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
