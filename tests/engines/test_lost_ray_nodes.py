"""Nodes of a Ray cluster that are lost while their ranks run, on a real cluster of two nodes on this machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from notebook_launcher import Ray, launch, notebook_launch
from notebook_launcher.errors import NodeLostError
from tests.engines.calls import all_up, sum_up, wait_for_rank_0
from tests.support.leaks import MARK
from tests.support.ray_clusters import ray_cluster
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


@pytest.mark.parametrize(
    ("victim", "reason"),
    [
        ("agent", "it ended with -9"),
        ("actor", "ActorDiedError"),
        ("raylet", "its raylet, Ray's own process on that node, has ended"),
    ],
)
def test_killed_process_costs_its_node_and_the_next_launch_works(
    engine: Ray, cluster: RayCluster, victim: str, reason: str
) -> None:
    def choose(agents: list[psutil.Process]) -> tuple[int, psutil.Process]:
        if victim == "raylet":
            raylets = [raylet_of(agent) for agent in agents]
            return next(pair for pair in enumerate(raylets) if HEAD not in pair[1].cmdline())
        return 1, agents[1] if victim == "agent" else agents[1].parents()[0]

    text, took = lose_a_node(engine, choose)
    assert reason in text
    assert took < 30
    if victim == "raylet":
        until(lambda: len(engine.look()) == 1)
        cluster.add_node()
    assert list(notebook_launch(sum_up, 4, engine=engine, **QUIET)) == [4.0] * 4
    assert len(engine.look()) == 2
