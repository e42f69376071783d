"""Trackers of other services: each logs from two ranks by its real client, offline, and its files are read back.

A client that is not installed skips its test; `pip install -e '.[trackers]'` brings them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from notebook_launcher import Accelerator, compat, launch
from notebook_launcher.training.recording.tracker_clients import (
    ClearMLTracker,
    ClientTracker,
    CometMLTracker,
    DVCLiveTracker,
    MLflowTracker,
)
from notebook_launcher.training.recording.trackers import filter_trackers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def train(name: str, init_kwargs: dict[str, Any], read: Callable[[Any], Any], folder: str) -> Any:
    os.chdir(folder)  # MLflow's artifacts go to the working directory
    accelerator = Accelerator(cpu=True, log_with=name, project_dir=folder)
    accelerator.init_trackers("digits", {"lr": 0.1}, init_kwargs={name: init_kwargs})
    for step in range(3):
        accelerator.log({"train/loss": torch.tensor(1.0 / (step + 1)), "val/loss": 2.0}, step=step)
    tracker = accelerator.get_tracker(name)
    if hasattr(tracker, "log_images"):  # On other ranks the blank tracker has every method.
        tracker.log_images({"sample": [np.zeros((4, 4, 3), np.uint8)]}, step=2)
    accelerator.log_table("errors", columns=["digit", "count"], data=[[3, 1], [8, 2]])
    own = accelerator.get_tracker(name, unwrap=True)
    found = read(own) if accelerator.is_main_process else type(own).__name__
    accelerator.end_training()
    return found


def logged(name: str, folder: Path, read: Callable[[Any], Any], init_kwargs: Any, env: Any) -> Any:
    """Return what rank 0 read from its client, after a training on two ranks in an empty folder."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed; pip install -e '.[trackers]' brings it")
    variables = {**env, "HOME": str(folder), "MPLCONFIGDIR": str(folder)}
    run = launch(train, 2, args=(name, init_kwargs, read, str(folder)), env=variables, output="none")
    first, second = run.result()
    assert second == "BlankTracker"  # A client runs on the main process alone.
    return first


@pytest.mark.slow
def test_wandb_keeps_metrics_offline(tmp_path: Path) -> None:
    def read(run: Any) -> Any:
        return dict(run.config), run.summary["train/loss"], run.dir

    config, loss, folder = logged("wandb", tmp_path, read, {"mode": "offline", "dir": str(tmp_path)}, {})
    assert (config, loss) == ({"lr": 0.1}, pytest.approx(1 / 3))
    assert [path for path in tmp_path.rglob("*.wandb") if path.stat().st_size > 0]
    assert [path for path in tmp_path.rglob("*.png") if folder in str(path)]
    assert [path for path in tmp_path.rglob("errors*.table.json") if '"columns":["digit","count"]' in path.read_text()]


@pytest.mark.slow
def test_mlflow_keeps_curves_in_a_folder(tmp_path: Path) -> None:
    def read(run: Any) -> Any:
        from mlflow import MlflowClient

        client = MlflowClient()
        points = client.get_metric_history(run.info.run_id, "train/loss")
        return [(point.step, point.value) for point in points], client.get_run(run.info.run_id).data.params

    uri = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db", "MLFLOW_DISABLE_TELEMETRY": "true"}
    curve, parameters = logged("mlflow", tmp_path, read, {"run_name": "first"}, uri)
    assert (curve, parameters) == ([(0, 1.0), (1, 0.5), (2, pytest.approx(1 / 3))], {"lr": "0.1"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "init_kwargs", "env", "kept"),
    [
        ("trackio", {"embed": False}, {"TRACKIO_DIR": "trackio"}, "trackio/**/digits*"),
        ("swanlab", {"mode": "offline", "logdir": "swanlab"}, {}, "swanlab/**/*"),
        ("comet_ml", {"online": False, "experiment_config": None}, {"COMET_OFFLINE_DIRECTORY": "."}, "*.zip"),
        ("aim", {}, {}, ".aim"),
    ],
)
def test_client_keeps_metrics_offline(name: str, init_kwargs: Any, env: Any, kept: str, tmp_path: Path) -> None:
    logged(name, tmp_path, lambda client: type(client).__name__, init_kwargs, {**env, "COMET_API_KEY": "none"})
    assert list(tmp_path.glob(kept))


