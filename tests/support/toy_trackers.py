"""Trackers that remember what they were told, and the lines that the tracker of files has written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from notebook_launcher.training.recording.tracker_classes import GeneralTracker

if TYPE_CHECKING:
    from pathlib import Path


class Memory(GeneralTracker):
    """Remembers what it was told."""

    name = "memory"
    requires_logging_directory = False

    def __init__(self, run_name: str = "", **kwargs: Any) -> None:
        super().__init__()
        self.told: list[Any] = [("made", run_name, kwargs)]

    @property
    def tracker(self) -> list[Any]:
        return self.told

    def start(self) -> None:
        self.told.append("started")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.told.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.told.append((values, step, kwargs))

    def finish(self) -> None:
        self.told.append("finished")


class Everywhere(Memory):
    name = "everywhere"
    main_process_only = False


def lines_of(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
