"""Tests for the ranks that a fork server keeps ready after two launches of one kind, as in a script."""

from __future__ import annotations

import dataclasses
import importlib
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, cast

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from notebook_launcher import LaunchConfig, RankFailedError, Session, launch, notebook_launch, report
from notebook_launcher.engines.fork_server_handle import fork_server
from notebook_launcher.kernel.plan import make_plan
from notebook_launcher.machine.devices import Machine
from notebook_launcher.processes.spare_ranks import MAX_SPARE_RANKS, SPARES_AFTER, kind_of_launch
from tests.support.waiting import until

# pytest sets the variable anew for each stage of a test, and a launch with another environment is of another kind.
QUIET: dict[str, Any] = {
    "output": "none", "monitor": False, "devices": "cpu", "env": {"PYTEST_CURRENT_TEST": "spare ranks"},
}  # fmt: skip
OF_THE_RUN = ("MASTER_PORT", "TORCHELASTIC_RUN_ID")


def number_of_process() -> int:
    return os.getpid()


def server() -> psutil.Process:
    process = fork_server()._process
    assert process is not None
    return psutil.Process(process.pid)  # type: ignore[union-attr]


def spares() -> list[psutil.Process]:
    """Return the spare supervisor and the two spare ranks; empty unless there are three.

    A deputy's do not count: they go with the server's chores.
    """
    name = f"spare {server().pid}"
    ours = [process for process in server().children() if process.name() == name]
    found = [*ours, *(rank for one in ours for rank in one.children() if rank.name() == name)]
    return found if len(found) == 3 else []


class Waiting(NamedTuple):
    """A spare supervisor and its ranks."""

    processes: list[psutil.Process]
    ranks: set[int]

    @classmethod
    def of(cls, processes: list[psutil.Process]) -> Waiting:
        return cls(processes, {process.pid for process in processes if process.ppid() != server().pid})

    def wait_for_end(self) -> None:
        assert psutil.wait_procs(self.processes, timeout=20)[1] == []

    @property
    def pids(self) -> set[int]:
        return {process.pid for process in self.processes}


def warm_up() -> Waiting:
    """Launch until spare ranks wait, and return them."""
    while True:  # The fork server's chores, which come first, take seconds.
        for _ in range(2):
            notebook_launch(number_of_process, 2, **QUIET)
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            if found := spares():
                return Waiting.of(found)
            time.sleep(0.02)


def assert_none_appear() -> None:
    """Look for three times the seconds after which spare ranks are forked."""
    end = time.monotonic() + 3 * SPARES_AFTER
    while time.monotonic() < end:
        assert spares() == []
        time.sleep(0.02)


@pytest.fixture
def waiting() -> Waiting:
    """The spare supervisor, and the two ranks that wait with it."""
    return warm_up()


def test_spare_ranks_serve_the_next_launch_and_others_take_their_place(waiting: Waiting) -> None:
    results = notebook_launch(number_of_process, 2, **QUIET)
    assert set(results) == waiting.ranks
    waiting.wait_for_end()
    until(lambda: spares() and not {process.pid for process in spares()} & waiting.pids)


def test_names_of_spare_ranks_are_those_of_other_ranks_once_they_serve(waiting: Waiting) -> None:
    def name() -> str:
        return Path("/proc/self/comm").read_text()

    ahead, fresh = notebook_launch(name, 2, **QUIET), notebook_launch(name, 1, **QUIET)
    assert {*ahead} == {*fresh}


def test_spare_ranks_have_environment_and_import_path_of_other_ranks(waiting: Waiting) -> None:
    def surroundings() -> tuple[int, dict[str, str], list[str], str]:
        return os.getpid(), dict(os.environ), sys.path, os.getcwd()

    ahead = notebook_launch(surroundings, 2, **QUIET)
    fresh = notebook_launch(surroundings, 2, **QUIET)  # At once, so that no spare ranks are there.
    assert {pid for pid, *_ in ahead} == waiting.ranks
    for (_, environ, *others), (_, fresh_environ, *fresh_others) in zip(ahead, fresh, strict=True):
        assert others == fresh_others
        assert environ["TORCHELASTIC_RUN_ID"] != fresh_environ["TORCHELASTIC_RUN_ID"]
        for name in OF_THE_RUN:
            del environ[name], fresh_environ[name]
        assert environ == fresh_environ


