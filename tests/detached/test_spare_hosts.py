"""Tests for the host that a kernel keeps ready after a detached launch."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from notebook_launcher import attach, launch, notebook_launch
from notebook_launcher.engines.fork_server_handle import fork_server
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

QUIET: dict[str, Any] = {"output": "none", "monitor": False, "detached": True}


@pytest.fixture
def spare(home: Path) -> psutil.Process:
    """The spare host of this process's fork server."""
    del home
    while True:  # Launches of a script before the fork server's chores are done keep no host.
        notebook_launch(os.getpid, 1, **QUIET)
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            if found := spare_hosts():
                return found[0]
            time.sleep(0.02)


def spare_hosts() -> list[psutil.Process]:
    """Return the hosts that wait for a launch of this process.

    Unlike spare ranks, they have left its family, and have a fork server of their own.
    """
    names = {f"spare {child.pid}" for child in psutil.Process().children()}
    waiting = [process for process in psutil.process_iter(["name"]) if process.info["name"] in names]
    family = {child.pid for child in psutil.Process().children(recursive=True)}
    return [process for process in waiting if process.pid not in family and has_children(process)]


def has_children(process: psutil.Process) -> bool:
    try:
        return bool(process.children())
    except psutil.NoSuchProcess:
        return False


def host_of(run: Any) -> int:
    pid: int = json.loads((run.folder / "summary.json").read_text())["kernel"]["pid"]
    return pid


def test_spare_host_conducts_the_next_detached_run_and_another_takes_its_place(spare: psutil.Process) -> None:
    run = launch(os.getpid, 2, **QUIET)
    assert host_of(run) == spare.pid
    assert spare.name() == "host"
    assert len(set(run.result())) == 2
    until(lambda: [process.pid for process in spare_hosts()] not in ([], [spare.pid]))
    spare.wait(20)


def test_spare_host_takes_environment_and_folder_of_the_launch(
    spare: psutil.Process, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATER", "than the spare host")
    monkeypatch.chdir(home)
    run = launch(lambda: (os.environ["LATER"], os.getcwd()), 1, **QUIET)
    assert host_of(run) == spare.pid
    assert [*run.result()] == [("than the spare host", str(home))]


def test_launch_after_the_death_of_the_spare_host_forks_another(spare: psutil.Process) -> None:
    server = spare.children()[0]
    spare.kill()
    psutil.wait_procs([spare, server], timeout=20)
    run = launch(os.getpid, 1, **QUIET)
    assert host_of(run) != spare.pid
    assert len(run.result()) == 1


def test_spare_host_ends_with_the_fork_server(spare: psutil.Process) -> None:
    server = spare.children()[0]
    fork_server().stop()
    _, alive = psutil.wait_procs([spare, server], timeout=20)
    assert alive == []


def test_plain_launches_keep_no_host() -> None:
    fork_server().stop()
    for _ in range(3):
        notebook_launch(os.getpid, 1, output="none")
    assert spare_hosts() == []


def test_run_of_a_spare_host_outlives_the_fork_server(spare: psutil.Process, home: Path) -> None:
    gate = home / "gate"

    def wait_for_gate() -> int:
        while not gate.exists():
            time.sleep(0.02)
        return 7

    run = launch(wait_for_gate, 1, **QUIET)
    assert host_of(run) == spare.pid
    fork_server().stop()
    gate.touch()
    assert [*attach(run.id, show=False).result()] == [7]
