"""Part of a form that opens and closes; unlike ipywidgets' Accordion, its head can be reached by the keyboard."""

from __future__ import annotations

import ipywidgets

__all__ = ["Section"]


class Section:
    """A head that is a button, and a body that it shows; `box` is the widget to lay out."""

    def __init__(self, title: str, body: ipywidgets.Widget) -> None:
        self._title = title
        self._remark = ""
        self.head = ipywidgets.ToggleButton(layout={"width": "auto"})
        self.head.add_class("nbp-section-head")
        self.body = ipywidgets.VBox([body])
        self.body.add_class("nbp-section-body")
        self.box = ipywidgets.VBox([self.head, self.body])
        self.box.add_class("nbp-section")
        self.head.observe(lambda _: self._draw(), "value")
        self._draw()

    @property
    def is_open(self) -> bool:
        """True while the body is shown."""
        return bool(self.head.value)

    def remark(self, text: str) -> None:
        """Write a remark behind the title, which is seen while the section is closed."""
        self._remark = text
        self._draw()

    def _draw(self) -> None:
        self.head.description = f"{'▾' if self.is_open else '▸'} {self._title}{self._remark and f' ({self._remark})'}"
        self.head.tooltip = "Hide" if self.is_open else "Show"
        self.body.layout.display = None if self.is_open else "none"
