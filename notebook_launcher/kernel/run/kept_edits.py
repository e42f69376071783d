"""Name, tags and notes that the user gives a run in progress; its folder, once there is one, keeps them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from notebook_launcher.archive.edits import write_edits

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["RunEdits"]


class RunEdits:
    """The edits of one run. Any thread may change them; the run's thread gives the folder."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, Any] = {}
        self._folder: Path | None = None

    def __getitem__(self, key: str) -> Any:
        """Return the edited name, tags or notes; None if they were not edited."""
        return self._values.get(key)

    def change(self, values: dict[str, Any]) -> None:
        """Add edits; raises `OSError` if the folder is there and cannot be written."""
        with self._lock:
            self._values = {**self._values, **values}
            if self._folder is not None:
                write_edits(self._folder, values)

    def keep_in(self, folder: Path) -> None:
        """Write the edits to the run's new folder, now and with each change; raises `OSError`."""
        with self._lock:
            self._folder = folder
            if self._values:
                write_edits(folder, self._values)