# Without a client.


def test_tracker_without_its_client_fails_before_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.warns(UserWarning, match=r"log_with='wandb' is left out: wandb is not installed"):
        assert compat.Accelerator(cpu=True, log_with="wandb").log_with == []
    with pytest.raises(ModuleNotFoundError, match=r"log_with='wandb': wandb is not installed. Type %pip install wandb"):
        Accelerator(cpu=True, log_with="wandb")


def test_all_stands_for_the_installed_trackers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for client in ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio", "wandb"):
        monkeypatch.setitem(sys.modules, client, None)  # As Python marks what cannot be imported.
    assert {tracker.name for tracker in filter_trackers("all", tmp_path)} == {"jsonl", "tensorboard"}
    monkeypatch.setitem(sys.modules, "aim", os)
    assert "aim" in {tracker.name for tracker in filter_trackers("all", tmp_path)}


# The calls that each client gets, for those whose offline mode may be missing here.


class Calls:
    """Stands in for a service's client, and records its calls."""

    def __init__(self, seen: list[Any], path: str = "") -> None:
        self._seen, self._path = seen, path

    def __getattr__(self, name: str) -> Calls:
        return Calls(self._seen, f"{self._path}.{name}".strip("."))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
        self._seen.append(f"{self._path}({', '.join(given)})")
        return None if self._path.endswith("current_task") else Calls(self._seen, self._path + "()")


@pytest.mark.parametrize(
    ("tracker_class", "expected"),
    [
        (
            CometMLTracker,
            """
            start(project_name='digits', online=False)
            start().log_parameters({'lr': 0.1})
            start().set_step(3)
            start().log_metric('train/loss', 0.5, step=3)
            start().log_other('note', 'ok')
            start().end()
            """,
        ),
        (
            ClearMLTracker,
            """
            Task.current_task()
            Task.init(project_name='digits', task_name='digits', online=False)
            Task.init().connect_configuration({'lr': 0.1})
            Task.init().get_logger()
            Task.init().get_logger().report_scalar(title='loss', series='train', value=0.5, iteration=3)
            Task.init().close()
            """,
        ),
        (
            DVCLiveTracker,
            """
            Live(online=False)
            Live().log_params({'lr': 0.1})
            Live().log_metric('train/loss', 0.5)
            Live().next_step()
            Live().end()
            """,
        ),
    ],
)
def test_client_gets_the_documented_calls(
    tracker_class: type[ClientTracker], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(tracker_class, "client", classmethod(lambda _: Calls(seen)))
    tracker = tracker_class("digits", online=False)
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"train/loss": 0.5, "note": "ok"}, step=3)
    tracker.finish()
    tracker.finish()
    assert seen == textwrap.dedent(expected).split("\n")[1:-1]


def test_variables_of_mlflow_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "other")
    monkeypatch.setenv("MLFLOW_TAGS", '{"team": "a"}')
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "TRUE")
    tracker = MLflowTracker("digits", run_name="first")
    given = {"tags": {"team": "a"}, "nested": True, "run_name": "first", "run_id": None, "description": None}
    assert (tracker.run_name, tracker.init_kwargs) == ("other", given)


def test_mlflow_leaves_out_a_hyperparameter_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(MLflowTracker, "client", classmethod(lambda _: Calls(seen)))
    with pytest.warns(UserWarning, match=r"MLflow keeps 6000 characters of a hyperparameter; left out: prompt"):
        MLflowTracker("digits").store_init_configuration({"lr": 0.1, "prompt": "x" * 6001})
    assert seen == ["log_params({'lr': 0.1})"]
