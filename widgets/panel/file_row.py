"""A row of the panel that works with a file: its path, its controls, and a note below them."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import ipywidgets

from notebook_launcher.widgets.panel.fields import STYLE, WIDE

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FileRow"]


class FileRow:
    """A path with controls beside it; the note below shows what was done, or what failed.

    Args:
        path: Shown at first.
        description: Label of the path.
        controls: Widgets to the right of the path.
        hint: Text of the note before anything is done.
    """

    def __init__(self, path: str, description: str, *controls: ipywidgets.Widget, hint: str) -> None:
        self.path = ipywidgets.Text(value=path, description=description, layout=WIDE, style=STYLE)
        self.note = ipywidgets.HTML()
        self.note.add_class("nbp-note-box")
        field = ipywidgets.VBox([self.path])
        field.add_class("nbp-field")
        field.add_class("nbp-path")
        row = ipywidgets.HBox([field, *controls])
        row.add_class("nbp-file")
        self.box = ipywidgets.VBox([row, self.note])
        self.set_note(hint, "hint")

    def attempt(self, act: Callable[[], None]) -> None:
        """Call a function; the note shows the error that it raises, because no cell would."""
        try:
            act()
        except OSError as error:
            self.set_note(f"✕ {error.filename}: {error.strerror}" if error.strerror else f"✕ {error}", "error")
        except Exception as error:  # no cell would show the error
            self.set_note(f"✕ {error}", "error")

    def set_note(self, text: str, level: str) -> None:
        """Show plain text below the row, as a "hint", "done", "warning" or "error"."""
        role = "alert" if level == "error" else "status"
        self.note.value = f'<div class="nbp-note nbp-{level}" role="{role}">{html.escape(text)}</div>'
