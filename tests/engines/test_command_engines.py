"""Launches on several nodes over commands: two agents on this machine, which share nothing but loopback.

All launches use the same two agents, because each one's fork server imports torch. The second node has a variable of
its own and, where root runs the tests, a clock that is a day ahead and an empty folder in place of the notebook's.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import torch.distributed as dist

from notebook_launcher import (
    Accelerator,
    ConfigError,
    LaunchConfig,
    RankFailedError,
    Session,
    export,
    launch,
    notebook_launch,
    report,
    tunable,
    verify_accumulation,
)
from notebook_launcher.engines.cluster import agent, node_records
from notebook_launcher.engines.cluster.clusters import clusters
from notebook_launcher.engines.cluster.command_engines import SSH, Commands, Slurm
from notebook_launcher.messaging.links import Link
from notebook_launcher.training.checkpoints.folders import CheckpointError
from tests.engines.calls import QUIET, all_up, sum_up, wait_for_rank_0
from tests.engines.conftest import write_program
from tests.security.evil import Evil
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from notebook_launcher import Run
    from notebook_launcher.engines.cluster.node import Node

ENVIRONMENT = (
    "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE",
)  # fmt: skip


IS_ROOT = os.geteuid() == 0
BESIDE = """
class Batch:
    def __init__(self, size):
        self.size = size

def make(size):
    import another_of_mine
    return Batch(another_of_mine.double(size))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two modules of the user's, which the second node does not have."""
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "beside_the_notebook.py").write_text(BESIDE)
    (folder / "another_of_mine.py").write_text("def double(x):\n    return 2 * x\n")
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Commands]:
    importlib.import_module("torch._dynamo")  # The fork servers import it, too; otherwise each rank that trains.
    shifted = ["unshare", "--mount", "--time", "--fork", "--kill-child", "--monotonic", "100000"]
    other = [*shifted, "bash", "-c", f'mount -t tmpfs none "{folder}" && exec "$@"', "bash"] if IS_ROOT else []
    with Commands([[], [*other, "env", "OWN=2"]]) as engine:
        engine.look()
        yield engine


