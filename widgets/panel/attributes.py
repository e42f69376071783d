"""Attributes for screen readers, which core widgets do not set: a script beside them in the page sets them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anywidget

from notebook_launcher.widgets.assets import STATIC, join_modules

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Attributes"]


class Attributes(anywidget.AnyWidget):
    """An invisible widget that sets the ARIA attributes of the panel around it.

    Args:
        looked_at: Called when the user turns to the panel with the pointer or the keyboard.
    """

    _esm = join_modules(STATIC / "panel.js")

    def __init__(self, looked_at: Callable[[], object], **traits: Any) -> None:
        super().__init__(**traits)
        self.on_msg(lambda _, content, __: content.get("type") == "look" and looked_at())
