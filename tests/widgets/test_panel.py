"""A panel around its fields: settings files, results, what is kept for the next panel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher import LaunchConfig
from notebook_launcher.widgets import ConfigPanel
from notebook_launcher.widgets.launching import launch_state
from tests.support.panels import Model, Optimizer, press, train, type_in

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("small_machine")


def test_settings_are_saved_and_loaded(tmp_path):
    path = tmp_path / "config.yaml"
    panel = ConfigPanel(train, 2, seed=7, mixed_precision="bf16", shard=2)
    press(panel, type="path", key="file", value=str(path))
    press(panel, type="save")
    assert f"accelerate launch --config_file {path}" in panel.form["notes"]["file"][0]
    other = ConfigPanel(train)
    press(other, type="path", key="file", value=str(path))
    press(other, type="load")
    assert other.config == panel.config
    path.write_text("distributed_type: 'NO'\ndynamo_config: {dynamo_backend: EAGER}\ndebug: true\n")
    press(other, type="load")
    assert "Not used here, but kept when you save: debug" in other.form["notes"]["file"][0]
    path.write_text("distributed_type: MEGATRON_LM\n")
    press(other, type="load")
    assert "it splits the model with Megatron-LM" in other.form["notes"]["file"][0]
    assert other.config == LaunchConfig(num_processes=1, env={"ACCELERATE_DYNAMO_BACKEND": "eager"})


def test_file_that_cannot_be_written_is_named_with_the_reason():
    panel = ConfigPanel(train)
    press(panel, type="path", key="script", value="/proc/such.py")
    press(panel, type="export")
    text = "export(path='/proc/such.py'): it cannot be written: No such file or directory."
    assert panel.form["notes"]["script"] == [text, "error"]


@pytest.fixture
def notebook(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A notebook that Jupyter's server has named, and a place for its runs."""
    monkeypatch.setenv("JPY_SESSION_NAME", "/somewhere/a.ipynb")
    return home


def tuned(
    lr: float = 0.1, path=None, opt: Optimizer = Optimizer.ADAM, model=None, api_key: str = "", *, flag: bool = False
):
    pass


def remembered(panel: ConfigPanel) -> Any:
    path = launch_state.file_of(panel.fn, panel.config)
    assert path is not None
    launch_state.write(path, panel.settings)
    settings = launch_state.read(path)
    assert settings is not None
    return settings


def test_settings_of_a_run_fill_the_next_panel_and_can_be_taken_back(notebook):
    panel = ConfigPanel(tuned, 2, seed=5, mixed_precision="bf16")
    for name, value in {"lr": "0.5", "path": "3 a", "opt": 1, "flag": True, "max_grad_norm": "1"}.items():
        type_in(panel, name, value)
    panel.arguments["model"] = Model()
    panel.arguments["api_key"] = "hidden"
    other = ConfigPanel(tuned, seed=6, kwargs={"lr": 0.2})
    other.view.recall(remembered(panel), "As in your last run")
    other.draw()
    assert other.config == LaunchConfig(num_processes=2, seed=6, mixed_precision="bf16", max_grad_norm=1)
    assert dict(other.arguments) == {"lr": 0.2, "path": "3 a", "opt": Optimizer.SGD, "flag": True}
    said = other.form["recalled"]
    assert "As in your last run: Processes 2, Mixed precision bf16, Maximum gradient norm 1.0, path" in said
    assert "lr" not in said
    press(other, type="forget")
    assert other.config == LaunchConfig(seed=6)
    assert dict(other.arguments) == {"lr": 0.2}
    assert other.form["recalled"] == ""


def test_settings_that_the_function_no_longer_takes_are_left_out(notebook):
    settings = {
        "options": {"num_processes": "many", "seed": -1, "env": {"A": "b"}, "output": "none"},
        "arguments": {"lr": "fast", "gone": "1", "opt": "gone", "flag": "x", "path": 3},
    }
    panel = ConfigPanel(tuned)
    panel.view.recall(settings, "As in your last run")
    assert panel.config == LaunchConfig(output="none")
    assert dict(panel.arguments) == {}


def test_no_settings_are_kept_without_recording_or_a_known_notebook(notebook, monkeypatch):
    file = launch_state.file_of(tuned, LaunchConfig())
    assert file is not None
    assert file.parent == notebook / "panels"
    assert file != launch_state.file_of(train, LaunchConfig())
    assert launch_state.file_of(tuned, LaunchConfig(runs_folder=None)) is None
    assert launch_state.file_of(None, LaunchConfig()) is None
    monkeypatch.setenv("JPY_SESSION_NAME", "/somewhere/b.ipynb")
    assert file != launch_state.file_of(tuned, LaunchConfig())
    monkeypatch.delenv("JPY_SESSION_NAME")
    assert launch_state.file_of(tuned, LaunchConfig()) is None
    file.parent.mkdir(parents=True)
    for text in ("", "[]", '{"options": 3}'):
        file.write_text(text)
        assert launch_state.read(file) is None


def test_picture_of_a_panel_holds_its_values_and_its_code(names):
    names["train"] = train
    panel = ConfigPanel(train, 2, seed=3)
    type_in(panel, "lr", "0.5")
    rows = panel.view.words()
    assert rows == {
        "Processes": "2",
        "Accumulation steps": "1",
        "Mixed precision": "no",
        "Seed": "3",
        "lr": "0.5",
        "epochs": "3",
        "Micro-batch size": "32",
    }
    shown = panel._picture()
    assert "<style" not in shown
    assert "notebook_launch(train, 2, kwargs={&quot;lr&quot;: 0.5}, seed=3)" in shown
    assert "2 CPU ranks, gloo" in shown
