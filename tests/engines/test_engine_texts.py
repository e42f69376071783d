"""Engines that are typed: as a text in code, in the panel and in a terminal, and in a settings file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher import SSH, Commands, ConfigError, LaunchConfig, Ray
from notebook_launcher.command_line.launch_command import add_options, given_options
from notebook_launcher.command_line.parser import Parser
from notebook_launcher.engines.cluster import command_engines
from notebook_launcher.engines.cluster.command_engines import Slurm
from notebook_launcher.widgets.launching.launch_state import LaunchState
from notebook_launcher.widgets.panel.view import option_field

if TYPE_CHECKING:
    from pathlib import Path

HOSTS = SSH(["gpu1", "me@gpu2"])


@pytest.fixture
def allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for Slurm's program that lists the nodes of an allocation."""
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho n1; echo n2\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")


def test_text_names_machines(allocation: None) -> None:
    engines = {"ssh gpu1 me@gpu2": HOSTS, "slurm": Slurm(), "ray": Ray(), "ray 10.0.0.1:6379": Ray("10.0.0.1:6379")}
    for text, engine in engines.items():
        assert LaunchConfig(engine=text).engine == engine  # type: ignore[arg-type]
        assert command_engines.write(engine) == text
    assert LaunchConfig(engine="SSH gpu1,me@gpu2").engine == HOSTS  # type: ignore[arg-type]
    assert LaunchConfig(engine="this machine").engine is None  # type: ignore[arg-type]
    assert not command_engines.write(Ray(cpus=2))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "dask",
            r"engine='dask' is not an engine\. A text can be 'this machine', 'slurm', 'ray', 'ray' with a cluster's",
        ),
        ("ray a:1 b:1", "engine='ray a:1 b:1' is not an engine"),
        ("ray head", "address='head' is not an address of a Ray cluster"),
        ("ssh", "engine='ssh' is not an engine"),
        ({"kind": "Dask"}, "is not an engine: its kind can be Commands, Ray, SSH, Slurm, with their fields"),
        ({"kind": "SSH"}, r"is not an engine: .*'hosts'"),
    ],
)
def test_text_or_setting_that_names_no_engine_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        LaunchConfig(engine=value)
    assert caught.value.field == "engine"


@pytest.mark.parametrize(
    "engine",
    [
        HOSTS,
        Commands([["docker", "exec", "-i", "a"], []], python="python3"),
        SSH(["a"], options=["-p", "22"]),
        Ray("h:1", keep=None, max_nodes=2, runtime_env={"pip": ["x"]}),
    ],
)
def test_settings_file_keeps_the_engine(engine: Any, tmp_path: Path) -> None:
    config = LaunchConfig(engine=engine, num_processes=300, nodes=1)
    assert LaunchConfig.from_yaml(config.to_yaml(tmp_path / "settings.yaml")) == config


def typed(*words: str, has_engine: bool = False) -> dict[str, Any]:
    parser = Parser()
    add_options(parser)
    return given_options(parser.parse_args(words), has_engine=has_engine)


def test_terminal_takes_an_engine_and_the_numbers_of_torchrun() -> None:
    given = typed("--engine", "ssh gpu1 me@gpu2", "--nproc_per_node", "8", "--nnodes", "2")
    assert given == {"engine": "ssh gpu1 me@gpu2", "processes_per_node": 8, "nodes": 2}
    assert LaunchConfig(**given).engine == HOSTS
    assert typed("--nproc_per_node", "8") == {"num_processes": 8}
    assert typed("--nproc_per_node", "8", has_engine=True) == {"processes_per_node": 8}


def test_panel_lists_what_can_be_typed_and_takes_it(allocation: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    found = command_engines.describe_found(os.environ)
    assert "slurm: the allocation here with 2 nodes, 8 GPUs each" in found
    state = LaunchState(os.getpid, LaunchConfig(), {})
    state.put_typed("engine", "ssh gpu1 me@gpu2")
    assert state.config.engine == HOSTS
    assert state.plan is None, "a panel must not log in on other machines while somebody types"
    assert not state.problems
    assert 'engine="ssh gpu1 me@gpu2"' in state.code()[0]
    state.put_typed("engine", "ssh")
    assert "engine='ssh' is not an engine" in state.problems["engine"]
    assert option_field("engine").write(Commands([[]])).startswith("Commands(")
