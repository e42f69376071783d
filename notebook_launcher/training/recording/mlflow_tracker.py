"""The tracker of MLflow."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from notebook_launcher.training.recording.client_trackers import ClientTracker, numbers_of
from notebook_launcher.training.user_warnings import warn_user

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MLflowTracker"]

MAX_MLFLOW_TEXT = 6000
"""Characters of a hyperparameter that MLflow keeps."""
MAX_MLFLOW_BATCH = 100
"""Hyperparameters that MLflow takes in one request."""


class MLflowTracker(ClientTracker):
    """Writes to MLflow, at `MLFLOW_TRACKING_URI` or in the working directory; `tracker` is the active run.

    The variables `MLFLOW_EXPERIMENT_NAME`, `MLFLOW_RUN_ID`, `MLFLOW_TAGS` (a JSON object) and `MLFLOW_NESTED_RUN`
    win over the arguments, as in Accelerate.

    Args:
        experiment_name: The project.
        logging_dir: The place of artifacts, if the experiment is new.
        run_id: A run to continue.
        tags: Tags of the run, as a dict or as JSON.
        nested_run: True: a run inside the active run.
        run_name: The run's name.
        description: The run's description.
    """

    name = module = distribution = "mlflow"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(os.environ.get("MLFLOW_EXPERIMENT_NAME", experiment_name or "Default"))
        tags = os.environ.get("MLFLOW_TAGS", tags)
        nested = os.environ.get("MLFLOW_NESTED_RUN", str(nested_run)).lower()
        self.init_kwargs = {
            "run_id": os.environ.get("MLFLOW_RUN_ID", run_id),
            "tags": json.loads(tags) if isinstance(tags, str) else tags,
            "nested": nested in {"1", "true", "yes", "on"},
            "run_name": run_name,
            "description": description,
        }
        self._artifacts = None if logging_dir is None else os.fspath(logging_dir)

    def start(self) -> None:
        """Begin or continue a run in the experiment, which is created if it is new."""
        mlflow = self.client()
        experiment = mlflow.get_experiment_by_name(self.run_name)
        number = (
            mlflow.create_experiment(self.run_name, artifact_location=self._artifacts, tags=self.init_kwargs["tags"])
            if experiment is None
            else experiment.experiment_id
        )
        self.run = mlflow.start_run(experiment_id=number, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters; a text that is too long for MLflow is left out with a warning."""
        short = {name: value for name, value in values.items() if len(str(value)) <= MAX_MLFLOW_TEXT}
        if left_out := ", ".join(name for name in values if name not in short):
            warn_user(f"MLflow keeps {MAX_MLFLOW_TEXT} characters of a hyperparameter; left out: {left_out}.")
        items = list(short.items())
        for start in range(0, len(items), MAX_MLFLOW_BATCH):
            self.client().log_params(dict(items[start : start + MAX_MLFLOW_BATCH]))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log the numbers among the values: MLflow's metrics are numbers."""
        self.client().log_metrics(numbers_of(values), step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images, each an array of shape (H, W) or (H, W, C) or one of Pillow's."""
        for name, images in values.items():
            for number, image in enumerate(images):
                key = name if len(images) == 1 else f"{name}/{number}"
                self.client().log_image(image, key=key, step=step or 0, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, given as columns and rows or as a frame of pandas, as a JSON artifact."""
        rows = dataframe
        if dataframe is None:
            rows = {name: [row[place] for row in data or ()] for place, name in enumerate(columns or ())}
        file = f"{table_name}.json" if step is None else f"{table_name}-{step}.json"
        self.client().log_table(rows, artifact_file=file, **kwargs)

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Log a figure of matplotlib or plotly as an artifact."""
        self.client().log_figure(figure=figure, artifact_file=artifact_file, **save_kwargs)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Log all files of a folder."""
        self.client().log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Log a file."""
        self.client().log_artifact(local_path=local_path, artifact_path=artifact_path)

    def _end(self, run: Any) -> None:  # noqa: ARG002 - MLflow ends its active run
        self.client().end_run()
