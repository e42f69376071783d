"""Load and Save buttons for Accelerate's settings file."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import ipywidgets

from notebook_launcher import accelerate_yaml
from notebook_launcher.config import load_accelerate_file
from notebook_launcher.widgets.fields import STYLE, WIDE

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.config import LaunchConfig

__all__ = ["SettingsFile"]


class SettingsFile:
    """A path and two buttons; below them a note with errors, or with the keys that a load ignored."""

    def __init__(self, get: Callable[[], LaunchConfig], put: Callable[[LaunchConfig], None]) -> None:
        self._get = get
        self._put = put
        self.path = ipywidgets.Text(
            value=str(accelerate_yaml.default_path()), description="Path", layout=WIDE, style=STYLE
        )
        self.load_button = ipywidgets.Button(
            description="Load", layout=WIDE, tooltip="Replace the settings by those of the file"
        )
        self.save_button = ipywidgets.Button(
            description="Save", layout=WIDE, tooltip="Write the settings to the file, for `accelerate launch`"
        )
        self.note = ipywidgets.HTML()
        self.note.add_class("nbp-note-box")
        field = ipywidgets.VBox([self.path])
        field.add_class("nbp-field")
        field.add_class("nbp-path")
        row = ipywidgets.HBox([field, self.load_button, self.save_button])
        row.add_class("nbp-file")
        self.box = ipywidgets.VBox([row, self.note])
        self.load_button.on_click(lambda _: self._attempt(self._load))
        self.save_button.on_click(lambda _: self._attempt(self._save))
        self._set_note(
            "Written by `accelerate config`, read by `accelerate launch`. It does not hold the function's arguments.",
            "hint",
        )

    def _attempt(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - no cell would show the error
            self._set_note(f"✕ {error}", "error")

    def _load(self) -> None:
        config, file = load_accelerate_file(self.path.value)
        self._put(config)
        ignored = "; ".join(file.ignored)
        left_out = f" Not used here, but kept when you save: {ignored}." if ignored else ""
        self._set_note(f"Loaded.{left_out}", "warning" if left_out else "done")

    def _save(self) -> None:
        path = self._get().to_yaml(self.path.value)
        self._set_note(f"Saved: accelerate launch --config_file {path}", "done")

    def _set_note(self, text: str, level: str) -> None:
        role = "alert" if level == "error" else "status"
        self.note.value = f'<div class="nbp-note nbp-{level}" role="{role}">{html.escape(text)}</div>'
