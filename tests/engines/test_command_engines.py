"""Launches on several nodes over commands: two agents on this machine, which share nothing but loopback."""

from __future__ import annotations

import atexit
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import torch.distributed as dist

from notebook_launcher import (
    ConfigError,
    LaunchConfig,
    RankFailedError,
    Session,
    export,
    launch,
    notebook_launch,
    report,
    verify_accumulation,
)
from notebook_launcher.engines.cluster import agent, node_records
from notebook_launcher.engines.cluster.clusters import clusters
from notebook_launcher.engines.cluster.command_engines import SSH, Commands, Slurm
from notebook_launcher.errors import NodeLostError
from notebook_launcher.messaging.links import Link
from tests.engines.calls import all_up, kill_rank, sum_up, wait_for_rank_0
from tests.engines.options import QUIET
from tests.security.evil import Evil
from tests.support.run_state import data_of, tree_of
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from notebook_launcher.engines.cluster.node import Node

ENVIRONMENT = (
    "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE",
)  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[Commands]:
    with Commands([[], ["env", "OWN=2"]]) as engine:
        engine.look()
        yield engine


def nodes_of(engine: Commands) -> tuple[Node, ...]:
    return clusters().nodes_of(engine._key)


def test_ranks_have_torchruns_variables_of_their_node_and_its_environment(
    engine: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_KERNEL", "x")

    def environment() -> tuple[Any, ...]:
        given = (os.environ.get(name) for name in ("SECRET_OF_KERNEL", "OWN", "GIVEN"))
        return (sum_up(), *(int(os.environ[name]) for name in ENVIRONMENT), *given)

    assert list(notebook_launch(environment, 5, engine=engine, env={"GIVEN": "yes"}, **QUIET)) == [
        (5.0, 0, 0, 3, 0, 0, 2, 5, None, None, "yes"),
        (5.0, 1, 1, 3, 0, 0, 2, 5, None, None, "yes"),
        (5.0, 2, 2, 3, 0, 0, 2, 5, None, None, "yes"),
        (5.0, 3, 0, 2, 1, 1, 2, 5, None, "2", "yes"),
        (5.0, 4, 1, 2, 1, 1, 2, 5, None, "2", "yes"),
    ]


def test_accumulation_is_exact_over_nodes(engine: Commands) -> None:
    assert verify_accumulation((4,), (2,), engine=engine, threads_per_process=1)


def test_large_values_travel_both_ways_and_a_parcel_once_a_node(
    engine: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = torch.arange(3 << 19)

    def double() -> torch.Tensor:
        return data * 2

    sent: list[int] = []

    def counted(send: Callable[[int], None]) -> Callable[[int], None]:
        def send_and_count(fd: int) -> None:
            sent.append(fd)
            send(fd)

        return send_and_count

    for node in nodes_of(engine):
        monkeypatch.setattr(node, "send_parcel", counted(node.send_parcel))
    results = notebook_launch(double, 4, engine=engine, **QUIET)
    assert all(torch.equal(value, data * 2) for value in results)
    assert len(sent) == 2


def test_original_exception_of_the_rank_that_failed_first_is_raised_and_output_has_its_rank(
    engine: Commands, capfd: pytest.CaptureFixture[str]
) -> None:
    def speak_and_fail() -> None:
        print(f"said by {os.environ['RANK']}")
        os.system("echo of a child")
        if os.environ["RANK"] == "2":
            raise ValueError("boom")
        dist.all_reduce(torch.ones(1))

    run = launch(speak_and_fail, 3, engine=engine, **QUIET)
    error: Any = run.exception(60)
    assert repr(error) == "ValueError('boom')"
    assert error.rank == 2
    assert next((failure.rank, failure.victim) for failure in error.failures) == (2, False)
    assert [run.logs(rank) for rank in range(3)] == [f"said by {rank}\nof a child\n" for rank in range(3)]
    capfd.readouterr()


def test_killed_rank_is_named_with_its_signal(engine: Commands) -> None:
    with pytest.raises(RankFailedError, match=r"^rank 2 of 4 \(node 1\) was killed by SIGKILL\(-9\)"):
        notebook_launch(kill_rank, 4, args=(2,), engine=engine, **QUIET)


def test_stop_shows_who_waits_across_nodes(engine: Commands) -> None:
    run = launch(wait_for_rank_0, 4, engine=engine, **QUIET)
    until(lambda: all_up(run), run)
    until(lambda: [stack.rank for stack in run.stacks() if stack.waiting_in] == [1, 2, 3], run)
    until(lambda: all(rank.memory for rank in run.ranks), run)
    assert len(run.sample(0.3)) == 4
    began = time.monotonic()
    assert run.stop() == "interrupt"
    assert time.monotonic() - began < 5


def test_ranks_stop_at_their_step_when_asked(engine: Commands) -> None:
    def loop() -> None:
        for step in range(10**9):
            report(step=step, x=1.0)
            time.sleep(0.001)

    run = launch(loop, 2, engine=engine, **QUIET)
    # The nodes tell now and then that a rank reads the board.
    until(lambda: (attempt := data_of(run).attempt) is not None and attempt.requests.can_ask((0, 1)), run)
    assert run.stop(after_step=True) == "ask"


def test_session_keeps_its_ranks_and_replaces_a_dead_one(engine: Commands) -> None:
    def die_at(rank: int) -> int:
        if os.environ["RANK"] == str(rank):
            os._exit(3)
        return os.getpid()

    with Session(4, engine=engine, **QUIET) as session:
        first = list(session.run(os.getpid))
        assert list(session.run(os.getpid)) == first
        with pytest.raises(RankFailedError, match=r"rank 3 of 4 \(node 1\) exited with code 3"):
            session.run(die_at, args=(3,))
        assert list(session.run(sum_up)) == [4.0] * 4
        assert [now == then for now, then in zip(session.run(os.getpid), first, strict=True)] == [True] * 3 + [False]


def test_agents_that_are_taken_or_lost_are_replaced() -> None:
    with Commands([[], ["env"]]) as engine:
        with Session(2, engine=engine, **QUIET) as session:
            session.run(sum_up)
            assert list(notebook_launch(sum_up, 2, engine=engine, **QUIET)) == [2.0, 2.0]
            assert list(session.run(sum_up)) == [2.0, 2.0]
            tree: Any = tree_of(session)
            os.kill(tree._nodes[0].greeting.pid, signal.SIGKILL)
            until(lambda: any(node.lost for node in tree._nodes))
            assert list(session.run(sum_up)) == [2.0, 2.0]
        run = launch(wait_for_rank_0, 4, engine=engine, **QUIET)
        until(lambda: all_up(run), run)
        pids = [rank.pid for rank in run.ranks]
        greeting = nodes_of(engine)[1].greeting
        assert greeting is not None
        began = time.monotonic()
        os.kill(greeting.pid, signal.SIGKILL)
        error = run.exception(30)
        assert time.monotonic() - began < 5
        assert isinstance(error, NodeLostError)
        is_gone = r"node 1 \(.*, 127\.0\.0\.1\) is gone, with ranks 2, 3: its command ended with -9\."
        assert re.match(is_gone, str(error))
        assert error.rank == 2
        until(lambda: not any(psutil.pid_exists(pid) for pid in pids if pid is not None))
        assert list(notebook_launch(sum_up, 4, engine=engine, **QUIET)) == [4.0] * 4


KILLED = """
import os, sys, time
from notebook_launcher import launch, report
from notebook_launcher.engines.cluster.command_engines import Commands
from notebook_launcher.engines.cluster.clusters import clusters
engine = Commands([[], []])
def wait():
    report(pid=os.getpid())
    time.sleep(60)
run = launch(wait, 2, engine=engine, output="none", runs_folder=None)
while len(run.metrics) < 2: time.sleep(0.01)
nodes = clusters().nodes_of(engine._key)
print(*(node.greeting.pid for node in nodes), *(int(point.values["pid"]) for point in run.metrics), flush=True)
os.kill(os.getpid(), 9)
"""


def test_killed_kernel_leaves_nothing_on_any_node() -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=90, check=False)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 4, done.stderr
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_clock_of_a_node_may_be_days_ahead() -> None:
    if os.geteuid() != 0:
        pytest.skip("making a time namespace needs root")
    shifted = ["unshare", "--time", "--fork", "--kill-child", "--monotonic", "100000"]

    def fail() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("the first")
        time.sleep(0.05)
        raise KeyError("0.05 s later")

    with Commands([[], shifted]) as engine, pytest.raises(ValueError, match="the first"):
        notebook_launch(fail, 2, engine=engine, **QUIET)


def test_greeting_names_versions_that_differ_and_nothing_behind_it_is_unpickled(tmp_path: Path) -> None:
    mark = tmp_path / "their code ran"
    other = (
        "from notebook_launcher.engines.cluster.connections import *; import struct, sys;"
        f"record = {pickle.dumps(Evil(mark))!r};"
        "g = Greeting.of_this_machine(); g.versions['torch'] = '1.0';"
        "print('a login says hello'); sys.stdout.flush();"
        "sys.stdout.buffer.write(g.to_line() + struct.pack('<Q', len(record)) + record); sys.stdout.flush();"
        "sys.stdin.read()"
    )
    engine = Commands([[sys.executable, "-c", other]])
    with pytest.raises(
        ConfigError, match=r"node 0 \(.*\) has other versions than this kernel: torch 1\.0 there, .* here"
    ):
        engine.look()
    assert not mark.exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["nowhere-at-all"], "node 0: nowhere-at-all does not start: No such file or directory."),
        (
            ["bash", "-c", "echo no such host >&2; exit 7"],
            r"node 0 did not come up: its command ended with 7(.|\n)*no such host",
        ),
        (
            ["bash", "-c", "yes | head -n 1000; exec cat > /dev/null"],
            r"node 0 did not come up: the first lines of its output hold no greeting of an agent",
        ),
    ],
)
def test_command_that_fails_is_shown_with_its_last_words(command: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        notebook_launch(sum_up, 2, engine=Commands([command]), **QUIET)
    assert caught.value.field == "engine"


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first on PATH, for programs that run on this machine what they are to run on another."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_ssh_runs_the_agent_in_the_shell_of_each_host(programs: Path) -> None:
    # As ssh does: the last word is the host's command line. The word before it is the host.
    program(programs, "ssh", f'echo "${{@: -2:1}}" >> {programs}/hosts; exec bash -c "${{@: -1}}"')
    with SSH(["gpu1", "me@gpu2"], options=["-p", "2222"]) as engine:
        assert [share.node for share in engine.look()] == [0, 1]
    assert sorted((programs / "hosts").read_text().split()) == ["gpu1", "me@gpu2"]


def test_slurm_runs_an_agent_on_each_node_of_the_allocation(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    program(programs, "scontrol", "echo n1; echo n2")
    program(programs, "srun", f'while [[ $1 == --* ]]; do echo $1 >> {programs}/options; shift; done; exec "$@"')
    with Slurm() as engine:
        assert engine.hosts == ("n1", "n2")
        assert [share.node for share in engine.look()] == [0, 1]
        assert engine.without([0]).hosts == ("n2",)  # type: ignore[union-attr]
    assert {"--nodelist=n1", "--nodelist=n2", "--overlap"} <= set((programs / "options").read_text().split())


def test_slurm_outside_an_allocation_is_refused(monkeypatch: pytest.MonkeyPatch, programs: Path) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(ConfigError, match="works inside an allocation, and SLURM_JOB_NODELIST is not set here"):
        Slurm()
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    program(programs, "scontrol", "echo unknown >&2; exit 1")
    with pytest.raises(ConfigError, match="scontrol show hostnames n1 ended with 1: unknown"):
        Slurm()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="needs scontrol, which is not on PATH"):
        Slurm()


def test_engines_are_values() -> None:
    engine = Commands([["docker", "exec", "-i", "a"], "kubectl exec -i b --"], python="python3", network="eth0")
    assert engine == pickle.loads(pickle.dumps(engine))
    assert len({engine, Commands(engine.commands, python="python3", network="eth0")}) == 1
    assert repr(SSH(["a"], python="python3")) == "SSH(hosts=('a',), python='python3', network=None, options=())"
    assert engine.agent_commands()[1][:4] == ("kubectl", "exec", "-i", "b")
    assert SSH(["a", "b"], options=["-4"]).without([0]) == SSH(["b"], options=["-4"])
    assert Commands([[]]).without([0]) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Commands("ssh gpu1"), "pass a list with a command for each node"),
        (lambda: Commands([]), "is empty; pass a command for each node"),
        (lambda: Commands([[3]]), r"commands=\[3\]: pass a list of words"),  # type: ignore[list-item]
        (lambda: Commands([[]], python=3), "python=3 is an int; it must be a string"),  # type: ignore[arg-type]
        (lambda: SSH([]), r"hosts=\[\]: pass a list of words"),
        (lambda: SSH(["-oProxyCommand=x"]), "is an option of ssh; pass options="),
        (lambda: LaunchConfig(engine="dask"), "engine='dask' is not an engine"),  # type: ignore[arg-type]
        (lambda: LaunchConfig(engine=Commands), "is not an engine"),  # type: ignore[arg-type]
        (lambda: LaunchConfig(engine=Commands([[]]), start_method="fork"), "cannot be forks of this kernel"),
        (lambda: LaunchConfig(engine=Commands([[]]), devices=[0]), "the numbers count GPUs"),  # type: ignore[arg-type]
        (lambda: export(sum_up, "train.py", engine=Commands([[]])), r"a script is started by torchrun or a job\. Omit"),
    ],
)
def test_value_that_cannot_work_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_node_whose_ranks_have_exited_is_ready_while_ranks_of_another_node_exit(
    engine: Commands, tmp_path: Path
) -> None:
    gate, seen = tmp_path / "gate", tmp_path / "seen"
    os.mkfifo(gate)

    def exit_late() -> int:
        if os.environ["RANK"] == "1":
            atexit.register(gate.read_bytes)
        else:
            seen.write_text(f"{os.getpid()}")
        return os.getpid()

    run = launch(exit_late, 2, engine=engine, **QUIET)
    pid = int(until(lambda: seen.exists() and seen.read_text(), run))
    until(lambda: not psutil.pid_exists(pid), run)
    gate.write_bytes(b"")
    assert run.result()[0] == pid
    assert not any(node.lost for node in nodes_of(engine))
    assert notebook_launch(sum_up, 2, engine=engine, **QUIET)[0] == 2


@pytest.mark.parametrize("num_requests", [0, 5000])
def test_agent_ends_when_nothing_is_heard_or_its_output_is_not_read(num_requests: int) -> None:
    assert agent.PATIENCE == 30
    program = "from notebook_launcher.engines.cluster import agent; agent.PATIENCE = 0.5; agent.main()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as clogged:
        assert clogged.stdin is not None
        assert clogged.stdout is not None
        # The answers are more than a pipe holds, as all that an agent has to say is once the network is cut.
        link = Link(clogged.stdout.fileno(), clogged.stdin.fileno())
        for number in range(num_requests):
            link.send(node_records.LookForFile(f"/nowhere/{number}"))
        assert clogged.wait(60) == 0
