"""Trackers that write by a service's own client, as one table: what each does with its client.

A client is imported where its tracker starts.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from notebook_launcher.training.recording.tracker_classes import GeneralTracker, as_number
from notebook_launcher.training.user_warnings import warn_user

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Client(NamedTuple):
    """What a tracker does with its client. Each function gets the tracker, whose `run` is the client's own object."""

    name: str
    """The name of the tracker, of the client's module, and of the package."""
    start: Callable[[Any], Any]
    """Returns the client's own object for the run."""
    configure: Callable[[Any, dict[str, Any]], object]
    """Stores hyperparameters."""
    log: Callable[..., object]
    """Logs values at a step, with further arguments of the client's."""
    end: Callable[[Any], object]
    images: Callable[..., object] = lambda *_: None
    """Logs lists of images by name, as `log`; where the client has none, nothing."""
    table: Callable[..., object] = lambda *_: None
    """Logs a table by its name: a dict of `columns`, `data` and `dataframe` as the user gave them."""


class ClientTracker(GeneralTracker):
    """A tracker with the client of a service; it runs on the main process alone.

    It is made with the project's name, and the arguments of the function with which the client begins a run
    (`init_kwargs` of `init_trackers`).
    """

    requires_logging_directory = False
    row: ClassVar[Client]

    def __init_subclass__(cls) -> None:
        cls.name = cls.row.name

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None
        """The client's own object for the run; None before `start`."""

    @classmethod
    def is_available(cls) -> bool:
        """Return True if the client is installed; it is not imported."""
        return sys.modules.get(cls.name) is not None or importlib.util.find_spec(cls.name) is not None

    @classmethod
    def client(cls) -> Any:
        """Return the client's module."""
        return importlib.import_module(cls.name)

    @property
    def tracker(self) -> Any:
        """The client's own object for the run; None before `start`."""
        return self.run

    def start(self) -> None:
        """Begin a run in the project."""
        self.run = self.row.start(self)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters."""
        self.row.configure(self, values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values; a tensor of one element is its number, and others are left to the client, or left out."""
        self.row.log(self, values, step, kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images, each an array of shape (H, W) or (H, W, C) or one of Pillow's."""
        self.row.images(self, values, step, kwargs)

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
        self.row.table(self, table_name, {"columns": columns, "data": data, "dataframe": dataframe}, step, kwargs)

    def finish(self) -> None:
        """End the run, so that the client keeps nothing open; idempotent."""
        if self.run is not None:
            try:
                self.row.end(self)
            finally:
                self.run = None


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with each tensor or array of one element as its number; others stay as they are."""
    numbers = numbers_of({name: value for name, value in values.items() if callable(getattr(value, "item", None))})
    return {**values, **numbers}


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are numbers, for clients that take nothing else."""
    found = {name: as_number(value) for name, value in values.items()}
    return {name: number for name, number in found.items() if number is not None}


# --------------------------------------------------------------------------------------------------------------------
# Clients of the shape of Weights & Biases: `init(project=...)`, `run.log`, `run.finish`.


def _init_project(t: Any) -> Any:
    return t.client().init(project=t.run_name, **t.init_kwargs)


def _update_config(t: Any, values: dict[str, Any]) -> None:
    t.client().config.update(values, allow_val_change=True)


def _log_run(t: Any, values: dict[str, Any], step: int | None, more: dict[str, Any]) -> None:
    t.run.log(plain_values(values), step=step, **more)


def _finish_run(t: Any) -> None:
    t.run.finish()  # waits until the client has written or sent everything


def _log_run_images(t: Any, values: dict[str, Any], step: int | None, more: dict[str, Any]) -> None:
    image = t.client().Image
    t.run.log({name: [image(pixels) for pixels in images] for name, images in values.items()}, step=step, **more)


class WandBTracker(ClientTracker):
    """Writes to Weights & Biases; `tracker` is the `Run` that `wandb.init` returned.

    Its arguments are those of `wandb.init`, such as `name`, `mode`, `tags`. `WANDB_MODE=offline` keeps the run on this
    machine; `wandb sync` sends it later.
    """

    row = Client(
        "wandb",
        _init_project,
        _update_config,
        _log_run,
        _finish_run,
        _log_run_images,
        lambda t, name, table, step, more: t.run.log({name: t.client().Table(**table)}, step=step, **more),
    )


class SwanLabTracker(ClientTracker):
    """Writes to SwanLab; `tracker` is the run that `swanlab.init` returned.

    Its arguments are those of `swanlab.init`, such as `mode="offline"` or `logdir`.
    """

    row = Client("swanlab", _init_project, _update_config, _log_run, _finish_run, _log_run_images)


class TrackioTracker(ClientTracker):
    """Writes to Trackio, which keeps its data on this machine; `tracker` is the run that `trackio.init` returned.

    Its arguments are those of `trackio.init`, such as `name` or `space_id`.
    """

    row = Client("trackio", _init_project, lambda t, values: t.run.config.update(values), _log_run, _finish_run)


# --------------------------------------------------------------------------------------------------------------------
# Comet, ClearML, Aim and DVCLive.


def _log_to_comet(t: Any, values: dict[str, Any], step: int | None, more: dict[str, Any]) -> None:
    """Log numbers as metrics, dicts of numbers as several, and strings as notes."""
    if step is not None:
        t.run.set_step(step)
    for name, value in plain_values(values).items():
        if isinstance(value, (int, float)):
            t.run.log_metric(name, value, step=step, **more)
        elif isinstance(value, str):
            t.run.log_other(name, value, **more)
        elif isinstance(value, dict):
            t.run.log_metrics(value, step=step, **more)


def _log_comet_images(t: Any, values: dict[str, Any], step: int | None, more: dict[str, Any]) -> None:
    for name, images in values.items():
        for image in images:
            t.run.log_image(image, name=name, step=step, **more)


def _log_comet_table(t: Any, name: str, table: dict[str, Any], step: int | None, more: dict[str, Any]) -> None:
    """Log a table as a CSV file."""
    if step is not None:
        t.run.set_step(step)
    frame = table["dataframe"]
    rows = frame if frame is not None else list(table["data"] or ())
    t.run.log_table(f"{name}.csv", rows, headers=table["columns"] or frame is not None, **more)


class CometMLTracker(ClientTracker):
    """Writes to Comet (`comet_ml` 3.41 or newer); `tracker` is the experiment that `comet_ml.start` returned.

    Its arguments are those of `comet_ml.start`, such as `online=False`.
    """

    row = Client(
        "comet_ml",
        lambda t: t.client().start(project_name=t.run_name, **t.init_kwargs),
        lambda t, values: t.run.log_parameters(values),
        _log_to_comet,
        lambda t: t.run.end(),
        _log_comet_images,
        _log_comet_table,
    )


def _start_task(t: Any) -> Any:
    """Return the current task, or a new one."""
    task = t.client().Task
    current = task.current_task()
    t.is_own = current is None
    if current is not None:
        return current
    project = os.environ.get("CLEARML_PROJECT", t.run_name)
    names = {"project_name": project, "task_name": os.environ.get("CLEARML_TASK", t.run_name)}
    return task.init(**{**names, **t.init_kwargs})


def _log_to_clearml(t: Any, values: dict[str, Any], step: int | None, more: dict[str, Any]) -> None:
    """Log the numbers among the values: as points of a curve, or without a step as single values."""
    logger = t.run.get_logger()
    for name, value in numbers_of(values).items():
        if step is None:
            logger.report_single_value(name=name, value=value, **more)
        else:
            title, series = _chart_of(name)
            logger.report_scalar(title=title, series=series, value=value, iteration=step, **more)


def _log_clearml_images(t: Any, values: dict[str, Any], step: int | None, more: dict[str, Any]) -> None:
    for name, images in values.items():
        title, series = _chart_of(name)
        for number, image in enumerate(images):
            curve = series if len(images) == 1 else f"{series}/{number}"
            t.run.get_logger().report_image(title=title, series=curve, iteration=step, image=image, **more)


def _log_clearml_table(t: Any, name: str, table: dict[str, Any], step: int | None, more: dict[str, Any]) -> None:
    columns, data, dataframe = table.values()
    rows = dataframe if dataframe is not None else [*([columns] if columns else []), *(data or ())]
    title, series = _chart_of(name)
    t.run.get_logger().report_table(title=title, series=series, iteration=step, table_plot=rows, **more)


def _chart_of(name: str) -> tuple[str, str]:
    """Return the chart and curve of a metric: `train/loss` and `train_loss` are the curve train of the chart loss."""
    for group in ("train", "eval", "test", "val"):
        if name.startswith((f"{group}/", f"{group}_")):
            return name[len(group) + 1 :], group
    return name, "train"


class ClearMLTracker(ClientTracker):
    """Writes to ClearML; `tracker` is the `Task`: the current one, or else a new one.

    Args:
        run_name: The project and the task, unless `CLEARML_PROJECT` and `CLEARML_TASK` name them.
        kwargs: Arguments of `Task.init`.
    """

    row = Client(
        "clearml",
        _start_task,
        lambda t, values: t.run.connect_configuration(values),
        _log_to_clearml,
        lambda t: t.run.close() if t.is_own else None,  # not if it ran before `start`
        _log_clearml_images,
        _log_clearml_table,
    )

    def __init__(self, run_name: str = "", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.is_own = False


def _open_aim(t: Any) -> Any:
    run = t.client().Run(repo=t.aim_repo_path, **t.init_kwargs)
    run.name = t.run_name
    return run


def _log_to_aim(t: Any, values: dict[str, Any], step: int | None, more: dict[str, Any]) -> None:
    for name, value in plain_values(values).items():
        t.run.track(value, name=name, step=step, **more)


def _log_aim_images(t: Any, values: dict[str, Any], step: int | None, more: dict[str, Any]) -> None:
    image = t.client().Image
    for name, images in values.items():
        t.run.track([image(pixels) for pixels in images], name=name, step=step, **more)


class AimTracker(ClientTracker):
    """Writes to an Aim repository in the logging folder; `tracker` is the `aim.Run`.

    Args:
        run_name: The run's name.
        logging_dir: The repository.
        kwargs: Arguments of `aim.Run`.
    """

    requires_logging_directory = True
    row = Client(
        "aim",
        _open_aim,
        lambda t, values: t.run.__setitem__("hparams", values),
        _log_to_aim,
        lambda t: t.run.close(),
        _log_aim_images,
    )

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = os.fspath(logging_dir)


def _log_to_dvclive(t: Any, values: dict[str, Any], step: int | None, more: dict[str, Any]) -> None:
    """Log the numbers among the values, and count a step."""
    if step is not None:
        t.run.step = step
    for name, value in numbers_of(values).items():
        t.run.log_metric(name, value, **more)
    t.run.next_step()


class DVCLiveTracker(ClientTracker):
    """Writes files by DVCLive; `tracker` is its `Live`.

    Args:
        run_name: Not used: DVCLive has no projects.
        live: A `Live` to use; None: a new one.
        kwargs: Arguments of `dvclive.Live`, such as `dir`.
    """

    row = Client(
        "dvclive",
        lambda t: t.run if t.run is not None else t.client().Live(**t.init_kwargs),
        lambda t, values: t.run.log_params(values),
        _log_to_dvclive,
        lambda t: t.run.end(),
    )

    def __init__(self, run_name: str = "", live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.run = live


# --------------------------------------------------------------------------------------------------------------------
# MLflow.


MAX_MLFLOW_TEXT = 6000
"""Characters of a hyperparameter that MLflow keeps."""
MAX_MLFLOW_BATCH = 100
"""Hyperparameters that MLflow takes in one request."""


def _start_mlflow(t: Any) -> Any:
    """Begin or continue a run in the experiment, which is created if it is new."""
    mlflow = t.client()
    experiment = mlflow.get_experiment_by_name(t.run_name)
    number = (
        mlflow.create_experiment(t.run_name, artifact_location=t.artifacts, tags=t.init_kwargs["tags"])
        if experiment is None
        else experiment.experiment_id
    )
    return mlflow.start_run(experiment_id=number, **t.init_kwargs)


def _store_parameters(t: Any, values: dict[str, Any]) -> None:
    """Store hyperparameters; a text that is too long for MLflow is left out with a warning."""
    short = {name: value for name, value in values.items() if len(str(value)) <= MAX_MLFLOW_TEXT}
    if left_out := ", ".join(name for name in values if name not in short):
        warn_user(f"MLflow keeps {MAX_MLFLOW_TEXT} characters of a hyperparameter; left out: {left_out}.")
    items = list(short.items())
    for start in range(0, len(items), MAX_MLFLOW_BATCH):
        t.client().log_params(dict(items[start : start + MAX_MLFLOW_BATCH]))


def _log_mlflow_images(t: Any, values: dict[str, Any], step: int | None, more: dict[str, Any]) -> None:
    for name, images in values.items():
        for number, image in enumerate(images):
            key = name if len(images) == 1 else f"{name}/{number}"
            t.client().log_image(image, key=key, step=step or 0, **more)


def _log_mlflow_table(t: Any, name: str, table: dict[str, Any], step: int | None, more: dict[str, Any]) -> None:
    """Log a table as a JSON artifact."""
    columns, data, rows = table.values()
    if rows is None:
        rows = {column: [row[place] for row in data or ()] for place, column in enumerate(columns or ())}
    t.client().log_table(rows, artifact_file=f"{name}.json" if step is None else f"{name}-{step}.json", **more)


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

    row = Client(
        "mlflow",
        _start_mlflow,
        _store_parameters,
        lambda t, values, step, more: t.client().log_metrics(numbers_of(values), step=step, **more),
        lambda t: t.client().end_run(),  # MLflow ends its active run
        _log_mlflow_images,
        _log_mlflow_table,
    )

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
        self.artifacts = None if logging_dir is None else os.fspath(logging_dir)

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Log a figure of matplotlib or plotly as an artifact."""
        self.client().log_figure(figure=figure, artifact_file=artifact_file, **save_kwargs)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Log all files of a folder."""
        self.client().log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Log a file."""
        self.client().log_artifact(local_path=local_path, artifact_path=artifact_path)


CLIENT_TRACKERS: tuple[type[ClientTracker], ...] = (
    AimTracker, ClearMLTracker, CometMLTracker, DVCLiveTracker,
    MLflowTracker, SwanLabTracker, TrackioTracker, WandBTracker,
)  # fmt: skip
