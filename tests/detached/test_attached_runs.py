"""Detached runs, attached to from this process: methods, results, errors, what is refused, what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import re
import shutil
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from notebook_launcher import (
    CallOrderError,
    ConfigError,
    LaunchConfig,
    RankFailedError,
    Results,
    ReturnValueError,
    Run,
    RunStoppedError,
    attach,
    launch,
    runs,
)
from notebook_launcher.command_line.program import main
from notebook_launcher.detached import host_socket, hosted_run
from notebook_launcher.detached.attached_run import AttachedRun
from notebook_launcher.detached.journal import Journal
from notebook_launcher.detached.requests import PROTOCOL
from notebook_launcher.history import run_folders
from notebook_launcher.history.run_folders import OUTPUT, SOCKET
from tests.detached.hosts import OwnError, fail, host_of, lives, wait_for
from tests.support.programs import end, read_until, type_in_terminal
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path


class Late:
    """A value whose class this process lacks for a while."""


class LateError(Exception):
    """An exception whose class this process lacks for a while."""


def raise_late() -> None:
    raise LateError


def test_result_tries_again_what_could_not_be_rebuilt(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    returns = launch(Late, 1, detached=True, output="none")
    raises = launch(raise_late, 1, detached=True, output="none")
    with monkeypatch.context() as without:
        without.delitem(globals(), "Late")
        without.delitem(globals(), "LateError")
        with pytest.raises(ReturnValueError, match=r"cannot be rebuilt in the notebook: AttributeError: .*Late"):
            returns.result()[0]
        refused = raises.exception()
        assert isinstance(refused, RankFailedError)
        assert raises.exception() is refused
    assert type(returns.result()[0]) is Late
    assert returns.result() is returns.result()
    error = raises.exception()
    assert type(error) is LateError
    assert raises.exception() is error


async def awaited(run: AttachedRun) -> Results:
    return await run


def test_several_clients_see_one_run(
    home: Path, gate: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = launch(wait_for, 2, args=(str(gate),), detached=True, seed=3)
    other, host = attach(run.id[:-3], show=False), host_of(run)
    assert host not in psutil.Process().children(recursive=True)
    until(lambda: other.metrics and "waits" in other.logs(1))
    assert (other.state, other.seed, other.config.num_processes) == ("running", 3, 2)
    assert other.logs_since(1, 0)[0] == other.logs(1)
    assert dict(other.log_order(9))[1] == len(other.logs(1))
    assert other.snapshot().arguments == {"gate": repr(str(gate))}
    assert all(rank.pid for rank in other.ranks)
    assert "wait_for" in str(run.stacks())
    other.edit(tags=["one"])
    assert run.tags == ("one",)
    with pytest.raises(CallOrderError, match="it cannot be saved"):
        run.save()
    with pytest.raises(LookupError, match="there is no rank 9"):
        run.logs(9)
    with monkeypatch.context() as patched:
        patched.setattr(host_socket, "GREETING", b"notebook-launcher host 99\n")
        with pytest.raises(CallOrderError, match=rf"speaks protocol {PROTOCOL}.*attach with the version that launched"):
            attach(run.id, show=False)
    with (
        contextlib.closing(host_socket.HostConnection(run.folder)) as connection,
        pytest.raises(TypeError, match="a host does not answer 'wait'"),
    ):
        connection.request("wait")
    with pytest.raises(TimeoutError, match=r"the run is still running after 0 s \(.*\): "):
        run.result(timeout=0)
    assert [run.snapshot().is_over for run in runs()] == [False]
    assert re.search(rf"holds.*\n(.*[KMG]B, )?.*host {host.pid}\b", runs().as_text())
    gate.touch()
    assert [value.tolist() for value in run.result()] == [[0, 1, 2]] * 2
    assert [value.tolist() for value in asyncio.run(awaited(other))] == [[0, 1, 2]] * 2
    assert run.result().folder == run.folder == home / run.id
    host.wait(20)
    assert not (run.folder / SOCKET).exists()
    # Ranks that print at different times have a line each.
    assert re.search(r"\[ranks? [\d,]+\] waits", capfd.readouterr().out)
    assert "def wait_for" in (run.folder / run_folders.SOURCE).read_text()
    late = attach(folder=home)
    assert late.result()[0].tolist() == [0, 1, 2]
    assert late.logs(0) == "waits\n"
    with pytest.raises(CallOrderError, match=r"the run is over \(done\)"):
        late.stacks()
    assert late.stop() is late.stop(wait=False) is None


def test_the_true_error_arrives_and_the_folder_names_the_versions_of_the_launching_process(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = launch(fail, 2, config=LaunchConfig(detached=True, output="none"))
    assert isinstance(run, AttachedRun)
    with pytest.raises(OwnError, match="code 7") as caught:
        run.result()
    assert caught.value.code == 7
    assert caught.value.rank in (0, 1)
    assert "raise OwnError(7)" in str(caught.value.__cause__)
    assert run.state == "failed"
    assert run.snapshot().error.endswith("OwnError: code 7")
    assert run.config.detached
    assert main(["attach"]) == 1
    assert f"{run.id}: failed: OwnError: code 7" in capfd.readouterr().err
    versions = json.loads((run.folder / "environment.json").read_text())["packages"]
    assert versions["pytest"] == pytest.__version__  # The host is forked from a process that has not imported it.


def test_a_terminal_lets_go_of_a_detached_run(home: Path, gate: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os, time\nprint('waits', flush=True)\nwhile not os.path.exists({str(gate)!r}):\n")
    with script.open("a") as file:
        file.write("    time.sleep(0.02)\nprint('ends')\n")
    words = ("launch", "--no_config_file", "--detached", "-n", 1, "--monitor", "false", script)
    pid, terminal = type_in_terminal(*words, cwd=tmp_path, env={run_folders.VARIABLE: str(home)})
    read_until(terminal, b"waits")
    os.kill(pid, signal.SIGHUP)
    assert end(pid, terminal) == 128 + signal.SIGHUP
    run = attach(show=False)
    assert run.state == "running"
    gate.touch()
    assert run.wait(60)
    assert run.logs(0) == "waits\nends\n"


def test_a_stop_of_all_and_a_stop_by_the_program_end_their_runs(
    home: Path, gate: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = launch(wait_for, 1, args=(str(gate),), detached=True, output="none")
    assert runs().stop_all() == 1
    with pytest.raises(RunStoppedError, match=r"the run was stopped before (rank 0 returned|its ranks had started)"):
        run.result()
    assert run.state == "stopped"
    assert runs().stop_all() == 0
    run = launch(wait_for, 1, args=(str(gate),), detached=True, output="rank0")
    until(lambda: "waits" in run.logs(0))
    capfd.readouterr()
    assert main(["attach", run.id, "--stop"]) == 0
    assert "waits" in capfd.readouterr().out
    stage = run.stop(wait=False)
    assert stage in ("interrupt", "terminate", "kill")
    assert attach(run.id, folder=home, show=False).stop(wait=False) == stage


def test_a_run_whose_folder_is_deleted_is_stopped(home: Path, gate: Path) -> None:
    run = launch(wait_for, 2, args=(str(gate),), detached=True, output="none")
    until(lambda: bool(run.metrics))
    host = host_of(run)
    ranks = [psutil.Process(rank.pid) for rank in run.ranks]
    shutil.rmtree(run.folder)
    host.wait(60)
    until(lambda: not any(lives(rank) for rank in ranks))
    with pytest.raises(RankFailedError, match=rf"{run.id} was deleted, and with it all that the run has left"):
        run.result()


def test_options_that_need_the_kernel_and_runs_of_a_kernel_are_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="start_method='fork' with detached=True"):
        launch(fail, 1, detached=True, start_method="fork")
    with pytest.raises(ConfigError, match=r"runs_folder=None with detached=True: the run's folder is where attach\(\)"):
        launch(fail, 1, detached=True, runs_folder=None)
    with monkeypatch.context() as patched:
        patched.setenv(run_folders.VARIABLE, "off")
        with pytest.raises(ConfigError, match="NOTEBOOK_LAUNCHER_RUNS=off with detached=True"):
            launch(fail, 1, detached=True)
    assert not home.exists()
    with pytest.raises(LookupError, match=r"there is no detached run in .*detached=True\) starts one"):
        attach()
    plain = launch(print, 1, args=("here",), output="none")
    plain.wait()
    with pytest.raises(LookupError, match="was not launched with detached=True, so it belongs to its kernel"):
        attach(plain.id)


def test_an_attached_run_has_what_a_run_has() -> None:
    names = {name for name in dir(Run) if not name.startswith("_")} - hosted_run.OF_THIS_PROCESS
    assert names <= set(dir(AttachedRun))
    assert names > hosted_run.OWN
    for name in sorted(names):
        if inspect.isfunction(method := getattr(Run, name)):
            mine = inspect.signature(getattr(AttachedRun, name)).parameters
            assert list(mine) == list(inspect.signature(method).parameters), name


def display_and_print() -> None:
    from IPython.display import display

    print("early", flush=True)
    display({"text/plain": "shown"}, raw=True)


def attached_output(capfd: pytest.CaptureFixture[str], since: str = "3600") -> str:
    capfd.readouterr()
    assert main(["attach", "--since", since]) == 0
    return capfd.readouterr().out


def test_attach_shows_the_output_of_a_run_that_is_over(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = launch(display_and_print, 1, detached=True)
    run.wait()
    at_host = attached_output(capfd)
    until(lambda: not (run.folder / SOCKET).exists())
    from_folder = attached_output(capfd)
    assert from_folder == at_host
    assert "early\n" in from_folder
    assert "shown\n" in from_folder
    assert "early" not in attached_output(capfd, since="0.001")
    (run.folder / OUTPUT).write_bytes(b"of another version")
    assert attached_output(capfd).startswith(f"{run.name}: done in ")
    run_folders.remove(run.folder)
    assert not run.folder.exists()


def test_a_journal_keeps_the_end() -> None:
    journal = Journal()
    for number in range(20):
        journal.text("stdout", f"{number}" + " " * 1_000_000)
    news = journal.news(0, 0.0)
    assert news.num_left_out == 20 - len(news.entries) > 0
    assert news.entries[-1].args[1].startswith("19")
    assert journal.news(news.position, 0.0).entries == ()
    journal.status("half")
    journal.display({"text/plain": "x"}, update=True)
    news = journal.news(news.position, 0.0)
    assert (news.status, [entry.method for entry in news.entries], news.is_over) == ("half", ["update"], False)
    journal.clear_output(wait=True)
    journal.finish()
    news = journal.news(0, 9.0)
    assert ([entry.method for entry in news.entries], news.is_over) == (["clear_output"], True)


def ask_twice() -> str:
    first = input("name? ")
    return first + input("more? ")


def test_questions_wait_for_a_client(home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = launch(ask_twice, 1, detached=True, output="none")
    until(lambda: [rank.state for rank in run.ranks] == ["asking"])
    terminals = [type_in_terminal("attach", run.id, cwd=tmp_path, env={run_folders.VARIABLE: str(home)})]
    notice = b"'[rank 0] name?' waits for an answer: attach(...).wait() in a cell asks you"
    assert notice in read_until(terminals[0][1], b"name? ")
    assert not run.wait(0.5)
    assert "The question waits for another client." in capfd.readouterr().err
    terminals.append(type_in_terminal("attach", run.id, cwd=tmp_path, env={run_folders.VARIABLE: str(home)}))
    read_until(terminals[1][1], b"name? ")
    os.write(terminals[1][1], b"Ada\n")
    for _, terminal in terminals:
        read_until(terminal, b"more? ")
    os.write(terminals[0][1], b" Lovelace\n")
    assert run.result()[0] == "Ada Lovelace"
    assert [end(pid, terminal) for pid, terminal in terminals] == [0, 0]


def test_a_debugger_waits_for_a_client(home: Path, tmp_path: Path) -> None:
    run = launch(fail, 1, detached=True, debug=True, output="none")
    pid, terminal = type_in_terminal("attach", run.id, cwd=tmp_path, env={run_folders.VARIABLE: str(home)})
    read_until(terminal, b"(rank 0 pdb) ")
    os.write(terminal, b"p 3 * 14\n")
    read_until(terminal, b"42")
    run.stop()
    assert end(pid, terminal) == 1
    assert run.state in ("failed", "stopped")
