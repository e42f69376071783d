"""Trackers of Comet, ClearML, Aim and DVCLive, each by its own client."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from notebook_launcher.training.recording.tracker_classes import ClientTracker, numbers_of, plain_values
from notebook_launcher.training.user_warnings import warn_user

if TYPE_CHECKING:
    from collections.abc import Sequence


class CometMLTracker(ClientTracker):
    """Writes to Comet (`comet_ml` 3.41 or newer); `tracker` is the experiment that `comet_ml.start` returned.

    Args:
        run_name: The project.
        kwargs: Arguments of `comet_ml.start`, such as `online=False`.
    """

    name = module = distribution = "comet_ml"

    def start(self) -> None:
        """Begin an experiment in the project."""
        self.run = self.client().start(project_name=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters."""
        self.run.log_parameters(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics, dicts of numbers as several, and strings as notes."""
        if step is not None:
            self.run.set_step(step)
        for name, value in plain_values(values).items():
            if isinstance(value, (int, float)):
                self.run.log_metric(name, value, step=step, **kwargs)
            elif isinstance(value, str):
                self.run.log_other(name, value, **kwargs)
            elif isinstance(value, dict):
                self.run.log_metrics(value, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images, each an array of shape (H, W) or (H, W, C) or one of Pillow's."""
        for name, images in values.items():
            for image in images:
                self.run.log_image(image, name=name, step=step, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, given as columns and rows or as a frame of pandas, as a CSV file."""
        if step is not None:
            self.run.set_step(step)
        rows = dataframe if dataframe is not None else list(data or ())
        self.run.log_table(f"{table_name}.csv", rows, headers=columns or dataframe is not None, **kwargs)

    def _end(self, run: Any) -> None:
        run.end()


class ClearMLTracker(ClientTracker):
    """Writes to ClearML; `tracker` is the `Task`: the current one, or else a new one.

    Args:
        run_name: The project and the task, unless `CLEARML_PROJECT` and `CLEARML_TASK` name them.
        kwargs: Arguments of `Task.init`.
    """

    name = module = distribution = "clearml"

    def __init__(self, run_name: str = "", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._is_own = False

    def start(self) -> None:
        """Begin a task, or take the current one."""
        task = self.client().Task
        self.run = task.current_task()
        self._is_own = self.run is None
        if self._is_own:
            project = os.environ.get("CLEARML_PROJECT", self.run_name)
            names = {"project_name": project, "task_name": os.environ.get("CLEARML_TASK", self.run_name)}
            self.run = task.init(**{**names, **self.init_kwargs})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters."""
        self.run.connect_configuration(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log the numbers among the values: as points of a curve, or without a step as single values."""
        logger = self.run.get_logger()
        for name, value in numbers_of(values).items():
            if step is None:
                logger.report_single_value(name=name, value=value, **kwargs)
            else:
                title, series = _chart_of(name)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images, each an array of shape (H, W) or (H, W, C) or one of Pillow's."""
        for name, images in values.items():
            title, series = _chart_of(name)
            for number, image in enumerate(images):
                curve = series if len(images) == 1 else f"{series}/{number}"
                self.run.get_logger().report_image(title=title, series=curve, iteration=step, image=image, **kwargs)

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
        rows = dataframe if dataframe is not None else [*([columns] if columns else []), *(data or ())]
        title, series = _chart_of(table_name)
        self.run.get_logger().report_table(title=title, series=series, iteration=step, table_plot=rows, **kwargs)

    def _end(self, run: Any) -> None:
        if self._is_own:  # not if it ran before `start`
            run.close()


class AimTracker(ClientTracker):
    """Writes to an Aim repository in the logging folder; `tracker` is the `aim.Run`.

    Args:
        run_name: The run's name.
        logging_dir: The repository.
        kwargs: Arguments of `aim.Run`.
    """

    name = module = distribution = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = os.fspath(logging_dir)

    def start(self) -> None:
        """Begin a run in the repository."""
        self.run = self.client().Run(repo=self.aim_repo_path, **self.init_kwargs)
        self.run.name = self.run_name

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters."""
        self.run["hparams"] = values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Track each value."""
        for name, value in plain_values(values).items():
            self.run.track(value, name=name, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Track lists of images, each an array of shape (H, W) or (H, W, C) or one of Pillow's."""
        image = self.client().Image
        for name, images in values.items():
            self.run.track([image(pixels) for pixels in images], name=name, step=step, **kwargs)

    def _end(self, run: Any) -> None:
        run.close()


class DVCLiveTracker(ClientTracker):
    """Writes files by DVCLive; `tracker` is its `Live`.

    Args:
        run_name: Not used: DVCLive has no projects.
        live: A `Live` to use; None: a new one.
        kwargs: Arguments of `dvclive.Live`, such as `dir`.
    """

    name = module = distribution = "dvclive"

    def __init__(self, run_name: str = "", live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.run = live

    def start(self) -> None:
        """Open the folder."""
        self.run = self.run if self.run is not None else self.client().Live(**self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters."""
        self.run.log_params(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log the numbers among the values, and count a step."""
        if step is not None:
            self.run.step = step
        for name, value in numbers_of(values).items():
            self.run.log_metric(name, value, **kwargs)
        self.run.next_step()

    def _end(self, run: Any) -> None:
        run.end()


def _chart_of(name: str) -> tuple[str, str]:
    """Return the chart and curve of a metric: `train/loss` and `train_loss` are the curve train of the chart loss."""
    for group in ("train", "eval", "test", "val"):
        if name.startswith((f"{group}/", f"{group}_")):
            return name[len(group) + 1 :], group
    return name, "train"


# --------------------------------------------------------------------------------------------------------------------
# The tracker of MLflow.


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
