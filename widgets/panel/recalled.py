"""Line of a panel that lists the settings taken from an earlier run, with a button that resets them."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import ipywidgets

from notebook_launcher.widgets.panel.fields import WIDE

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Recalled"]


class Recalled:
    """A text and a button, which are hidden at first; `box` is the widget to lay out."""

    def __init__(self, forget: Callable[[], object]) -> None:
        self.note = ipywidgets.HTML()
        tip = "Take these settings back"
        self.button = ipywidgets.Button(description="Back to defaults", layout=WIDE, tooltip=tip)
        self.box = ipywidgets.HBox([self.note, self.button], layout={"display": "none"})
        self.box.add_class("nbp-recalled")
        self.button.on_click(lambda _: forget())

    def show(self, text: str) -> None:
        """Show the line; hide it if the text is empty."""
        self.note.value = f'<span class="nbp-note" role="status">{html.escape(text)}</span>'
        self.box.layout.display = None if text else "none"