@pytest.mark.parametrize(
    "other",
    [{"env": {"OTHER": "1"}}, {"num_processes": 1}, {"backend": None}, {"gradient_accumulation_steps": 3}],
    ids=str,
)
def test_launch_of_another_kind_ends_the_spare_ranks(waiting: Waiting, other: dict[str, Any]) -> None:
    results = notebook_launch(number_of_process, **{"num_processes": 2, **QUIET, **other})
    assert not {*results} & waiting.pids
    waiting.wait_for_end()


def test_working_directory_makes_a_kind(waiting: Waiting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert {*notebook_launch(os.getcwd, 2, **QUIET)} == {str(tmp_path)}
    del waiting


def test_folder_that_was_replaced_is_found_by_spare_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    waiting = warm_up()
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "new.txt").touch()
    monkeypatch.chdir(folder)
    results = notebook_launch(lambda: (os.getpid(), [*map(str, Path().iterdir())]), 2, **QUIET)
    assert {pid for pid, _ in results} == waiting.ranks
    assert [names for _, names in results] == [["new.txt"]] * 2


def test_module_that_was_written_meanwhile_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    waiting = warm_up()
    (tmp_path / "written_meanwhile.py").write_text("VALUE = 42")

    def import_it() -> tuple[int, int]:
        return importlib.import_module("written_meanwhile").VALUE, os.getpid()

    assert {*notebook_launch(import_it, 2, **QUIET)} == {(42, pid) for pid in waiting.ranks}


def test_spare_ranks_take_the_seed_of_their_launch(waiting: Waiting) -> None:
    def draw() -> tuple[int, float, int]:
        return os.getpid(), float(torch.rand(())), torch.initial_seed()

    ahead = notebook_launch(draw, 2, seed=11, **QUIET)
    fresh = notebook_launch(draw, 2, seed=11, **QUIET)
    assert {pid for pid, *_ in ahead} == waiting.ranks
    assert [drawn for _, *drawn in ahead] == [drawn for _, *drawn in fresh]
    assert [seed for *_, seed in ahead] == [11, 11]


def test_session_takes_spare_ranks_and_keeps_them(waiting: Waiting) -> None:
    def total() -> tuple[int, float]:
        value = torch.ones(())
        dist.all_reduce(value)
        return os.getpid(), float(value)

    with Session(2, **QUIET) as session:
        first, second = session.run(total), session.run(total)
    assert [*first] == [*second]
    assert {pid for pid, _ in first} == waiting.ranks
    assert [value for _, value in first] == [2.0, 2.0]


def test_rank_of_a_session_on_spare_ranks_that_dies_is_replaced(waiting: Waiting) -> None:
    def total() -> float:
        value = torch.ones(())
        dist.all_reduce(value)
        return float(value)

    with Session(2, **QUIET) as session:
        before = session.run(number_of_process)
        assert {*before} == waiting.ranks
        with pytest.raises(RankFailedError, match="rank 1 of 2 was killed by SIGKILL"):
            session.run(lambda: os.kill(os.getpid(), signal.SIGKILL) if os.environ["RANK"] == "1" else None)
        assert [*session.run(total)] == [2.0, 2.0]
        after = session.run(number_of_process)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_function_may_make_its_own_group_on_spare_ranks(waiting: Waiting) -> None:
    def own_groups() -> tuple[int, float]:
        dist.init_process_group("gloo")
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        value = torch.ones(())
        dist.all_reduce(value)
        return os.getpid(), float(value)

    results = notebook_launch(own_groups, 2, **QUIET)
    assert {pid for pid, _ in results} == waiting.ranks
    assert [value for _, value in results] == [2.0, 2.0]


def test_error_of_a_spare_rank_names_the_culprit(waiting: Waiting) -> None:
    def fail() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError(os.getpid())
        dist.barrier()

    with pytest.raises(ValueError, match=r"^\d+$") as caught:
        notebook_launch(fail, 2, **QUIET)
    assert caught.value.rank == 1  # type: ignore[attr-defined]
    assert int(str(caught.value)) in waiting.ranks


