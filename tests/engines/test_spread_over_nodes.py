"""Ranks for each node: `num_processes`, `nodes`, `processes_per_node`."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_launcher import Commands, ConfigError, LaunchConfig
from notebook_launcher.kernel.display.console import label
from notebook_launcher.machine.allocation import NodeInfo, allocate_nodes

TWO = Commands([[], []])
NODES = [NodeInfo(number, f"gpu{number + 1}.example.org", "10.0.0.1", 8, ("H100",) * 4) for number in range(3)]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (12, 3)),
        ({"num_nodes": 2}, (8, 2)),
        ({"processes_per_node": 2}, (6, 3)),
        ({"num_nodes": 2, "processes_per_node": 3}, (6, 2)),
        ({"num_processes": 4, "processes_per_node": 2}, (4, 2)),
        ({"num_processes": 5, "num_nodes": 2}, (5, 2)),
        ({"num_processes": 2}, (2, 2)),
    ],
)
def test_ranks_are_spread_evenly_over_nodes(asked: dict[str, int], expected: tuple[int, int]) -> None:
    taken = allocate_nodes(NODES, **{"num_processes": None, "devices": None, "backend": "auto", **asked})  # type: ignore[arg-type]
    assert (taken.num_processes, taken.num_nodes) == expected
    assert len(taken.node_names) == taken.num_processes
    assert set(taken.node_names) == {f"gpu{number + 1}" for number in range(taken.num_nodes)}
    assert allocate_nodes(NODES, num_processes=None, devices=None, backend="auto", num_nodes=1).node_names == ()


@pytest.mark.parametrize(("asked", "number"), [({"num_nodes": 4}, 4), ({"processes_per_node": 1}, 9)])
def test_more_nodes_than_there_are_are_refused(asked: dict[str, int], number: int) -> None:
    given: dict[str, Any] = {"num_processes": 9, "devices": None, "backend": "auto", **asked}
    with pytest.raises(
        ConfigError, match=rf"{number} nodes are asked for, and the engine has 3 nodes: gpu1\..*Omit nodes="
    ):
        allocate_nodes(NODES, **given)


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"nodes": 2}, "nodes", r"nodes=2 without an engine: this is one machine\. Name the machines by an engine"),
        ({"nodes": 0}, "nodes", "nodes=0 is too small"),
        ({"num_processes": 2, "nodes": 3, "engine": TWO}, "nodes", "a node would get no process. Pass nodes=2 or less"),
        (
            {"num_processes": 4, "processes_per_node": 3},
            "processes_per_node",
            "num_processes=4 with processes_per_node=3: 1 node with 3 each make 3. Omit one",
        ),
        (
            {"num_processes": 4, "processes_per_node": 3, "nodes": 2, "engine": TWO},
            "processes_per_node",
            "2 nodes with 3 each make 6. Omit one of the numbers",
        ),
        (
            {"num_processes": 4, "processes_per_node": 3, "engine": TWO},
            "processes_per_node",
            "4 / 3 is not a whole number of nodes. Pass num_processes=6, a multiple of 3.",
        ),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(options: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        LaunchConfig(**options)
    assert caught.value.field == field


def test_label_names_the_node_of_ranks_that_share_one() -> None:
    nodes = ("gpu1", "gpu1", "gpu2")
    assert [label(ranks, nodes) for ranks in ([0, 1], [1, 2])] == ["[ranks 0,1 on gpu1] ", "[ranks 1,2] "]
