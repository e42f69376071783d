"""Load and Save buttons for Accelerate's settings file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ipywidgets

from notebook_launcher.config import load_accelerate_file
from notebook_launcher.settings import accelerate_yaml
from notebook_launcher.widgets.panel.fields import WIDE
from notebook_launcher.widgets.panel.file_row import FileRow

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.config import LaunchConfig

__all__ = ["SettingsFile"]

HINT = "Written by `accelerate config`, read by `accelerate launch`. It does not hold the function's arguments."


class SettingsFile:
    """A path and two buttons; below them a note with errors, or with the keys that a load ignored."""

    def __init__(self, get: Callable[[], LaunchConfig], put: Callable[[LaunchConfig], None]) -> None:
        self._get = get
        self._put = put
        self.load_button = ipywidgets.Button(
            description="Load", layout=WIDE, tooltip="Replace the settings by the file's settings"
        )
        self.save_button = ipywidgets.Button(
            description="Save", layout=WIDE, tooltip="Write the settings to the file, for `accelerate launch`"
        )
        self._row = FileRow(str(accelerate_yaml.default_path()), "Path", self.load_button, self.save_button, hint=HINT)
        self.path, self.note, self.box = self._row.path, self._row.note, self._row.box
        self.load_button.on_click(lambda _: self._row.attempt(self._load))
        self.save_button.on_click(lambda _: self._row.attempt(self._save))

    def _load(self) -> None:
        config, file = load_accelerate_file(self.path.value)
        self._put(config)
        ignored = "; ".join(file.ignored)
        left_out = f" Not used here, but kept when you save: {ignored}." if ignored else ""
        self._row.set_note(f"Loaded.{left_out}", "warning" if left_out else "done")

    def _save(self) -> None:
        path = self._get().to_yaml(self.path.value)
        self._row.set_note(f"Saved: accelerate launch --config_file {path}", "done")
