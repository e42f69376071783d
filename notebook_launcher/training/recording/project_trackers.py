"""Trackers whose clients share the shape of Weights & Biases: `init(project=...)`, `run.log`, `run.finish`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.training.recording.client_trackers import ClientTracker, plain_values

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SwanLabTracker", "TrackioTracker", "WandBTracker"]


class _ProjectTracker(ClientTracker):
    def start(self) -> None:
        """Begin a run in the project."""
        self.run = self.client().init(project=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters as the run's config."""
        self.client().config.update(values, allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values; a tensor of one element is its number, and the client decides about all others."""
        self.run.log(plain_values(values), step=step, **kwargs)

    def _end(self, run: Any) -> None:
        run.finish()  # waits until the client has written or sent everything


class _PicturesTracker(_ProjectTracker):
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images, each an array of shape (H, W) or (H, W, C) or one of Pillow's."""
        image = self.client().Image
        self.run.log(
            {name: [image(pixels) for pixels in images] for name, images in values.items()}, step=step, **kwargs
        )


class WandBTracker(_PicturesTracker):
    """Writes to Weights & Biases; `tracker` is the `Run` that `wandb.init` returned.

    `WANDB_MODE=offline` keeps the run on this machine; `wandb sync` sends it later.

    Args:
        run_name: The project.
        kwargs: Arguments of `wandb.init`, such as `name`, `mode`, `tags`.
    """

    name = module = distribution = "wandb"

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, given as columns and rows or as a frame of pandas."""
        table = self.client().Table(columns=columns, data=data, dataframe=dataframe)
        self.run.log({table_name: table}, step=step, **kwargs)


class SwanLabTracker(_PicturesTracker):
    """Writes to SwanLab; `tracker` is the run that `swanlab.init` returned.

    Args:
        run_name: The project.
        kwargs: Arguments of `swanlab.init`, such as `mode="offline"` or `logdir`.
    """

    name = module = distribution = "swanlab"


class TrackioTracker(_ProjectTracker):
    """Writes to Trackio, which keeps its data on this machine; `tracker` is the run that `trackio.init` returned.

    Args:
        run_name: The project.
        kwargs: Arguments of `trackio.init`, such as `name` or `space_id`.
    """

    name = module = distribution = "trackio"

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters as the run's config."""
        self.run.config.update(values)
