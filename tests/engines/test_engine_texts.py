"""Engines as values: typed in code, in the panel and in a terminal, in a settings file; what agents of Ray ask for."""

from __future__ import annotations

import dataclasses
import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher import SSH, Commands, ConfigError, LaunchConfig, Ray
from notebook_launcher.command_line.launch_command import add_options, given_options
from notebook_launcher.command_line.parser import Parser
from notebook_launcher.engines.cluster import command_engines
from notebook_launcher.engines.cluster.command_engines import Slurm
from notebook_launcher.engines.cluster.ray_engine import NodeShare, RayNodes
from notebook_launcher.widgets.launching.launch_state import LaunchState
from notebook_launcher.widgets.panel.view import option_field

if TYPE_CHECKING:
    from pathlib import Path

HOSTS = SSH(["gpu1", "me@gpu2"])


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
        ("ray head", "address='head' is not an address of a Ray cluster: pass 'auto', or one such as"),
        ("ray ray://head:10001", "address='ray://head:10001': Ray Client has no streams"),
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
        Commands([["docker", "exec", "-i", "a"], "kubectl exec -i b --", []], python="python3", network="eth0"),
        SSH(["a"], options=["-p", "22"]),
        Ray("h:1", keep=None, max_nodes=2, runtime_env={"pip": ["x"]}),
    ],
)
def test_settings_file_and_a_pickle_keep_the_engine(engine: Any, tmp_path: Path) -> None:
    config = LaunchConfig(engine=engine, num_processes=300, nodes=1)
    assert LaunchConfig.from_yaml(config.to_yaml(tmp_path / "settings.yaml")) == config
    assert len({engine, pickle.loads(pickle.dumps(engine))}) == 1  # Equal engines share their agents.


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


NODE = NodeShare(node_id="a", host="gpu1", address="10.0.0.1", cpus=16.0, gpus=8, kind="H100")


@pytest.mark.parametrize(
    ("num_ranks", "use_gpus", "cpus", "asked"),
    [(2, True, None, (2.0, 2)), (20, True, None, (16.0, 8)), (2, False, 0.5, (0.5, 0))],
)
def test_agent_of_ray_asks_for_what_its_ranks_need(
    num_ranks: int, use_gpus: bool, cpus: float | None, asked: tuple[float, int]
) -> None:
    part = NODE.part(num_ranks, use_gpus=use_gpus, cpus=cpus)
    assert (part.cpus, part.gpus) == asked
    assert NODE.info(3).gpus == ("H100",) * 8


def test_agents_of_ray_serve_a_launch_that_needs_no_more() -> None:
    held = RayNodes(Ray(), (NODE, dataclasses.replace(NODE, node_id="b")))
    less = RayNodes(Ray(), (NODE.part(2, use_gpus=True, cpus=None),))
    assert held.covers(less)
    assert not held.covers(RayNodes(Ray(), (dataclasses.replace(NODE, node_id="b"),)))
    assert not less.covers(held)
