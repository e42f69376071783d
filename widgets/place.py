"""Cells and their outputs that show a widget, or its picture once the widget is gone.

A panel whose cell is run again makes room for the new one and is closed.
"""

from __future__ import annotations

import dataclasses
import html
import sys
import uuid
from typing import TYPE_CHECKING, Any

import ipywidgets

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

    from notebook_launcher.kernel.display.sink import Sink


class PanelCell:
    """The cells that show a panel, each with the execution that showed it."""

    def __init__(self) -> None:
        self.newest = ""
        """Cell that was run last."""
        self.executions: dict[str, Any] = {}

    def add(self, message: Any) -> bool:
        """Note the cell that a message, or else marimo, executes. Return True if this execution is a new one."""
        cell, execution = _execution_of(message) if message else _execution_in_marimo()
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


def _execution_of(message: Any) -> tuple[str, Any]:
    """Return the id of a message's cell, else its code, and the execution; empty if it executes no cell."""
    cell = message.get("metadata", {}).get("cellId") or message.get("content", {}).get("code") or ""
    return str(cell), message["header"]["msg_id"]


def _execution_in_marimo() -> tuple[str, Any]:
    if (marimo := sys.modules.get("marimo._runtime.context")) is None or not marimo.runtime_context_installed():
        return "", None
    execution = marimo.get_context().execution_context
    # Executions of one cell are equal; as long as one is held here, no other has its id.
    return ("", None) if execution is None else (str(execution.cell_id), (id(execution), execution))


def view_of(widget: ipywidgets.Widget) -> dict[str, Any]:
    """Return a bundle that shows a widget."""
    return {WIDGET_VIEW: {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}}


def open_widgets() -> list[ipywidgets.Widget]:
    """Return the kernel's widgets that are not closed."""
    # ipywidgets 7.7 has them in a public attribute of the class, which 8 has deprecated.
    instances = getattr(ipywidgets.widgets.widget, "_instances", None)
    return list((ipywidgets.Widget.widgets if instances is None else instances).values())


@dataclasses.dataclass(frozen=True, slots=True)
class ReplacedOutput:
    """An output of a cell that is replaced later, which a page finds by its identifier."""

    sink: Sink
    """The cell."""
    display_id: str
    """Identifier of the output, as Jupyter's messages carry it."""

    @classmethod
    def show(cls, sink: Sink, bundle: Mapping[str, Any]) -> Self:
        """Show a bundle in a cell, and return its output."""
        output = cls(sink, uuid.uuid4().hex)
        sink.display(bundle, transient={"display_id": output.display_id})
        return output

    def replace(self, bundle: Mapping[str, Any]) -> None:
        """Show another bundle in its place."""
        self.sink.display(bundle, transient={"display_id": self.display_id}, update=True)


# --------------------------------------------------------------------------------------------------------------------
# Picture below a panel: a saved notebook shows the picture when the widget is gone.
#
# JupyterLab 4.6 takes the widget's representation of an output that it trusts, even if the kernel that had the widget
# is gone, and then shows "model not found". The picture is therefore an output of its own, and its style sheet hides
# either the picture or the dead widget above it. A notebook that is not trusted shows the picture without any script
# or style sheet.


WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

STYLE = """
body:has(.{live}:not(.jupyter-widgets-disconnected)) .{kept} {{ display: none }}
body:has(.{live}:not(.jupyter-widgets-disconnected)) .jp-OutputArea-child:has(.{kept}) {{ display: none }}
body:not(:has(.{live}:not(.jupyter-widgets-disconnected))) .jp-OutputArea-child:has(+ .jp-OutputArea-child .{kept}) \
{{ display: none }}
"""
"""Style sheet that shows the panel while its kernel lives, else the picture."""
CELL = "padding:2px 16px 2px 0;border:0;text-align:left;vertical-align:baseline"
MUTED = "opacity:.75"
CODE = "margin:4px 0 0;padding:8px;background:rgba(128,128,128,.12);white-space:pre-wrap;overflow-wrap:anywhere"


class Kept:
    """Outputs with the picture of one panel, each below a view of the panel."""

    def __init__(self) -> None:
        name = uuid.uuid4().hex
        self.live = f"nbp-live-{name}"
        """CSS class of the panel, which nothing else in the page has."""
        self._kept = f"nbp-kept-{name}"
        self._outputs: list[ReplacedOutput] = []
        self._shown = ""

    @property
    def is_shown(self) -> bool:
        """True if any output has the picture."""
        return bool(self._outputs)

    def show(self, sink: Sink, picture: str, text: str) -> None:
        """Add an output with the picture to a cell."""
        self._outputs.append(ReplacedOutput.show(sink, self._bundle(picture, text)))
        self._shown = picture

    def renew(self, picture: str, text: str) -> None:
        """Replace the picture in all outputs."""
        if picture == self._shown:
            return
        self._shown = picture
        for output in self._outputs:
            output.replace(self._bundle(picture, text))

    def close(self) -> None:
        """Leave the pictures as they are."""
        self._outputs.clear()

    def _bundle(self, picture: str, text: str) -> dict[str, Any]:
        style = STYLE.format(live=self.live, kept=self._kept)
        return {"text/html": f'<style>{style}</style><div class="{self._kept}">{picture}</div>', "text/plain": text}


def show_live(widget: ipywidgets.DOMWidget, sink: Sink, picture: str, text: str) -> None:
    """Show a widget in a cell, and below it the picture that stays."""
    kept = Kept()
    widget.add_class(kept.live)
    sink.display({**view_of(widget), "text/html": "", "text/plain": text})
    kept.show(sink, picture, text)


def panel_html(title: str, rows: Mapping[str, str], status: str, code: str) -> str:
    """Return a panel as HTML that needs no script and no style sheet.

    Args:
        title: The function's name.
        rows: The settings, by label.
        status: The state of the run, or of the form.
        code: Code for the same launch.
    """
    cells = "".join(
        f'<tr style="background:none"><td style="{CELL};{MUTED}">{html.escape(label)}</td>'
        f'<td style="{CELL}">{html.escape(value)}</td></tr>'
        for label, value in rows.items()
    )
    return (
        f'<div style="font-weight:600">Launch <code>{html.escape(title)}</code></div>'
        f'<div style="{MUTED}">Last picture of the panel. Run this cell to use the panel.</div>'
        f'<table style="border-collapse:collapse;margin:8px 0">{cells}</table>'
        f"<div>{html.escape(status)}</div>"
        f'<pre style="{CODE}"><code style="background:none;padding:0">{html.escape(code)}</code></pre>'
    )
