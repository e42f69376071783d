"""Cells that show a panel. A panel whose cell is run again makes room for the new one and is closed."""

from __future__ import annotations

from typing import Any

import ipywidgets

__all__ = ["PanelCell", "close_children", "open_widgets"]


class PanelCell:
    """The cells that show a panel, each with the execution that showed it."""

    def __init__(self) -> None:
        self.newest = ""
        """Cell that was run last."""
        self.executions: dict[str, str] = {}

    def add(self, message: Any) -> bool:
        """Note the cell that a message executes. Return True if this execution had not been noted yet."""
        cell, execution = _cell_of(message), message["header"]["msg_id"] if message else ""
        if not cell or self.executions.get(cell) == execution:
            return False
        self.newest, self.executions[cell] = cell, execution
        return True

    def is_left_to(self, other: PanelCell) -> bool:
        """Return True if the newest cell of another panel was the last cell to show this panel."""
        cell = other.newest
        if self.executions.get(cell, other.executions[cell]) == other.executions[cell]:
            return False  # Another cell, or two panels of one execution.
        if len(self.executions) == 1:
            return True
        del self.executions[cell]
        return False


def _cell_of(message: Any) -> str:
    """Return the id of the cell that a message executes, else its code; empty if the message executes no cell."""
    if not message:
        return ""
    return str(message.get("metadata", {}).get("cellId") or message.get("content", {}).get("code") or "")


def open_widgets() -> list[ipywidgets.Widget]:
    """Return the kernel's widgets that are not closed."""
    # ipywidgets 7.7 has them in a public attribute of the class, which 8 has deprecated.
    instances = getattr(ipywidgets.widgets.widget, "_instances", None)
    return list((ipywidgets.Widget.widgets if instances is None else instances).values())


def close_children(widget: ipywidgets.Widget) -> None:
    """Close what a widget holds: its children with theirs, and the layouts and styles, which are widgets too."""
    for child in getattr(widget, "children", ()):
        close_children(child)
        child.close()
    held = widget._trait_values  # noqa: SLF001 - asked for by its name, a style would be made again
    for part in (held.get("layout"), held.get("style")):
        if part is not None:
            part.close()
