"""Metrics for TensorBoard, where it is installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from notebook_launcher.training.tracker import GeneralTracker, as_number

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker(GeneralTracker):
    """Writes event files to `<logging_dir>/<project_name>`; `tensorboard --logdir <logging_dir>` shows them.

    Args:
        run_name: The project's name, which becomes a folder.
        logging_dir: Where it goes.
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
        """Return whether TensorBoard is installed."""
        return importlib.util.find_spec("tensorboard") is not None

    @property
    def tracker(self) -> Any:
        """The same as `writer`."""
        return self.writer

    def start(self) -> None:
        """Open the event file."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(os.fspath(self.folder), **self._arguments)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters beside the run's metrics; what TensorBoard has no type for becomes text."""
        known = {key: one if isinstance(one, (bool, int, float, str)) else repr(one) for key, one in values.items()}
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
        """Add batches of images, each an array of shape (N, C, H, W) or as `dataformats=` says."""
        for key, value in values.items():
            self.writer.add_images(key, value, global_step=step, **kwargs)
        self.writer.flush()

    def finish(self) -> None:
        """Close the event file; idempotent."""
        if self.writer is not None:
            self.writer.close()
