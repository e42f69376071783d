"""Agents whose stream to the kernel is spoilt, that are stopped, or that take too long to come up."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from notebook_launcher import Commands, RunTimeoutError, launch, notebook_launch
from notebook_launcher.engines.cluster.clusters import clusters
from notebook_launcher.errors import NodeLostError
from tests.engines.calls import QUIET
from tests.support.waiting import until
from tests.support.warm_kernels import takes_less_than

if TYPE_CHECKING:
    from pathlib import Path

SPOILER = """
import os, subprocess, sys, threading
mode = sys.argv[1]
agent = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

def carry(source, target, spoil, after):
    size = 0
    while data := os.read(source, 65536):
        size += len(data)
        os.write(target, spoil(data) if size > after else data)
    os.close(target)

def same(data): return data
def noise(data): return os.urandom(len(data))

up, down = (same, noise) if mode == "from the agent" else (noise, same)
threading.Thread(target=carry, args=(0, agent.stdin.fileno(), up, 20_000), daemon=True).start()
carry(agent.stdout.fileno(), 1, down, 3000)
"""


def sleep() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(600)


def below() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if "agent" in " ".join(process.cmdline())]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["from the agent", "to the agent"])
def test_node_whose_stream_is_spoilt_is_lost(tmp_path: Path, mode: str) -> None:
    spoiler = tmp_path / "spoiler.py"
    spoiler.write_text(SPOILER)
    with Commands([[sys.executable, str(spoiler), mode]]) as engine:
        assert isinstance(launch(sleep, 1, engine=engine, **QUIET).exception(60), NodeLostError)
    until(lambda: not below())


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
