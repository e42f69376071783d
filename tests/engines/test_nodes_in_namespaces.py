"""Two nodes that are network namespaces joined by a cable of their own: addresses, sockets, a cut."""

from __future__ import annotations

import os
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from notebook_launcher import ConfigError, launch, notebook_launch, report
from notebook_launcher.engines.cluster.command_engines import Commands
from tests.engines.options import QUIET

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.namespaces import Cable


@pytest.fixture(scope="module")
def namespaces(cable: Cable) -> tuple[str, str]:
    return cable.names


@pytest.fixture(scope="module")
def engine(namespaces: tuple[str, str]) -> Iterator[Commands]:
    with Commands([["ip", "netns", "exec", name] for name in namespaces]) as engine:
        engine.look()
        yield engine


@pytest.fixture
def lasting(engine: Commands) -> None:
    """Start the agents that a test before has lost, with a cable that was cut."""
    engine.look()


def listening() -> list[tuple[str, str]]:
    """Return the addresses at which something listens in this process's network."""
    dist.all_reduce(torch.ones(1))
    shown = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
    return [(os.environ["GLOO_SOCKET_IFNAME"], line.split()[3].rpartition(":")[0]) for line in shown.splitlines()]


def test_ranks_meet_on_the_network_that_the_nodes_share_and_nothing_listens_elsewhere_or_later(
    engine: Commands, namespaces: tuple[str, str]
) -> None:
    assert [node.address for node in engine.look()] == ["203.0.113.1", "203.0.113.2"]
    first, second = notebook_launch(listening, 2, engine=engine, **QUIET)
    assert set(first) == {("eth0", "203.0.113.1")}
    assert set(second) == {("eth0", "203.0.113.2")}
    for name in namespaces:
        shown = subprocess.run(["ip", "netns", "exec", name, "ss", "-Hltn"], capture_output=True, check=True)
        assert shown.stdout == b""


def test_network_can_be_named(namespaces: tuple[str, str]) -> None:
    commands = [["ip", "netns", "exec", name] for name in namespaces]
    for network in ("eth0", "203.0.113.0/24"):
        with Commands(commands, network=network) as engine:
            assert [node.address for node in engine.look()] == ["203.0.113.1", "203.0.113.2"]
    with Commands(commands, network="10.0.0.0/8") as engine, pytest.raises(ConfigError, match="is not on every node"):
        engine.look()


def test_nodes_without_a_common_network_are_refused(namespaces: tuple[str, str]) -> None:
    with (
        Commands([[], ["ip", "netns", "exec", namespaces[0]]]) as engine,
        pytest.raises(ConfigError, match=r"the nodes have no network in common\. They have .*eth0 203\.0\.113\.0/24"),
    ):
        engine.look()


def reduce_on() -> None:
    report(up=1)
    while True:
        dist.all_reduce(torch.ones(1))


def test_stop_ends_ranks_whose_cable_is_cut_and_the_healed_cable_serves_again(engine: Commands, cable: Cable) -> None:
    run = launch(reduce_on, 2, engine=engine, **QUIET)
    while len(run.metrics) < 2:
        assert not run.wait(0.01)
    with cable.cut():
        began = time.monotonic()
        assert run.stop() in ("interrupt", "terminate", "kill")
        assert time.monotonic() - began < 10
    assert len(notebook_launch(listening, 2, engine=engine, **QUIET)) == 2
