"""Metrics as lines of JSON in a folder: no service, no dependency, readable while the run writes."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.training.tracker import GeneralTracker

if TYPE_CHECKING:
    from io import FileIO

__all__ = ["JSONLinesTracker", "plain"]


class JSONLinesTracker(GeneralTracker):
    """Writes `<logging_dir>/<project_name>/metrics.jsonl`, and hyperparameters to `config.json` beside it.

        {"step": 3, "time": 1790000000.25, "values": {"loss": 0.5, "grad_norm": "Infinity"}}

    One object per line, in the order of the calls. `step` is null if none was given, `time` is in seconds
    since 1970. A tensor or array of one element is its number, a larger one its nested lists. Numbers that
    JSON has not are the strings "NaN", "Infinity" and "-Infinity", which `float()` takes; what JSON has no
    form for at all is its `repr`. Arguments of `log` beyond these stand beside `values`.

    Each line is one write to a file that is opened for appending, so it is there when `log` returns, and
    processes that share the file do not mix theirs. A later run of the same name appends; what a full disk
    or a lost machine left of a line is cut off first.

    Args:
        run_name: The project's name, which becomes a folder.
        logging_dir: Where it goes.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self.folder = Path(logging_dir) / run_name
        self._file: FileIO | None = None

    @property
    def tracker(self) -> Path:
        """The file."""
        return self.folder / "metrics.jsonl"

    def start(self) -> None:
        """Make the folder and open the file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(self.tracker)
        self._file = open(self.tracker, "ab", buffering=0)  # noqa: SIM115 - finish() closes it

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write `config.json`, whole or not at all."""
        text = json.dumps(plain(values), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        aside = self.folder / f".config.json.{os.getpid()}"
        aside.write_text(text, encoding="utf-8")
        aside.replace(self.folder / "config.json")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Append a line.

        Raises:
            RuntimeError: Before `start`, or after `finish`.
            OSError: There is no room for the whole line.
        """
        if self._file is None:
            raise RuntimeError(
                f"{self.tracker} is not open. Call init_trackers() first, and log before end_training()."
            )
        fields = {**kwargs, "step": step, "time": time.time(), "values": values}
        line = json.dumps(plain(fields), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, "no room for a whole line", os.fspath(self.tracker))

    def finish(self) -> None:
        """Close the file; idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


def plain(value: Any) -> Any:
    """Return a value as JSON has it; see `JSONLinesTracker`."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, (int, float)):
        return _number(value)
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if callable(getattr(value, "tolist", None)):  # A tensor, an array or one of NumPy's numbers.
        only = listed = value.tolist()
        while isinstance(only, list) and len(only) == 1:
            (only,) = only
        return plain(listed if isinstance(only, list) else only)
    return repr(value)


def _number(value: float) -> float | str:
    if isinstance(value, int):
        return int(value)
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _cut_torn_line(path: Path) -> None:
    """Cut off what stands after the last newline, unless it is a whole object that only lacks its own."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        whole, torn = 0, b""
        for line in file:
            if line.endswith(b"\n"):
                whole += len(line)
            else:
                torn = line
        if not torn:
            return
        try:
            json.loads(torn)
        except ValueError:
            file.truncate(whole)
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
