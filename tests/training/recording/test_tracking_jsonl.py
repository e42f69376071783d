"""The tracker of JSON lines: each call is a whole line at once, whatever happens to the process."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from notebook_launcher.training.recording.tracker_classes import JSONLinesTracker, plain
from tests.support.checkpoints import small_files
from tests.support.toy_trackers import lines_of

if TYPE_CHECKING:
    from pathlib import Path


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


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, True),
        (3, 3),
        (None, None),
        (float("nan"), "NaN"),
        (float("inf"), "Infinity"),
        (-float("inf"), "-Infinity"),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.array([[2.0]]), 2.0),
        (torch.tensor([1.5], dtype=torch.bfloat16), 1.5),
        (torch.tensor([[1, 2]]), [[1, 2]]),
        (torch.tensor(float("nan")), "NaN"),
        ({"a": (1, float("inf"))}, {"a": [1, "Infinity"]}),
        (1j, "1j"),
    ],
    ids=repr,
)
def test_every_value_has_a_form(value: Any, expected: Any) -> None:
    assert plain(value) == expected
    assert type(plain(value)) is type(expected)
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == expected


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
