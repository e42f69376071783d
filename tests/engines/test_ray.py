"""Launches over Ray, and nodes that are lost, on a real cluster of two nodes that run on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import torch.distributed as dist

from notebook_launcher import ConfigError, Ray, Session, launch, notebook_launch
from notebook_launcher.engines.cluster.ray_connections import RayDrivers
from notebook_launcher.errors import NodeLostError
from tests.engines.calls import QUIET, all_up, sum_up, wait_for_rank_0
from tests.support.leaks import MARK
from tests.support.ray_clusters import ray_cluster
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.ray_clusters import RayCluster

pytest.importorskip("ray", reason="pip install 'notebook-launcher[ray]'")

ON_CPU: dict[str, Any] = {**QUIET, "devices": "cpu"}
HEAD = "--head"
"""In the command line of the raylet to which the kernel's driver is connected."""
pytestmark = pytest.mark.filterwarnings("ignore:This Ray cluster asks for no token:UserWarning")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(without=[MARK]) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def address(cluster: RayCluster) -> str:
    return cluster.address


@pytest.fixture(scope="module")
def engine(address: str) -> Iterator[Ray]:
    """An engine whose agents are up."""
    with pytest.warns(UserWarning, match="asks for no token"), Ray(address, keep=None) as engine:
        notebook_launch(sum_up, 4, engine=engine, **ON_CPU)
        yield engine


def agents_of(engine: Ray) -> list[int]:
    return [node.greeting.pid for _, node in engine._agents()]


def place() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"))


def test_look_lists_the_resources_of_ray(engine: Ray, address: str) -> None:
    nodes = Ray(address).look()
    assert [(node.node, node.num_cores, node.gpus) for node in nodes] == [(0, 4, ("GPU",) * 2), (1, 4, ("GPU",) * 2)]
    assert len(Ray(address, max_nodes=1).look()) == 1
    assert not Ray(address)._agents()


def test_ranks_of_a_node_are_consecutive_and_results_come_back(engine: Ray) -> None:
    results = notebook_launch(place, 4, engine=engine, **ON_CPU)
    assert list(results) == [("0", "0", "2", "0"), ("1", "1", "2", "0"), ("2", "0", "2", "1"), ("3", "1", "2", "1")]
    assert len(set(agents_of(engine))) == 2


def test_answer_to_an_interrupted_request_is_not_taken_for_the_next_one(address: str) -> None:
    driver = RayDrivers().get(address)
    driver._send({"ask": "interrupted"})
    assert len(driver.nodes()) == 2
    driver._process.kill()
    until(lambda: driver.has_ended)
    driver.kill()


def test_launch_that_needs_more_has_new_agents_and_idle_ones_end(address: str) -> None:
    with Ray(address, max_nodes=1, keep=0.2) as engine:
        with Session(1, engine=engine, **ON_CPU) as session:
            session.run(sum_up)
        until(lambda: not engine._agents())
    with Ray(address, max_nodes=1) as engine:
        notebook_launch(sum_up, 1, engine=engine, **ON_CPU)
        first = agents_of(engine)
        assert list(notebook_launch(sum_up, 2, engine=engine, **ON_CPU)) == [2.0] * 2
        assert agents_of(engine) != first
        until(lambda: not psutil.pid_exists(first[0]))


def test_session_has_output_errors_and_large_values_of_all_nodes(engine: Ray) -> None:
    def fail_on_node_1() -> None:
        print("hello from", os.environ["RANK"])
        if os.environ["RANK"] == "3":
            raise ZeroDivisionError("only here")
        dist.all_reduce(torch.ones(1))

    with Session(4, engine=engine, **ON_CPU) as session:
        run = session.launch(fail_on_node_1)
        error = run.exception(60)
        assert isinstance(error, ZeroDivisionError)
        assert error.rank == 3  # type: ignore[attr-defined]
        assert "hello from 2" in run.logs(2)
        first = list(session.run(os.getpid))
        data = torch.arange(2 << 20)
        assert session.run(lambda: int(data.sum()))[3] == int(data.sum())
        assert torch.equal(session.run(lambda: data + 1 if os.environ["RANK"] == "3" else None)[3], data + 1)
        assert list(session.run(os.getpid)) == first


