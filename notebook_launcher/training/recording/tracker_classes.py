"""Trackers: places that a training writes its metrics to, as lines of JSON or for TensorBoard."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.files import replace_file
from notebook_launcher.training.recording.logged_values import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from io import FileIO


class GeneralTracker:
    """Base of all trackers, by Accelerate's names; a subclass defines `name`, `requires_logging_directory`, `tracker`.

    A tracker is made with the project's name, then the logging folder if it requires one, then its own arguments.
    Everything that costs something belongs in `start`, which runs only where the tracker is used.

    Raises:
        NotImplementedError: The subclass lacks one of the three.
    """

    name: str
    """The name of the tracker in `log_with` and `get_tracker`."""
    requires_logging_directory: bool
    """True if the tracker is made with a folder."""
    main_process_only: bool = True
    """True if the tracker runs on the main process alone; False: on every process."""

    def __init__(self) -> None:
        missing = [name for name in ("name", "requires_logging_directory") if not hasattr(self, name)]
        missing += ["tracker"] if type(self).tracker is GeneralTracker.tracker else []
        if missing:
            raise NotImplementedError(f"{type(self).__name__} lacks {', '.join(missing)}: a tracker must define them.")

    @property
    def tracker(self) -> Any:
        """The object that the tracker writes with: a writer, a client, a file."""
        raise NotImplementedError(f"{type(self).__name__} lacks tracker: a tracker must define it.")

    def start(self) -> None:
        """Open the file, writer or connection of the tracker."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the run's hyperparameters."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write metrics; `kwargs` are what `Accelerator.log(log_kwargs=...)` has for this tracker."""

    def finish(self) -> None:
        """Close what `start` opened."""


class BlankTracker(GeneralTracker):
    """A tracker that does nothing; `get_tracker` returns it on processes where the tracker does not run."""

    name = "blank"
    requires_logging_directory = False

    @property
    def tracker(self) -> BlankTracker:
        """The tracker itself."""
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):  # What copying, pickling and displaying look for.
            raise AttributeError(name)
        return _do_nothing


def _do_nothing(*_: Any, **__: Any) -> None:  # a function of a module, so that it is pickled by its name
    pass


def as_number(value: Any) -> float | None:
    """Return a number, or a tensor or array of one element, as a float; None for other values."""
    if isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        return float(value.item() if callable(getattr(value, "item", None)) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


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
        logging_dir: Folder for the tracker's files.
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
        replace_file(self.folder / "config.json", lambda part: part.write_text(text, encoding="utf-8"))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Append a line.

        Raises:
            RuntimeError: Before `start`, or after `finish`.
            OSError: The disk has no room for the whole line.
        """
        if self._file is None:
            raise RuntimeError(
                f"{self.tracker} is not open. Call init_trackers() first, and log before end_training()."
            )
        fields = {**kwargs, "step": step, "time": time.time(), "values": values}
        line = json.dumps(plain(fields), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, "no room for a whole line", os.fspath(self.tracker))

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Write `<table_name>.csv`, with a step `<table_name>-<step>.csv`, beside the metrics."""
        stem = re.sub(r"[^\w.-]+", "-", table_name).strip("-.") or "table"
        file = self.folder / (f"{stem}.csv" if step is None else f"{stem}-{step}.csv")
        file.write_text(Table.of(columns, data, dataframe).to_csv(), encoding="utf-8")

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
        number = int(value) if isinstance(value, int) else float(value)
        return NOT_FINITE.get(str(number), number)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if callable(getattr(value, "tolist", None)):  # A tensor, an array or one of NumPy's numbers.
        only = listed = value.tolist()
        while isinstance(only, list) and len(only) == 1:
            (only,) = only
        return plain(listed if isinstance(only, list) else only)
    return repr(value)


NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _cut_torn_line(path: Path) -> None:
    """Cut off a torn last line; a whole last object that lacks its newline stays."""
    if not path.exists():
        return
    with path.open("rb") as file:
        torn = b""
        for torn in file:  # noqa: B007 - the last line counts
            pass
    if not torn or torn.endswith(b"\n"):
        return
    try:
        json.loads(torn)
    except ValueError:
        os.truncate(path, path.stat().st_size - len(torn))
    else:
        with path.open("ab") as file:
            file.write(b"\n")


class TensorBoardTracker(GeneralTracker):
    """Writes event files to `<logging_dir>/<project_name>`; `tensorboard --logdir <logging_dir>` shows them.

    Args:
        run_name: The project's name, which becomes a folder.
        logging_dir: Folder for the tracker's files.
        kwargs: Arguments of `torch.utils.tensorboard.SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.folder = Path(logging_dir) / run_name
        self._arguments = kwargs
        self.writer: Any = None
        """The `SummaryWriter`; None before `start`."""

    @classmethod
    def is_available(cls) -> bool:
        """Return True if TensorBoard is installed."""
        return importlib.util.find_spec("tensorboard") is not None

    @property
    def tracker(self) -> Any:
        """The `SummaryWriter`; None before `start`."""
        return self.writer

    def start(self) -> None:
        """Open the event file."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(os.fspath(self.folder), **self._arguments)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters beside the run's metrics; what TensorBoard has no type for becomes text."""
        known = {
            key: value if isinstance(value, (bool, int, float, str)) else repr(value) for key, value in values.items()
        }
        self.writer.add_hparams(known, metric_dict={}, run_name=".")
        self.writer.flush()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add numbers as scalars, strings as text, dicts of numbers as one chart; leave the rest out."""
        for key, value in values.items():
            if isinstance(value, str):
                self.writer.add_text(key, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(key, value, global_step=step, **kwargs)
            elif (number := as_number(value)) is not None:
                self.writer.add_scalar(key, number, global_step=step, **kwargs)
        self.writer.flush()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add batches of images, each an array of shape (N, C, H, W) or as `dataformats=` describes."""
        for key, value in values.items():
            self.writer.add_images(key, value, global_step=step, **kwargs)
        self.writer.flush()

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Log a table, given as columns and rows or as a frame of pandas, as text."""
        self.writer.add_text(table_name, Table.of(columns, data, dataframe).to_markdown(), global_step=step)

    def finish(self) -> None:
        """Close the event file; idempotent."""
        if self.writer is not None:
            self.writer.close()
