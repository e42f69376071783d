"""Nodes of a Ray cluster that are lost while their ranks run, on a real cluster of two nodes on this machine."""

from __future__ import annotations

import contextlib
import functools
import socket
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from notebook_launcher import Ray, launch, notebook_launch, report
from notebook_launcher.engines.cluster.ray_engine import ended
from notebook_launcher.errors import NodeLostError
from tests.engines.calls import all_up, sum_up, wait_for_rank_0
from tests.support.leaks import MARK
from tests.support.ray_clusters import ray_cluster
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from notebook_launcher import Run
    from tests.support.ray_clusters import RayCluster

pytest.importorskip("ray", reason="pip install 'notebook-launcher[ray]'")

QUIET: dict[str, Any] = {
    "output": "none", "monitor": False, "threads_per_process": 1, "runs_folder": None, "devices": "cpu",
}  # fmt: skip
HEAD = "--head"
"""In the command line of the raylet to which the kernel's driver is connected."""
pytestmark = pytest.mark.filterwarnings("ignore:This Ray cluster asks for no token:UserWarning")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Return a cluster of two nodes."""
    with ray_cluster(without=[MARK]) as cluster:
        yield cluster


@pytest.fixture
def engine(cluster: RayCluster) -> Iterator[Ray]:
    """Return an engine of its own for a test, because idle agents hold what the next test needs."""
    with Ray(cluster.address, cpus=1) as engine:
        yield engine


def agents_of(engine: Ray) -> list[psutil.Process]:
    return [psutil.Process(node.greeting.pid) for _, node in engine._agents()]


def wait() -> None:
    report(up=1)
    time.sleep(600)


def is_up(run: Run) -> bool:
    return bool(run.metrics)


def raylet_of(agent: psutil.Process) -> psutil.Process:
    """Return the raylet whose worker is the agent's actor."""
    raylet = agent.parents()[1]
    assert raylet.name() == "raylet"
    return raylet


def lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def lose_a_node(engine: Ray, choose: Callable[[list[psutil.Process]], tuple[int, psutil.Process]]) -> tuple[str, float]:
    """Kill a process of a node while ranks wait in a collective; return the error's text, and the seconds until it.

    Args:
        engine: The engine.
        choose: Takes the agents; returns the number of the node that is lost, and the process to kill.
    """
    run = launch(wait_for_rank_0, 4, engine=engine, **QUIET)
    until(lambda: all_up(run), run)
    pids = [rank.pid for rank in run.ranks]
    agents = agents_of(engine)
    node, victim = choose(agents)
    left = [agents[node], *agents[node].children(recursive=True)]
    if victim.name() == "raylet":  # Otherwise the raylet keeps the worker for others.
        left.append(agents[node].parents()[0])
    began = time.monotonic()
    victim.kill()
    error = run.exception(60)
    took = time.monotonic() - began
    assert isinstance(error, NodeLostError)
    assert str(error).startswith(f"node {node} (")
    assert f"with ranks {2 * node}, {2 * node + 1}: " in str(error)
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids if pid is not None))
    until(lambda: not any(lives(process) for process in left))
    return str(error), took


def test_killed_agent_costs_its_node_and_the_next_launch_has_it_again(engine: Ray) -> None:
    text, took = lose_a_node(engine, lambda agents: (1, agents[1]))
    assert "with ranks 2, 3: it ended with -9" in text
    assert took < 20
    assert list(notebook_launch(sum_up, 4, engine=engine, **QUIET)) == [4.0] * 4


def test_killed_actor_costs_its_node_and_the_next_launch_has_it_again(engine: Ray) -> None:
    text, took = lose_a_node(engine, lambda agents: (1, agents[1].parents()[0]))
    assert "with ranks 2, 3: ActorDiedError" in text
    assert took < 20
    assert list(notebook_launch(sum_up, 4, engine=engine, **QUIET)) == [4.0] * 4


def test_killed_raylet_costs_its_node_at_once_and_the_next_launch_does_without_it(
    engine: Ray, cluster: RayCluster
) -> None:
    lose_a_raylet(engine, is_head=False)
    cluster.add_node()
    # The launch before has asked for the nodes, and now there is one more.
    assert list(notebook_launch(sum_up, 8, engine=engine, nodes=2, **QUIET)) == [8.0] * 8
    assert len(engine.look()) == 2


def test_killed_raylet_of_the_kernel_costs_its_node_at_once_and_the_next_launch_does_without_it(engine: Ray) -> None:
    lose_a_raylet(engine, is_head=True)


def lose_a_raylet(engine: Ray, *, is_head: bool) -> None:
    def choose(agents: list[psutil.Process]) -> tuple[int, psutil.Process]:
        raylets = [raylet_of(agent) for agent in agents]
        return next(pair for pair in enumerate(raylets) if (HEAD in pair[1].cmdline()) == is_head)

    text, took = lose_a_node(engine, choose)
    assert "its raylet, Ray's own process on that node, has ended" in text
    assert took < 2
    assert len(engine.look()) == 1
    assert list(notebook_launch(sum_up, 4, engine=engine, **QUIET)) == [4.0] * 4


def test_killed_raylet_of_the_kernel_ends_ranks_of_other_nodes_too() -> None:
    with ray_cluster(without=[MARK]) as cluster, contextlib.ExitStack() as stack:
        # The first holds all of a node, so the second takes the other node.
        engines = [stack.enter_context(Ray(cluster.address, max_nodes=1, cpus=cpus)) for cpus in (4, 1)]
        runs = [launch(wait, 1, engine=engine, **QUIET) for engine in engines]
        for run in runs:
            until(functools.partial(is_up, run), run)
        agents = [agents_of(engine)[0] for engine in engines]
        heads = [HEAD in raylet_of(agent).cmdline() for agent in agents]
        assert sorted(heads) == [False, True]
        began = time.monotonic()
        raylet_of(agents[heads.index(True)]).kill()
        texts = [str(run.exception(60)) for run in runs]
        assert time.monotonic() - began < 4  # Ray may take a second to end the other actor.
        assert "its raylet, Ray's own process on that node, has ended" in texts[heads.index(True)]
        assert "the raylet, Ray's own process, of the kernel's machine has ended" in texts[heads.index(False)]
        until(lambda: not any(lives(agent) for agent in agents))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_only_nodes_whose_machine_refuses_count_as_ended(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as there, socket.socket(family) as gone:
        try:
            there.bind((host, 0))
        except OSError as error:
            pytest.skip(f"{host} cannot be bound here: {error}")
        gone.bind((host, 0))
        there.listen()
        nodes = [
            {"NodeID": name, "NodeManagerAddress": host, "NodeManagerPort": sock.getsockname()[1]}
            for name, sock in (("there", there), ("gone", gone))
        ]
        assert ended(nodes) == {"gone"}
