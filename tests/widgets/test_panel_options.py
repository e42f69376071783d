"""Fields of a panel for options of the launch, and for the machine."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_launcher import ConfigError, LaunchConfig
from notebook_launcher.machine import devices
from notebook_launcher.machine.devices import GPU, Machine
from notebook_launcher.widgets import ConfigPanel
from tests.support.panels import GIGABYTE, field, note_of, press, train, type_in, words_of

pytestmark = pytest.mark.usefixtures("small_machine")


@pytest.mark.parametrize(
    ("name", "typed", "value"),
    [
        ("num_processes", "2", 2),
        ("max_grad_norm", "0.5", 0.5),
        ("timeout", "1e3", 1000.0),
        ("max_grad_norm", "None", None),
        ("backend", 1, "gloo"),
        ("comm_hook", 2, "bf16"),
        ("resume", 1, "checkpoint"),
        ("preemption_signal", 2, "SIGUSR1"),
        ("gradient_accumulation_steps", "1e3", 1000),
        ("num_processes", "2.0", 2),
        ("mixed_precision", "bf16", "bf16"),
        ("start_method", "spawn", "spawn"),
        ("output", "none", "none"),
    ],
)
def test_field_sets_its_option(name, typed, value):
    panel = ConfigPanel(train)
    type_in(panel, name, typed)
    assert panel.config == LaunchConfig(**{name: value})
    assert panel.problems == {}
    assert not panel.launch_button.disabled


def test_notes_name_the_option_that_a_restart_or_a_signal_needs():
    panel = ConfigPanel(train)
    assert "The function starts from the beginning, unless it loads" in note_of(panel, "resume")
    assert "Automatic: no signal; if restarts resume from a checkpoint" in note_of(panel, "preemption_signal")
    type_in(panel, "resume", 1)
    type_in(panel, "preemption_signal", 1)
    assert "No restarts are allowed yet" in note_of(panel, "resume")
    assert "Only for a run that outlives the kernel" in note_of(panel, "preemption_signal")
    type_in(panel, "max_restarts", "3")
    type_in(panel, "detached", True)
    assert panel.config == LaunchConfig(resume="checkpoint", preemption_signal="SIGTERM", max_restarts=3, detached=True)
    assert "without a folder loads the newest checkpoint" in note_of(panel, "resume")
    assert "Sent by a cluster before" in note_of(panel, "preemption_signal")
    type_in(panel, "preemption_signal", 0)
    assert "SIGTERM. Sent by a cluster" in note_of(panel, "preemption_signal")


@pytest.mark.parametrize(
    ("name", "typed", "message"),
    [
        ("num_processes", "two", "Enter a whole number, 1 or more."),
        ("num_processes", "True", "Enter a whole number, 1 or more."),
        ("gradient_accumulation_steps", "1.5", "Enter a whole number, 1 or more."),
        ("max_restarts", "None", "Enter a whole number, 0 or more."),
        ("num_processes", "1000", "Enter 64 or less: this machine has 2 CPU cores."),
        ("shard", "3", "2 / 3 is not a whole number of replicas. It can be 1, 2"),
        ("seed", "-1", "Enter a whole number, 0 to 4,294,967,295."),
        ("timeout", "inf", "Enter a number above 0."),
        ("max_grad_norm", "x", "Enter a number above 0."),
        ("backend", "nccl (no GPU found)", "Choose auto or gloo: nccl needs a GPU for each process (no GPU found)."),
    ],
)
def test_invalid_value_is_noted_at_its_field_and_disables_launch(name, typed, message):
    panel = ConfigPanel(train)
    type_in(panel, name, typed)
    assert message in note_of(panel, name)
    assert list(panel.problems) == [name]
    assert panel.launch_button.disabled
    reason = f"Fix {field(panel, name)['label']} to enable Launch."
    assert reason in panel.run_area.status_text
    assert panel.launch_button.tooltip == reason
    panel.launch_button.click()
    assert panel.run is None
    type_in(panel, name, 0 if name == "backend" else "")
    assert panel.problems == {}
    assert not panel.launch_button.disabled
    assert field(panel, name)["level"] != "error"


def test_mistake_in_one_field_survives_typing_in_another():
    panel = ConfigPanel(train)
    type_in(panel, "seed", "abc")
    type_in(panel, "timeout", "1e3")
    type_in(panel, "num_processes", "2")
    assert [field(panel, name)["value"] for name in ("seed", "timeout")] == ["abc", "1e3"]
    assert list(panel.problems) == ["seed"]
    assert panel.form["remark"] == "1 to fix"
    assert (panel.config.seed, panel.config.num_processes) == (None, 2)


def test_config_can_be_set_and_observed():
    panel = ConfigPanel(train, 2)
    seen: list[LaunchConfig] = []
    panel.observe(lambda change: seen.append(change["new"]), "config")
    type_in(panel, "seed", "abc")
    panel.config = LaunchConfig(num_processes=1, timeout=60, env={"A": "b"}, mixed_precision="bf16", seed=5)
    assert [field(panel, name)["value"] for name in ("num_processes", "timeout", "seed")] == ["1", "60", "5"]
    assert words_of(panel, "mixed_precision")[field(panel, "mixed_precision")["value"]] == "bf16"
    assert panel.problems == {}
    type_in(panel, "seed", "6")
    assert [config.seed for config in seen] == [5, 6]
    assert panel.config.env == {"A": "b"}


def test_panel_takes_the_options_of_a_launch():
    assert ConfigPanel(train, 2, config=LaunchConfig(seed=1), timeout=5).config == LaunchConfig(
        num_processes=2, seed=1, timeout=5
    )
    with pytest.raises(ConfigError, match=r"unknown option num_proceses=. Did you mean num_processes="):
        ConfigPanel(train, num_proceses=2)


def test_without_a_gpu_the_devices_are_grey_with_the_reason():
    panel = ConfigPanel(train)
    shown = field(panel, "devices")
    assert words_of(panel, "devices", disabled=True) == ["all", "some"]
    assert words_of(panel, "devices")[shown["value"]] == "CPU"
    assert shown["choices"][0]["tip"] == "no GPU found"
    assert "No GPU found" in note_of(panel, "devices")
    panel.config = LaunchConfig(devices=[0])  # type: ignore[arg-type]
    assert "Choose CPU: no GPU found." in note_of(panel, "devices")
    type_in(panel, "devices", "CPU")
    assert panel.config.devices == "cpu"
    assert panel.problems == {}


def test_gpus_are_picked_by_name_and_memory(on):
    on(16, 3)
    panel = ConfigPanel(train)

    def chosen() -> Any:
        return panel.config.devices

    shown = field(panel, "devices")
    assert shown["boxes"][1]["text"] == "1: H200, 20 GB free, 120 GB used"
    assert (shown["value"], shown["boxes_disabled"]) == (0, "Choose 'some' to pick GPUs")
    type_in(panel, "devices", "some")
    assert chosen() == (0, 1, 2)
    assert field(panel, "devices")["boxes_disabled"] == ""
    type_in(panel, "devices", [0, 2])
    assert [box["value"] for box in field(panel, "devices")["boxes"]] == [True, False, True]
    assert chosen() == (0, 2)
    assert field(panel, "num_processes")["placeholder"] == "2 (automatic)"
    type_in(panel, "devices", [])
    assert "Tick a GPU, or choose CPU." in note_of(panel, "devices")
    assert not any(box["value"] for box in field(panel, "devices")["boxes"])
    type_in(panel, "devices", "CPU")
    assert chosen() == "cpu"
    assert not any(box["value"] for box in field(panel, "devices")["boxes"])
    assert panel.problems == {}


def test_free_memory_of_gpus_can_be_read_again(on, monkeypatch):
    on(16, 1)
    panel = ConfigPanel(train)
    fresh = GPU(index=0, name="H200", total_memory=140 * GIGABYTE, free_memory=140 * GIGABYTE)
    monkeypatch.setattr(devices, "detect", lambda: Machine(num_cores=1, gpus=(fresh,), why_no_gpu=""))
    press(panel, type="refresh")
    assert field(panel, "devices")["boxes"][0]["text"] == "0: H200, 140 GB free, 0 bytes used"


@pytest.mark.parametrize(
    ("on_machine", "grey", "reason"),
    [
        ((2, 0), ["fp16"], "fp16 needs a GPU"),
        ((8, 1, (9, 0)), [], ""),
        ((8, 1, (7, 5)), ["bf16"], "bf16 needs compute capability 8.0; H200 has 7.5."),
        ((8, 1, (5, 2)), ["fp16", "bf16"], "fp16 needs compute capability 5.3"),
    ],
)
def test_unsupported_precisions_are_grey(on, on_machine, grey, reason):
    on(*on_machine)
    panel = ConfigPanel(train)
    assert words_of(panel, "mixed_precision", disabled=True) == grey
    assert reason in note_of(panel, "mixed_precision")
    if grey:
        panel.config = LaunchConfig(mixed_precision=grey[0])
        assert field(panel, "mixed_precision")["level"] == "warning"
        assert panel.problems == {}  # It runs, if slowly; who says so in code is not stopped.