PROGRAM = """
import logging, os, psutil, signal, sys, threading, time
from notebook_launcher import Ray, launch, notebook_launch, report
def state():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    loggers = [(name, logging.getLogger(name).handlers) for name in sorted(logging.root.manager.loggerDict)]
    return handlers, loggers, logging.root.handlers, sys.stdout, sys.excepthook, threading.excepthook, dict(os.environ)
def wait():
    report(up=1)
    time.sleep(600)
options = dict(output="none", monitor=False, runs_folder=None, devices="cpu")
notebook_launch(int, 1, **options)
before = state()
run = launch(wait, 2, engine=Ray({address!r}), **options)
while len(run.metrics) < 2:
    assert not run.wait(0.01), run
print(before == state(), "ray" in sys.modules)
print(*[rank.pid for rank in run.ranks], *[process.pid for process in psutil.Process().children()], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ray_stays_out_of_the_kernel_and_nothing_outlives_it(address: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(address=address)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout.startswith("True False\n"), ended.stderr
    pids = [int(word) for word in ended.stdout.split()[2:]]
    assert len(pids) >= 3
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_ranks_that_ray_cannot_place_are_refused(address: str) -> None:
    asked = r"node 0 did not come up: no message arrived for 2 s\. Ray was asked for 4 CPU, 0 GPU at .*patience="
    with Ray(address, cpus=1) as busy, Ray(address, cpus=4, patience=2) as other:
        notebook_launch(sum_up, 4, engine=busy, **ON_CPU)
        assert len(agents_of(busy)) == 2  # Each node lacks one of its 4 CPUs.
        with pytest.raises(ConfigError, match=asked):
            notebook_launch(sum_up, 2, engine=other, **ON_CPU)


def test_agent_that_does_not_see_its_gpus_is_refused(address: str) -> None:
    refused = r"Ray has reserved 2 GPUs there, and torch finds 0\. Install a torch with CUDA"
    with Ray(address, max_nodes=1) as engine, pytest.raises(ConfigError, match=refused):
        notebook_launch(sum_up, engine=engine, **QUIET)


def test_address_without_a_ray_cluster_names_the_command_that_starts_one() -> None:
    with Ray("127.0.0.1:1") as engine, pytest.raises(ConfigError, match=r"cannot be reached: .*ray start --head"):
        engine.look()


def test_missing_ray_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with Ray("127.0.0.1:2") as engine, pytest.raises(ConfigError, match=r"pip install 'notebook-launcher\[ray\]'"):
        engine.look()


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
    run = launch(wait_for_rank_0, 4, engine=engine, **ON_CPU)
    until(lambda: all_up(run), run)
    pids = [rank.pid for rank in run.ranks]
    agents = [psutil.Process(pid) for pid in agents_of(engine)]
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
def test_killed_process_costs_its_node_and_the_next_launch_works(cluster: RayCluster, victim: str, reason: str) -> None:
    def choose(agents: list[psutil.Process]) -> tuple[int, psutil.Process]:
        if victim == "raylet":
            raylets = [raylet_of(agent) for agent in agents]
            return next(pair for pair in enumerate(raylets) if HEAD not in pair[1].cmdline())
        return 1, agents[1] if victim == "agent" else agents[1].parents()[0]

    # An engine of its own, because idle agents hold what the next test needs.
    with Ray(cluster.address, cpus=1) as engine:
        text, took = lose_a_node(engine, choose)
        assert reason in text
        assert took < 30
        if victim == "raylet":
            until(lambda: len(engine.look()) == 1)
            cluster.add_node()
        assert list(notebook_launch(sum_up, 4, engine=engine, **ON_CPU)) == [4.0] * 4
        assert len(engine.look()) == 2
