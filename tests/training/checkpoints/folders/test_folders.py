"""Folders of checkpoints: what is named, replaced and removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher.training.accelerator import Accelerator
from notebook_launcher.training.checkpoints import CheckpointError
from notebook_launcher.training.plugins import ProjectConfiguration
from tests.support.checkpoints import files
from tests.support.toy_checkpoints import Meter, Training

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("compiler_cache")

MANIFEST = "checkpoint_manifest.json"


def test_saving_again_leaves_nothing_of_the_earlier_checkpoint_and_all_else(saved, training):
    (saved / "notes.txt").write_text("mine")
    (saved / "below").mkdir()
    (saved / "below" / "model.safetensors").write_text("mine too")
    training.train(2)  # the window has ended
    training.accelerator.save_state(saved)
    assert "window_0.bin" not in files(saved)
    assert (saved / "notes.txt").read_text() == "mine"
    assert (saved / "below" / "model.safetensors").read_text() == "mine too"
    other = Training(2)
    other.accelerator.load_state(saved)
    assert other.state() == training.state()
    assert {path.name for path in saved.parent.iterdir()} == {"checkpoint"}


def test_checkpoint_of_accelerates_is_replaced_whole_and_files_beside_none_stay(tmp_path, training):
    def save_beside(name: str, *texts: str) -> set[str]:
        (tmp_path / name).mkdir()
        for text in texts:
            (tmp_path / name / text).write_text("theirs")
        training.accelerator.save_state(tmp_path / name)
        return {text for text in texts if text in files(tmp_path / name)}

    theirs = ("random_states_0.pkl", "random_states_1.pkl", "pytorch_model.bin", "sampler.bin", "keep.txt")
    assert save_beside("a", *theirs) == {"random_states_0.pkl", "keep.txt"}
    assert save_beside("b", "pytorch_model.bin") == {"pytorch_model.bin"}


def test_save_state_needs_a_folder_or_automatic_naming_in_a_project(tmp_path, training):
    with pytest.raises(CheckpointError, match=r"load_state\('.*nowhere'\): there is no folder"):
        training.accelerator.load_state(tmp_path / "nowhere")
    for method in ("save_state", "load_state"):
        with pytest.raises(
            ValueError, match=rf"{method}\(\) needs a folder: pass one, or .*automatic_checkpoint_naming"
        ):
            getattr(training.accelerator, method)()
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file; a checkpoint is a folder"):
        training.accelerator.save_state(tmp_path / "file")
    with pytest.raises(ValueError, match=r"save_state\(\) without a folder needs a project"):
        project(None).save_state()
    with pytest.raises(CheckpointError, match=r"checkpoints holds no folder checkpoint_N yet"):
        project(tmp_path).load_state()


def project(folder: Path | None, **options: Any) -> Accelerator:
    config = ProjectConfiguration(None if folder is None else str(folder), automatic_checkpoint_naming=True, **options)
    return Accelerator(cpu=True, project_config=config)


def test_checkpoints_are_numbered_and_the_newest_is_loaded(tmp_path):
    accelerator = project(tmp_path)
    accelerator.register_for_checkpointing(meter := Meter())
    for meter.state in range(11):
        assert accelerator.save_state() == tmp_path / "checkpoints" / f"checkpoint_{meter.state}"
    (tmp_path / "checkpoints" / "notes").mkdir()
    second = project(tmp_path)
    second.register_for_checkpointing(meter := Meter())
    with pytest.raises(ValueError, match=r"checkpoint_0 exists already.*iteration=11\), or call load_state\(\) first"):
        second.save_state()
    second.load_state()
    assert (meter.state, second.save_iteration) == (10, 11)
    assert second.save_state() == tmp_path / "checkpoints" / "checkpoint_11"


def test_oldest_are_removed_once_the_new_one_is_whole_and_those_of_an_earlier_run_first(tmp_path):
    def saved() -> list[int]:
        return sorted(int(path.name.removeprefix("checkpoint_")) for path in (tmp_path / "checkpoints").iterdir())

    for iteration in (8, 9, 10):
        project(tmp_path, iteration=iteration).save_state()
    accelerator, left = project(tmp_path, total_limit=3), []
    for _ in range(4):
        assert accelerator.save_state().is_dir()
        left.append(saved())
    assert left == [[0, 9, 10], [0, 1, 10], [0, 1, 2], [1, 2, 3]]

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(OSError, match="disk full"):
        accelerator.save_state()
    assert saved() == left[-1]


def test_folder_that_is_named_wins_over_automatic_naming_and_is_never_removed(tmp_path):
    accelerator = project(tmp_path / "project", total_limit=1)
    for name in ("checkpoint_1", "checkpoint_2"):
        assert accelerator.save_state(tmp_path / name) == tmp_path / name
    accelerator.load_state(tmp_path / "checkpoint_1")
    assert accelerator.save_iteration == 2
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint_1", "checkpoint_2"}
