"""Agents that are stopped, that take too long to come up, or whose machine cannot hold their ranks."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from notebook_launcher import Commands, RunTimeoutError, launch, notebook_launch
from notebook_launcher.engines.cluster.clusters import clusters
from notebook_launcher.errors import ResourceError
from tests.engines.calls import QUIET, sum_up
from tests.support.waiting import until
from tests.support.warm_kernels import takes_less_than


def sleep() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(600)


def below() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if "agent" in " ".join(process.cmdline())]


@pytest.mark.slow
def test_stopped_agent_or_fork_server_holds_up_neither_the_limit_nor_a_stop_nor_the_end() -> None:
    def attempt(timeout: float | None = None) -> float:
        run = launch(sleep, 1, engine=engine, timeout=timeout, **QUIET)
        until(lambda: run.wait(0) or run.ranks[0].state == "running")
        greeting = clusters().nodes_of(engine._key)[0].greeting
        assert greeting is not None
        os.kill(greeting.pid, signal.SIGSTOP)
        began = run.snapshot().seconds
        if timeout is None:
            run.stop(wait=False)
            run.stop(at_once=True)
        assert run.wait(60)
        return float(run.snapshot().seconds - (began if timeout is None else timeout))

    with Commands([[]]) as engine:
        assert takes_less_than(3, attempt)
        assert takes_less_than(5, lambda: attempt(10.0))
        notebook_launch(abs, 1, args=(1,), engine=engine, **QUIET)
        servers = [child for agent in below() for child in agent.children() if "forkserver" in str(child.cmdline())]
        assert servers
        for server in servers:
            server.suspend()
        began = time.monotonic()
    assert time.monotonic() - began < 5
    until(lambda: not below())
    assert not [server for server in servers if server.is_running() and server.status() != psutil.STATUS_ZOMBIE]


def test_start_of_a_node_counts_in_the_time_limit() -> None:
    began = time.monotonic()
    late = r"timeout=0\.5 s\. node 0 did not come up: no message arrived for 0\.\d+ s"
    with Commands([["bash", "-c", "sleep 600"]]) as engine, pytest.raises(RunTimeoutError, match=late):
        notebook_launch(abs, 1, args=(1,), engine=engine, timeout=0.5, **QUIET)
    assert time.monotonic() - began < 5


def test_node_that_cannot_hold_its_ranks_is_named_with_the_reason_once() -> None:
    """The ranks of the other node, which has room, end, and the next launch has both nodes."""
    expected = (
        r"\[Errno 24\] rank 8 of 16 \(.*\) could not be started: Too many open files\. "
        r"A launch needs 6 descriptors for each rank while it starts, and `ulimit -n` shows the limit: "
        r"use fewer ranks, or raise it on that machine\."
    )
    with Commands([[], ["bash", "-c", 'ulimit -n 45; exec "$@"', "bash"]]) as engine:
        with pytest.raises(ResourceError, match=f"^{expected}$"):
            notebook_launch(sum_up, 16, engine=engine, **QUIET)
        assert list(notebook_launch(sum_up, 2, engine=engine, **QUIET)) == [2.0, 2.0]