def test_stacks_of_spare_ranks_begin_with_the_function(waiting: Waiting) -> None:
    def sleep() -> None:
        report(begun=1)
        time.sleep(100)

    run = launch(sleep, 2, **QUIET)
    until(lambda: len(run.metrics) == 2)
    assert {rank.pid for rank in run.ranks} == waiting.ranks
    stacks = [stack.main for stack in run.stacks()]
    run.stop(at_once=True)
    assert [[frame.function for frame in main.frames] for main in stacks if main] == [["sleep"]] * 2


def test_stop_ends_spare_ranks_with_their_workers(waiting: Waiting, tmp_path: Path) -> None:
    def wait_forever() -> None:
        loader = DataLoader(cast("Dataset[int]", range(8)), num_workers=1, persistent_workers=True)
        for _ in loader:
            dist.barrier()
        (tmp_path / str(os.getpid())).touch()
        threading.Event().wait()

    run = launch(wait_forever, 2, **QUIET)
    until(lambda: {int(path.name) for path in tmp_path.iterdir()} == waiting.ranks, run)
    run.stop()
    assert run.state == "stopped"
    waiting.wait_for_end()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_launch_after_the_death_of_a_spare_process_starts_other_ranks(waiting: Waiting, which: int) -> None:
    waiting.processes[which].kill()
    waiting.wait_for_end()
    assert not {*notebook_launch(number_of_process, 2, **QUIET)} & waiting.pids


def test_spare_ranks_end_with_the_fork_server(waiting: Waiting) -> None:
    fork_server().stop()
    waiting.wait_for_end()


def test_no_ranks_are_forked_ahead_while_a_launch_runs(waiting: Waiting, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def wait_for_gate() -> int:
        while not gate.exists():
            time.sleep(0.01)
        return os.getpid()

    run = launch(wait_for_gate, 2, **QUIET)
    for _ in range(3):
        notebook_launch(number_of_process, 2, **QUIET)
        assert_none_appear()
    gate.touch()
    assert {*run.result()} == waiting.ranks


def test_first_launches_of_a_kind_leave_no_ranks_in_a_script(waiting: Waiting) -> None:
    del waiting
    for number in range(3):
        notebook_launch(number_of_process, 2, **{**QUIET, "env": {"NUMBER": str(number)}})
        assert_none_appear()


def kind_of(**options: Any) -> object:
    machine = Machine(num_cores=64, gpus=(), why_no_gpu="")
    return kind_of_launch(make_plan(LaunchConfig(**{"devices": "cpu", **options}), machine).setup(many_calls=False))


def test_kind_is_the_same_for_launches_that_differ_in_seed_and_number() -> None:
    assert kind_of(num_processes=2, seed=1) == kind_of(num_processes=2, seed=2)
    assert kind_of(num_processes=2) is not None


def test_launches_of_many_ranks_and_of_foreign_backends_have_no_kind() -> None:
    assert kind_of(num_processes=MAX_SPARE_RANKS) is not None
    assert kind_of(num_processes=MAX_SPARE_RANKS + 1) is None
    assert kind_of(num_processes=2, backend="mpi") is None


def test_launches_in_networks_have_no_kind() -> None:
    machine = Machine(num_cores=2, gpus=(), why_no_gpu="")
    setup = make_plan(LaunchConfig(num_processes=2, devices="cpu"), machine).setup(many_calls=False)
    assert kind_of_launch(setup) is not None
    for backend in ("gloo", "nccl"):
        assert kind_of_launch(dataclasses.replace(setup, use_gpu=True, backend=backend)) is not None
    two_nodes = dataclasses.replace(setup.place, ranks=(0,), num_nodes=2)
    assert kind_of_launch(dataclasses.replace(setup, place=two_nodes)) is None
    in_a_network = dataclasses.replace(setup.place, store_address="10.0.0.1")
    assert kind_of_launch(dataclasses.replace(setup, place=in_a_network)) is None
