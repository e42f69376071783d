"""Attributes for screen readers, which core widgets do not set: a script that lies in the page beside them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Attributes"]

SCRIPT = Path(__file__).parent / "static" / "panel.js"


class Attributes(anywidget.AnyWidget):
    """Draws nothing; sets the ARIA attributes of the panel that it lies in.

    Args:
        looked_at: Called when the user turns to the panel with the pointer or the keyboard.
    """

    _esm = SCRIPT.read_text(encoding="utf-8")

    def __init__(self, looked_at: Callable[[], object], **traits: Any) -> None:
        super().__init__(**traits)
        self.on_msg(lambda _, content, __: content.get("type") == "look" and looked_at())
