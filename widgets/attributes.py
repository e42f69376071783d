"""Attributes for screen readers, which core widgets do not set: a script that lies in the page beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anywidget

from notebook_launcher.widgets.assets import STATIC, join_modules

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Attributes"]


class Attributes(anywidget.AnyWidget):
    """Draws nothing; sets the ARIA attributes of the panel that it lies in.

    Args:
        looked_at: Called when the user turns to the panel with the pointer or the keyboard.
    """

    _esm = join_modules(STATIC / "panel.js")

    def __init__(self, looked_at: Callable[[], object], **traits: Any) -> None:
        super().__init__(**traits)
        self.on_msg(lambda _, content, __: content.get("type") == "look" and looked_at())
