"""Field for `devices`: all GPUs, some of them, or the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets

from notebook_launcher.widgets.launching.hardware import describe_gpu
from notebook_launcher.widgets.panel.fields import WIDE, Field, Segments

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.machine.devices import Machine

__all__ = ["DevicesField"]

TIPS = {
    "all": "All GPUs: one process for each, unless you set Processes",
    "some": "The GPUs that are ticked",
    "CPU": "No GPU",
}


class DevicesField(Field):
    """A field that reports values of `LaunchConfig.devices`: None, a tuple of indices, or `"cpu"`."""

    def __init__(
        self, key: str, changed: Callable[[str, Any], None], *, machine: Machine, detect_again: Callable[[], None]
    ) -> None:
        self.segments = Segments("Devices", TIPS, self._switched)
        self.boxes = [ipywidgets.Checkbox(indent=False, layout=WIDE) for _ in machine.gpus]
        tip = "Read the GPUs' free memory again"
        self.refresh = ipywidgets.Button(description="Refresh memory", layout=WIDE, tooltip=tip)
        self._list = ipywidgets.VBox([*self.boxes, self.refresh])
        self._list.add_class("nbp-gpus")
        super().__init__(key, "Devices", ipywidgets.VBox([self.segments.control, self._list]), changed)
        if self.boxes:
            self.box.add_class("nbp-wide")
        for box in self.boxes:
            box.observe(lambda _: self._ticked(), "value")
        self.refresh.on_click(lambda _: detect_again())
        self.describe(machine)

    def describe(self, machine: Machine) -> None:
        """Describe the GPUs as they are now."""
        self._why_no_gpu = machine.why_no_gpu
        for box, (at, gpu) in zip(self.boxes, enumerate(machine.gpus), strict=False):
            box.description = describe_gpu(at, gpu)
        self.segments.mark_unfit(dict.fromkeys(("all", "some"), machine.why_no_gpu) if machine.why_no_gpu else {})

    def show(self, value: Any) -> None:
        """Show the chosen devices; if no GPU can be used, None is shown as the CPU."""
        is_cpu = value == "cpu" or (value is None and self._why_no_gpu)
        self.segments.choose("CPU" if is_cpu else "all" if value is None else "some")
        with self.unreported():
            for at, box in enumerate(self.boxes):
                box.value = not is_cpu and (value is None or at in value)
                box.disabled = bool(self._why_no_gpu) or not isinstance(value, tuple)
                box.tooltip = self._why_no_gpu or ("Choose 'some' to pick GPUs" if box.disabled else "")
        self._list.layout.display = None if self.boxes else "none"

    def _switched(self, word: str) -> None:
        everything = tuple(range(len(self.boxes)))
        self.report({"all": None, "CPU": "cpu"}.get(word, everything))

    def _ticked(self) -> None:
        self.report(tuple(at for at, box in enumerate(self.boxes) if box.value))
