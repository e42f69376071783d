"""Small runs, and folders of made-up runs, for tests of recording."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from notebook_launcher import report
from notebook_launcher.history import run_folders

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE = 20.0


def speak(number: float = 0.5) -> int:
    print("hello")
    for step in range(3):
        report(step=step, loss=number, accuracy=step / 2)
    return 7


def make_run(home: Path, number: int, *, size: int = 0, **summary: Any) -> Path:
    folder = home / f"20261121-{number:06}-train-00000{number % 10}"
    folder.mkdir(parents=True)
    (folder / "rank-0.log").write_bytes(b"x" * size)
    data = {"name": "train", "state": "done", "started": number, "seconds": 1.0, "num_processes": 1}
    (folder / run_folders.SUMMARY).write_text(json.dumps({**data, "summary": "", "seed": 0, **summary}))
    return folder
