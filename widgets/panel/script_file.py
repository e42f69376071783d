"""Export button: the panel's launch as a script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets

from notebook_launcher.exporting.exporter import export
from notebook_launcher.widgets.panel.fields import WIDE
from notebook_launcher.widgets.panel.file_row import FileRow
from notebook_launcher.wording.value_text import name_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.config import LaunchConfig

__all__ = ["ScriptFile"]

HINT = "The launch as a script for torchrun, notebook-launcher and Slurm, with the same numbers if a seed is set."


class ScriptFile:
    """A path, a box for a Slurm job, and a button; below them a note with the commands, or with the error.

    Args:
        function: The function of the panel; None: there is none to export.
        get_call: Returns the positional arguments, the arguments by name, and the options.
    """

    def __init__(
        self, function: Any, get_call: Callable[[], tuple[tuple[Any, ...], dict[str, Any], LaunchConfig]]
    ) -> None:
        self._function = function
        self._get_call = get_call
        name = "train" if function is None else name_of(function).rpartition(".")[2]
        self.slurm = ipywidgets.Checkbox(value=False, description="Slurm job", indent=False, layout={"width": "auto"})
        self.export_button = ipywidgets.Button(
            description="Export", layout=WIDE, tooltip="Write the script, and a job file if Slurm job is ticked"
        )
        self._row = FileRow(f"{name}.py", "Script", self.slurm, self.export_button, hint=HINT)
        self.path, self.note, self.box = self._row.path, self._row.note, self._row.box
        self.export_button.on_click(lambda _: self._row.attempt(self._export))

    def _export(self) -> None:
        args, kwargs, config = self._get_call()
        if self._function is None:
            self._row.set_note("✕ The panel has no function: make it with ConfigPanel(train).", "error")
            return
        exported = export(
            self._function, self.path.value, args=args, kwargs=kwargs, config=config, slurm=self.slurm.value
        )
        self._row.set_note(f"Written. {' · '.join([*exported.commands, *exported.notes])}", "done")