@pytest.fixture
def notebook(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The kernel's working directory, which the second node does not have."""
    if not IS_ROOT:
        pytest.skip("hiding a folder from a node needs root")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in ("beside_the_notebook", "another_of_mine"):
        sys.modules.pop(name, None)


def nodes_of(engine: Commands) -> tuple[Node, ...]:
    return clusters().nodes_of(engine._key)


def test_ranks_have_torchruns_variables_of_the_nodes_asked_for_and_their_environment(
    engine: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_KERNEL", "x")

    def environment() -> tuple[Any, ...]:
        given = (os.environ.get(name) for name in ("SECRET_OF_KERNEL", "OWN", "GIVEN"))
        return (sum_up(), *(int(os.environ[name]) for name in ENVIRONMENT), *given)

    assert list(notebook_launch(environment, 3, engine=engine, env={"GIVEN": "yes"}, **QUIET)) == [
        (3.0, 0, 0, 2, 0, 0, 2, 3, None, None, "yes"),
        (3.0, 1, 1, 2, 0, 0, 2, 3, None, None, "yes"),
        (3.0, 2, 0, 1, 1, 1, 2, 3, None, "2", "yes"),
    ]
    asked = notebook_launch(environment, engine=engine, nodes=1, processes_per_node=2, **QUIET)
    assert [value[1:3] + value[5:6] for value in asked] == [(0, 0, 0), (1, 1, 0)]


def test_large_values_travel_both_ways_and_a_parcel_once_a_node(
    engine: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = torch.arange(3 << 19)

    def double() -> torch.Tensor:
        return data * 2

    sent: list[int] = []
    nodes = nodes_of(engine)
    # Looked up once for each node: the lookup of a version takes as long as many records.
    monkeypatch.setattr("notebook_launcher.engines.cluster.node.version_difference", None)
    for node in nodes:

        def send_and_count(fd: int, send: Callable[[int], None] = node.send_parcel) -> None:
            sent.append(fd)
            send(fd)

        monkeypatch.setattr(node, "send_parcel", send_and_count)
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


def test_stop_shows_who_waits_across_nodes(engine: Commands) -> None:
    run = launch(wait_for_rank_0, 4, engine=engine, **QUIET)
    until(lambda: all_up(run), run)
    until(lambda: [stack.rank for stack in run.stacks() if stack.waiting_in] == [1, 2, 3], run)
    until(lambda: all(rank.memory for rank in run.ranks), run)
    assert len(run.sample(0.3)) == 4
    began = time.monotonic()
    assert run.stop() == "interrupt"
    assert time.monotonic() - began < 5


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


def test_events_are_taken_some_at_a_time_however_many_there_are(engine: Commands) -> None:
    # Of a thousand ranks there may always be one more; stops and snapshots have to come in between.
    with Session(2, engine=engine, **QUIET) as session:
        session.run(print)
        tree: Any = session._runs.ranks.tree
        for _ in range(1000):
            tree.wake()
        assert len(tree.events(0)) < 500


def train(folder: str) -> list[float]:
    """Train until a tunable says so; return the learning rate of each update."""
    os.chdir(folder)
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    rates: list[float] = []
    while not tunable("enough", False):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).square().mean())
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
        report(updates=len(rates))
    return rates


def begun(run: Run) -> Run:
    """Wait for the first curve, with which the kernel knows that the ranks can be asked."""
    until(lambda: len(run.metrics) > 0, run)
    return run


def last_updates(run: Run) -> list[float]:
    return [max(point.values["updates"] for point in run.metrics if point.rank == rank) for rank in range(3)]


def test_requests_come_after_the_same_update_on_all_nodes_in_each_call(engine: Commands, tmp_path: Path) -> None:
    with Session(3, engine=engine, **QUIET) as session:
        run = begun(session.launch(train, args=(str(tmp_path),)))
        run.set(lr=0.25)
        run.save()
        until(lambda: len(list(tmp_path.glob("checkpoints/update_*"))) == 1, run)
        run.save()
        run.set(enough=1)
        assert not isinstance(run.exception(60), Exception)
        first, *others = run.result()
        assert others == [first, first]
        assert (first[0], first[-1]) == (0.5, 0.25)
        for saved in tmp_path.glob("checkpoints/update_*"):
            assert len(list(saved.glob("random_states_*"))) == 3

        run = begun(session.launch(train, args=(str(tmp_path),)))
        run.pause()
        until(lambda: run.state == "paused", run)
        run.resume()
        until(lambda: run.state == "running", run)
        assert run.stop(after_step=True) == "ask"
        assert len(set(last_updates(run))) == 1


def test_accumulation_is_exact_over_nodes(engine: Commands) -> None:
    assert verify_accumulation((4,), (2,), engine=engine, threads_per_process=1)


def test_modules_of_the_notebooks_folder_are_sent_along(engine: Commands, notebook: Path) -> None:
    beside = importlib.import_module("beside_the_notebook")
    importlib.import_module("another_of_mine")
    assert [node.has_folder for node in engine.look()] == [True, False]
    assert not list(notebook.glob(".notebook-launcher-*"))
    run = launch(beside.make, 2, args=(3,), engine=engine, **QUIET)
    assert [(type(batch), batch.size) for batch in run.result()] == [(beside.Batch, 6)] * 2
    assert "without this folder (save checkpoints to a shared folder" in run.snapshot().summary


def save(folder: str) -> None:
    accelerator = Accelerator(project_dir=folder)
    accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.save_state(Path(folder) / "saved")


def test_checkpoint_that_a_node_cannot_reach_is_refused_with_a_way_out(engine: Commands, notebook: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not on the disks of .*, where rank 1 is\. Choose a folder that all"):
        notebook_launch(save, 2, args=(str(notebook),), engine=engine, **QUIET)
    assert not list(notebook.glob("*saved*"))


def test_agent_that_is_taken_or_lost_is_replaced() -> None:
    with Commands([[]]) as engine, Session(1, engine=engine, **QUIET) as session:
        session.run(sum_up)
        assert list(notebook_launch(sum_up, 1, engine=engine, **QUIET)) == [1.0]
        assert list(session.run(sum_up)) == [1.0]
        tree: Any = session._runs.ranks.tree
        os.kill(tree._nodes[0].greeting.pid, signal.SIGKILL)
        until(lambda: tree._nodes[0].lost)
        assert list(session.run(sum_up)) == [1.0]


KILLED = """
import os, sys, time
from notebook_launcher import launch, report
from notebook_launcher.engines.cluster.command_engines import Commands
from notebook_launcher.engines.cluster.clusters import clusters
engine = Commands([[]])
def wait():
    report(pid=os.getpid())
    time.sleep(60)
run = launch(wait, 1, engine=engine, output="none", runs_folder=None)
while not run.metrics: time.sleep(0.01)
nodes = clusters().nodes_of(engine._key)
print(*(node.greeting.pid for node in nodes), *(int(point.values["pid"]) for point in run.metrics), flush=True)
os.kill(os.getpid(), 9)
"""


def test_killed_kernel_leaves_nothing_on_a_node() -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=90, check=False)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_first_failure_is_the_first_though_the_clock_of_its_node_is_a_day_ahead(engine: Commands) -> None:
    def fail() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("the first")
        time.sleep(0.05)
        raise KeyError("0.05 s later")

    with pytest.raises(ValueError, match="the first"):
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


def test_ssh_runs_the_agent_in_the_shell_of_each_host(programs: Path) -> None:
    # As ssh does: the last word is the host's command line. The word before it is the host.
    write_program(programs / "ssh", f'echo "${{@: -2:1}}" >> {programs}/hosts; exec bash -c "${{@: -1}}"')
    with SSH(["gpu1", "me@gpu2"], options=["-p", "2222"]) as engine:
        assert [share.node for share in engine.look()] == [0, 1]
        assert engine.without([0]) == SSH(["me@gpu2"], options=["-p", "2222"])
    assert sorted((programs / "hosts").read_text().split()) == ["gpu1", "me@gpu2"]


def test_slurm_runs_an_agent_on_each_node_of_the_allocation(programs: Path, allocation: None) -> None:
    write_program(programs / "srun", f'while [[ $1 == --* ]]; do echo $1 >> {programs}/options; shift; done; exec "$@"')
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
    write_program(programs / "scontrol", "echo unknown >&2; exit 1")
    with pytest.raises(ConfigError, match="scontrol show hostnames n1 ended with 1: unknown"):
        Slurm()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="needs scontrol, which is not on PATH"):
        Slurm()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Commands("ssh gpu1"), "pass a list with a command for each node"),
        (lambda: Commands([[3]]), r"commands=\[3\]: pass a list of words"),  # type: ignore[list-item]
        (lambda: SSH(["-oProxyCommand=x"]), "is an option of ssh; pass options="),
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


class OnceAlone:
    """An engine of the user's own: it has what `engine=` asks for and no more, and its second node comes up once."""

    def __init__(self, inner: Commands) -> None:
        self.inner, self.num_starts = inner, 0

    def look(self) -> Any:
        return self.inner.look()

    def start(self, setup: Any) -> Any:
        self.num_starts += 1
        if self.num_starts == 1:
            return self.inner.start(setup)
        error = ConfigError("the second node does not come up")
        error.nodes = (1,)
        raise error


def test_restart_of_ones_own_engine_that_cannot_be_reduced_shows_its_error(engine: Commands) -> None:
    def fail() -> None:
        raise ValueError("as planned")

    own: Any = OnceAlone(engine)
    with pytest.raises(ConfigError, match=r"^the second node does not come up$"):
        notebook_launch(fail, 2, engine=own, max_restarts=1, resume="checkpoint", backend=None, output="none")
    assert own.num_starts == 2
