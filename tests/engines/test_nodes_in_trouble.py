"""Two nodes with a cable of their own: addresses, sockets, a slow cable, a cut, a full disk, ports that are taken."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from notebook_launcher import (
    Accelerator,
    Commands,
    ConfigError,
    ProjectConfiguration,
    RankFailedError,
    launch,
    notebook_launch,
    report,
)
from notebook_launcher.engines.cluster import node
from notebook_launcher.engines.cluster.clusters import clusters
from notebook_launcher.errors import NodeLostError
from tests.engines.calls import QUIET, kill_rank
from tests.support.namespaces import ADDRESSES, Cable
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from notebook_launcher import Run

AGENT_WITH_PATIENCE = """#!/bin/bash
exec {python} -c 'from notebook_launcher.engines.cluster import agent; agent.PATIENCE = 10.0; agent.main()'
"""


TAKE = """
import socket, sys
taker = socket.socket()
taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
try:
    taker.bind((sys.argv[1], int(sys.argv[2])))
except OSError as error:
    print(error.strerror)
"""


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that lies on a full disk of the second machine."""
    return tmp_path_factory.mktemp("full")


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    try:
        made = Cable()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', error)!r}")
    yield made
    made.remove()


@pytest.fixture(scope="module")
def engine(cable: Cable, full: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Two machines whose names resolve wrongly; the second one, to which the link goes over the cable, has no disk.

    Their agents wait for 10 s, not for 30, until they give the kernel up.
    """
    python = tmp_path_factory.mktemp("impatient") / "python"
    python.write_text(AGENT_WITH_PATIENCE.format(python=sys.executable))
    python.chmod(0o755)
    first, second = cable.commands()[0], cable.far_command(0, 1)
    disk = f'mount -t tmpfs -o size=64k none "{full}" && cat /dev/zero > "{full}/rest"'
    named = [machine("gpu1", "127.0.1.1"), machine("gpu2", "198.51.100.7", f"{disk} 2>/dev/null; export TMPDIR={full}")]
    with Commands([[*first, *named[0]], [*second, *named[1]]], python=str(python)) as engine:
        engine.look()
        yield engine


def machine(name: str, address: str, prepare: str = "true") -> list[str]:
    """Return a command for a machine of a name, with a file of hosts that has an address for it."""
    lines = f"127.0.0.1 localhost\\n{address} {name}\\n"
    shell = f'f=$(mktemp); printf "{lines}" > $f; hostname {name} && mount --bind $f /etc/hosts && rm $f; {prepare}; '
    return ["unshare", "--mount", "--uts", "bash", "-c", shell + 'exec "$@"', "bash"]


def train(data: torch.Tensor | None = None) -> float:
    """Meet in collectives for ever."""
    del data
    while True:
        dist.all_reduce(torch.ones(100))
        report(pid=os.getpid())
        time.sleep(0.01)


def has_trained(run: Run, num_points: int) -> Callable[[], bool]:
    """Return a condition: every rank has reported, and all together have `num_points` times; or the run is over."""
    num_ranks = run.snapshot().num_processes

    def is_met() -> bool:
        points = run.metrics
        return (len(points) >= num_points and len({point.rank for point in points}) == num_ranks) or run.wait(0)

    return is_met


def listening() -> tuple[str, str, str, set[str]]:
    """Return this machine's name and its address, the network's interface, and where something listens."""
    dist.all_reduce(torch.ones(1))
    shown = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
    name = socket.gethostname()
    addresses = {line.split()[3].rpartition(":")[0] for line in shown.splitlines()}
    return name, socket.gethostbyname(name), os.environ["GLOO_SOCKET_IFNAME"], addresses


def test_ranks_meet_on_the_network_that_the_nodes_share_and_nothing_listens_elsewhere_or_later(
    engine: Commands, cable: Cable
) -> None:
    assert [(node.host, node.address) for node in engine.look()] == list(zip(("gpu1", "gpu2"), ADDRESSES, strict=True))
    assert list(notebook_launch(listening, 2, engine=engine, **QUIET)) == [
        ("gpu1", "127.0.1.1", "eth0", {ADDRESSES[0]}),  # The names resolve to other addresses.
        ("gpu2", "198.51.100.7", "eth0", {ADDRESSES[1]}),
    ]
    for command in cable.commands():
        assert subprocess.run([*command, "ss", "-Hltn"], capture_output=True, check=True).stdout == b""
    port = clusters().nodes_of(engine._key)[0].port
    take = [*cable.commands()[0], sys.executable, "-c", TAKE, ADDRESSES[0], str(port)]
    assert subprocess.run(take, capture_output=True, text=True, check=True).stdout == "Address already in use\n"


def test_network_can_be_named_and_must_be_common(cable: Cable) -> None:
    for network in ("eth0", "203.0.113.0/24"):
        with Commands(cable.commands(), network=network) as engine:
            assert [node.address for node in engine.look()] == [*ADDRESSES]
    with (
        Commands(cable.commands(), network="10.0.0.0/8") as engine,
        pytest.raises(ConfigError, match="is not on every node"),
    ):
        engine.look()
    none = r"the nodes have no network in common\. They have .*eth0 203\.0\.113\.0/24"
    with Commands([[], cable.commands()[0]]) as engine, pytest.raises(ConfigError, match=none):
        engine.look()


def test_culprit_behind_a_slow_cable_is_found_beneath_its_output_and_a_stop_arrives(
    engine: Commands, cable: Cable
) -> None:
    data = torch.zeros(1 << 17)

    def fail_after_much_output() -> None:
        report(size=data.numel())
        dist.all_reduce(torch.ones(1))
        if os.environ["RANK"] == "1":
            print("x" * 300_000)
            raise ValueError("beneath much output")
        dist.all_reduce(torch.ones(1))

    with cable.slowed("4mbit"):
        run = launch(fail_after_much_output, 2, engine=engine, **QUIET)
        error: Any = run.exception(60)
        endless = launch(train, 2, engine=engine, **QUIET)
        until(has_trained(endless, 8))
        assert endless.stop() in ("ask", "interrupt")
    assert repr(error) == "ValueError('beneath much output')"
    assert error.rank == 1
    assert error.failures[0].node == "gpu2"
    assert "x" * 300_000 in run.logs(1)


def test_error_of_a_killed_process_names_its_node(engine: Commands) -> None:
    with pytest.raises(RankFailedError, match=r"^rank 1 of 2 \(gpu2\) was killed by SIGKILL\(-9\)") as caught:
        notebook_launch(kill_rank, 2, args=(1,), engine=engine, **QUIET)
    assert "rank 1 of 2 (gpu2) failed first" in "\n".join(caught.value._render_traceback_())


def work_beside_a_full_disk() -> int:
    print("x" * 2_000_000)
    total = torch.ones(1 << 20)
    dist.all_reduce(total)
    return int(total.sum())


def test_full_disk_of_a_node_does_not_matter_to_what_needs_none(engine: Commands) -> None:
    run = launch(work_beside_a_full_disk, 2, engine=engine, **QUIET)
    assert list(run.result()) == [2 << 20] * 2
    assert [run.logs(rank).count("x" * 2_000_000) for rank in range(2)] == [1] * 2


def save(folder: str) -> None:
    accelerator = Accelerator(project_config=ProjectConfiguration(project_dir=folder, save_on_each_node=True))
    accelerator.prepare(DataLoader(torch.arange(4)))  # type: ignore[arg-type]
    accelerator.save_state(Path(folder) / "saved")


def test_full_disk_fails_a_checkpoint_and_names_the_node(engine: Commands, full: Path) -> None:
    with pytest.raises(OSError, match="No space left on device") as caught:
        notebook_launch(save, 2, args=(str(full),), engine=engine, **QUIET)
    assert caught.value.errno == errno.ENOSPC
    first = caught.value.failures[0]  # type: ignore[attr-defined]
    assert (first.rank, first.node) == (1, "gpu2")


# The last two in this file, because they cost nodes.
def test_run_continues_when_a_cut_cable_is_healed_and_a_stop_needs_no_cable(engine: Commands, cable: Cable) -> None:
    run = launch(train, 2, engine=engine, **QUIET)
    until(has_trained(run, 4))
    with cable.cut():
        assert not run.wait(2.5)
    num_points = len(run.metrics)
    until(has_trained(run, num_points + 10))
    with cable.cut():
        began = time.monotonic()
        assert run.stop() in ("interrupt", "terminate", "kill")
        assert time.monotonic() - began < 10


def test_silent_node_is_lost_and_its_ranks_end_by_themselves(
    engine: Commands, cable: Cable, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert node.PATIENCE == 10
    monkeypatch.setattr(node, "PATIENCE", 4.0)
    run = launch(train, 2, engine=engine, **QUIET)
    until(has_trained(run, 4))
    greetings = [node.greeting for node in clusters().nodes_of(engine._key)]
    agents = [greeting.pid for greeting in greetings if greeting is not None]
    ranks = sorted({int(point.values["pid"]) for point in run.metrics})
    assert (len(agents), len(ranks)) == (2, 2)
    with cable.cut():
        error = run.exception(60)
        assert isinstance(error, NodeLostError)
        expected = rf"node 1 \(.*, {re.escape(ADDRESSES[1])}\) is gone, with rank 1: no message arrived for 4 s"
        assert re.match(expected, str(error)), str(error)
        assert error.rank == 1
        # While nobody can tell them.
        until(lambda: not any(psutil.pid_exists(pid) for pid in (agents[1], *ranks)))
