"""Destinations of a training's metrics: files, trackers of the user's, and the live run."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from notebook_launcher import Accelerator
from notebook_launcher.training.process.process_state import ProcessState
from notebook_launcher.training.recording import trackers as tracking
from notebook_launcher.training.recording.tracker_classes import (
    BlankTracker,
    GeneralTracker,
    JSONLinesTracker,
    TensorBoardTracker,
    plain,
)
from notebook_launcher.training.recording.trackers import Trackers, filter_trackers, register_tracker_class
from tests.support.checkpoints import small_files

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.toy_training import Sessions


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


@pytest.fixture
def state() -> ProcessState:
    return ProcessState(cpu=True)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "TRACKER_CLASSES", dict(tracking.TRACKER_CLASSES))


# TensorBoard.


def test_tensorboard_gets_numbers_text_charts_and_tables(state: ProcessState, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator as accumulator

    pandas = pytest.importorskip("pandas")
    trackers = Trackers(state, ["jsonl", "tensorboard", Memory], tmp_path)
    trackers.init_trackers("run", {"lr": 0.1, "betas": (0.9, 0.99)}, {"tensorboard": {"flush_secs": 1}})
    values = {"loss": torch.tensor([0.5]), "bad": float("nan"), "note": "ok", "both": {"a": 1.0}, "many": [1, 2]}
    trackers.log(values, step=3)
    trackers.get_tracker("tensorboard").log_images({"image": np.zeros((1, 3, 4, 4))}, step=3)
    writer = trackers.get_tracker("tensorboard", unwrap=True)
    assert writer is trackers.get_tracker("tensorboard").writer
    writer.add_scalar("own", 1.5, 3)
    trackers.log_table("eval/errors", ["digit", "text"], [[3, "a|b"], [8, "two\nlines, quoted"]], step=2)
    trackers.log_table("frame", dataframe=pandas.DataFrame({"x": [1, 2]}))
    trackers.end_training()
    events = accumulator.EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(3, 0.5)]
    assert set(events.Tags()["scalars"]) == {"loss", "bad", "own"}
    assert set(events.Tags()["images"]) == {"image"}
    assert "note/text_summary" in events.Tags()["tensors"]
    assert (tmp_path / "run" / "eval-errors-2.csv").read_text() == 'digit,text\n3,a|b\n8,"two\nlines, quoted"\n'
    assert (tmp_path / "run" / "frame.csv").read_text() == "x\n1\n2\n"
    written = b"".join(file.read_bytes() for file in (tmp_path / "run").glob("events*"))
    assert b"| 3 | a\\|b |\n| 8 | two<br>lines, quoted |" in written


# Which trackers there are.


def test_names_classes_and_instances_are_found_once(tmp_path: Path) -> None:
    register_tracker_class(Memory)
    instance = Everywhere()
    found = filter_trackers(["JSONL", Memory, instance, "memory", JSONLinesTracker], tmp_path)
    assert found == [JSONLinesTracker, Memory, instance]
    assert filter_trackers(None) == []
    everything = filter_trackers([instance, "all"], tmp_path)
    assert everything[:3] == [instance, JSONLinesTracker, TensorBoardTracker]
    assert everything[-1] is Memory


NO_FOLDER = r"'jsonl' writes to a folder, and there is none. Pass project_dir="


@pytest.mark.parametrize(
    ("log_with", "message"),
    [
        ("jsonnl", r"'jsonnl' is unknown. Did you mean 'jsonl'\? It can be 'aim', 'clearml', .*, 'wandb', 'all'"),
        (["jsonl", "neptune"], r"log_with='neptune' is unknown. .* the name of a class that register_tracker_class"),
        (3, r"log_with=3 is unknown"),
        (int, r"log_with=<class 'int'> is unknown"),
        ("all", NO_FOLDER),
        (JSONLinesTracker, NO_FOLDER),
    ],
)
def test_unknown_tracker_and_one_without_its_folder_are_refused(log_with: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        filter_trackers(log_with)


@pytest.mark.parametrize(
    "tracker_class",
    [
        int,
        Memory(),
        type("Nameless", (GeneralTracker,), {"requires_logging_directory": False}),
        type("Placeless", (GeneralTracker,), {"name": "placeless"}),
    ],
)
def test_class_without_the_attributes_of_a_tracker_is_refused(tracker_class: Any) -> None:
    with pytest.raises(ValueError, match=r"cannot be registered: it must be a subclass of GeneralTracker that defines"):
        register_tracker_class(tracker_class)


# What trackers are told.


def test_tracker_gets_start_configuration_values_and_end_once(state: ProcessState, tmp_path: Path) -> None:
    trackers = Trackers(state, [Memory, "jsonl"], tmp_path)
    blank = trackers.get_tracker("memory")
    assert isinstance(blank, BlankTracker)
    assert pickle.loads(pickle.dumps(blank.log_artifact))("model.bin") is None
    trackers.init_trackers("run", {"lr": 1}, {"memory": {"tags": ["a"]}, "other": {"ignored": True}})
    step: Any = torch.tensor(2)
    trackers.log({"loss": 1.5}, step, {"memory": {"split": "train"}})
    trackers.log({"loss": 1.0})
    told = trackers.get_tracker("memory", unwrap=True)
    for step in (1.5, "3", torch.tensor([1, 2])):
        with pytest.raises(TypeError, match=r"log\(step=.*: a step must be an integer. Pass int\(step\)"):
            trackers.log({"loss": 1.0}, step)
    with pytest.raises(ValueError, match=r"get_tracker\('wandb'\): there is no such tracker. It can be 'memory', 'j"):
        trackers.get_tracker("wandb")
    trackers.end_training()
    trackers.end_training()
    assert told == [
        ("made", "run", {"tags": ["a"]}),
        "started",
        {"lr": 1},
        ({"loss": 1.5}, 2, {"split": "train"}),
        ({"loss": 1.0}, None, {}),
        "finished",
    ]
    assert [line["values"] for line in lines_of(tmp_path / "run")] == [{"loss": 1.5}, {"loss": 1.0}]
    assert trackers.trackers == []


# In ranks.


def train(folder: str) -> Any:
    rank = int(os.environ["RANK"])
    trackers = Trackers(ProcessState(cpu=True), [Everywhere, Memory, "jsonl"], folder)
    trackers.init_trackers("run", {"lr": 0.1})
    arrays = {"loss": torch.tensor([rank + 0.5]), "accuracy": np.array([1.0]), "histogram": torch.ones(3)}
    trackers.log({**arrays, "step": 7, "val/loss": float("nan"), "note": "5"}, step=1)
    names = [tracker.name for tracker in trackers.trackers]
    got = [type(trackers.get_tracker(name)).__name__ for name in ("jsonl", "everywhere")]
    trackers.end_training()
    return names, got


def test_only_the_main_process_writes_and_every_rank_reports_to_the_run(ranks: Sessions, tmp_path: Path) -> None:
    run = ranks[2].launch(train, args=(str(tmp_path),))
    results = run.result()
    assert results[0] == (["everywhere", "memory", "jsonl"], ["JSONLinesTracker", "Everywhere"])
    assert results[1] == (["everywhere"], ["BlankTracker", "Everywhere"])
    (line,) = lines_of(tmp_path / "run")
    arrays = {"loss": 0.5, "accuracy": 1.0, "histogram": [1.0, 1.0, 1.0]}
    assert line["values"] == {**arrays, "step": 7, "val/loss": "NaN", "note": "5"}
    points = {point.rank: point for point in run.metrics}
    assert sorted(points) == [0, 1]
    for rank, point in points.items():
        assert (point.step, point.values["loss"], point.values["step"]) == (1, rank + 0.5, 7.0)
        assert set(point.values) == {"loss", "accuracy", "step", "val/loss"}


def log_twice(folder: str) -> Any:
    accelerator = Accelerator(cpu=True, max_grad_norm=1.0, log_with="jsonl", project_dir=folder)
    accelerator.init_trackers("run")
    model, *optimizers = accelerator.prepare(
        *(module := torch.nn.Linear(1, 1), torch.optim.SGD(module.parameters(), lr=0.5)),
        torch.optim.SGD(module.parameters(), lr=torch.tensor(0.25)),
    )
    accelerator.log({"loss": 1.0})
    accelerator.backward(model(torch.full((1, 1), 3.0)).sum())
    optimizers[0].step()
    accelerator.log({"loss": 2.0, "lr": 0.5, "learning_rate_1": 7.0})
    accelerator.end_training()


def test_log_adds_learning_rate_and_gradient_norm(ranks: Sessions, tmp_path: Path):
    run = ranks[2].launch(log_twice, args=(str(tmp_path),))
    run.result()
    first, second = (point.values for point in run.metrics if point.rank == 0)
    assert first == {"loss": 1.0, "learning_rate": 0.5, "learning_rate_1": 0.25}
    assert list(second) == ["loss", "lr", "learning_rate_1", "grad_norm"]  # What is logged already is left alone.
    assert second["learning_rate_1"] == 7.0
    assert second["grad_norm"] == pytest.approx(10**0.5)
    logged = ({"loss": 1.0}, {"loss": 2.0, "lr": 0.5, "learning_rate_1": 7.0})
    assert [line["values"] for line in lines_of(tmp_path / "run")] == list(logged)  # Trackers get what was logged.


def train_four_updates(every: int, *, logs: bool) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=every)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(4 * every):
        with accelerator.accumulate(model) if every > 1 else contextlib.nullcontext():
            loss = model(torch.full((1, 1), float(accelerator.process_index)))
            accelerator.backward(loss.sum())
            optimizer.step()
        if logs and number % 2:
            accelerator.log({"loss": loss})


@pytest.mark.parametrize(("every", "logs"), [(1, True), (2, False)])
def test_a_step_is_the_number_of_updates(ranks: Sessions, every: int, logs: bool) -> None:
    run = ranks[2].launch(train_four_updates, args=(every,), kwargs={"logs": logs})
    run.result()
    assert [rank.step for rank in run.ranks] == [4, 4]
    assert [point.step for point in run.metrics if point.rank == 1] == [2, 4] * logs


# The tracker of JSON lines: each call is a whole line at once, whatever happens to the process.


def test_each_call_is_a_line_that_is_there_at_once(tmp_path: Path) -> None:
    tracker = JSONLinesTracker("run", tmp_path)
    tracker.start()
    began = time.time()
    tracker.log({"loss": torch.tensor(0.5), "note": "ok"}, step=3)
    tracker.log({"loss": 0.25}, split="test", values_of="rank 0")
    first, second = lines_of(tmp_path / "run")
    assert first == {"step": 3, "time": first["time"], "values": {"loss": 0.5, "note": "ok"}}
    assert (second["step"], second["split"], second["values_of"]) == (None, "test", "rank 0")
    assert began <= first["time"] <= second["time"] <= time.time()
    assert tracker.tracker == tmp_path / "run" / "metrics.jsonl"
    tracker.finish()
    tracker.finish()


def test_every_value_has_a_form() -> None:
    values = [
        *(True, 3, None, float("nan"), float("inf"), -float("inf"), {"a": (1, float("inf"))}, 1j),
        *(np.float32(0.5), np.int64(7), np.bool_(True), np.array([[2.0]])),
        *(torch.tensor([1.5], dtype=torch.bfloat16), torch.tensor([[1, 2]]), torch.tensor(float("nan"))),
    ]
    forms = '[true,3,null,"NaN","Infinity","-Infinity",{"a":[1,"Infinity"]},"1j",0.5,7,true,2.0,1.5,[[1,2]],"NaN"]'
    assert json.dumps(plain(values), allow_nan=False, separators=(",", ":")) == forms


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        (b'{"step": 1}\n', [{"step": 1}]),
        (b'{"step": 1}\n{"st', [{"step": 1}]),
        (b'{"st', []),
        (b'{"step": 1}\n{"step": 2}', [{"step": 1}, {"step": 2}]),
        (b"", []),
    ],
)
def test_later_run_appends_to_whole_lines(tmp_path: Path, left: bytes, kept: list[Any]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_bytes(left)
    tracker = JSONLinesTracker("run", tmp_path)
    tracker.start()
    tracker.log({}, step=9)
    tracker.finish()
    found = lines_of(tmp_path / "run")
    assert found[:-1] == kept
    assert found[-1]["step"] == 9


def test_line_without_room_is_an_error_and_cut_off_later(tmp_path: Path) -> None:
    tracker = JSONLinesTracker("run", tmp_path)
    tracker.start()
    with small_files(100), pytest.raises(OSError, match=r"no room for a whole line: .*metrics\.jsonl"):
        tracker.log({"text": "x" * 200})
    tracker.finish()
    tracker.start()
    tracker.finish()
    assert lines_of(tmp_path / "run") == []


def test_hyperparameters_are_stored_whole(tmp_path: Path) -> None:
    tracker = JSONLinesTracker("run", tmp_path)
    tracker.start()
    for lr in (0.1, float("nan")):
        tracker.store_init_configuration({"lr": lr, "betas": (0.9, 0.99), "place": tmp_path})
    tracker.finish()
    stored = json.loads((tmp_path / "run" / "config.json").read_text("utf-8"))
    assert stored == {"lr": "NaN", "betas": [0.9, 0.99], "place": repr(tmp_path)}
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.json", "metrics.jsonl"]
