"""Detached sessions, attached to from this process: memory, calls, names, what is refused, what is left behind."""

from __future__ import annotations

import contextlib
import re
import threading
from typing import TYPE_CHECKING, Any, cast

import psutil
import pytest

from notebook_launcher import CallOrderError, ConfigError, RunStoppedError, Session, attach, attach_session, runs
from notebook_launcher.command_line.program import main
from notebook_launcher.detached import host_socket
from notebook_launcher.detached.attached_session import AttachedSession
from notebook_launcher.history import run_folders
from notebook_launcher.history.run_folders import SESSION_SOCKET, SOCKET
from tests.detached.hosts import OwnError, fail, lives, wait_for
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def put(value: int) -> None:
    import __main__

    __main__.kept = value


def get() -> int:
    import __main__

    return __main__.kept  # type: ignore[no-any-return]


def die() -> None:
    import os

    if os.environ["RANK"] == "1":
        os._exit(3)


def opened(num_processes: int, **options: Any) -> AttachedSession:
    return cast("AttachedSession", Session(num_processes, detached=True, **options))


@pytest.fixture
def session(home: Path) -> Iterator[AttachedSession]:
    session = opened(2, name="exp", output="rank0", monitor=False)
    yield session
    session.close()


def host_of(session: AttachedSession) -> psutil.Process:
    pid = run_folders.owner_of(session._folder)
    assert pid is not None
    return psutil.Process(pid)


def test_any_client_finds_the_ranks_memory(session: AttachedSession, home: Path) -> None:
    assert isinstance(session, AttachedSession)
    assert session.latest is None
    session.run(put, args=(5,))
    assert host_of(session) not in psutil.Process().children(recursive=True)
    for other in (attach_session("exp"), attach_session(), attach_session(session.id[:-2])):
        assert other.id == session.id
        assert list(other.run(get)) == [5, 5]
        assert other.num_processes == 2
        assert other.config.name == "exp"
    session["x", 1] = 3
    assert attach_session("exp")["x", 1] == 3
    session.push({"big": list(range(1000))})
    assert attach_session("exp").execute("sum(big)").mean() == sum(range(1000))
    assert "big" in repr(session.who())
    assert repr(session).startswith("<AttachedSession 'exp' of 2 CPU ranks")
    assert repr(session).endswith(": open>")
    # Calls that were short and said nothing leave no folder once their results are there.
    until(lambda: {run_folders.name_in(name) for name in run_folders.list_ids(home)} <= {"exp", "put"})


def test_errors_and_stops_cost_no_memory_and_a_death_that_of_its_rank(
    session: AttachedSession, gate: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    session.run(put, args=(5,))
    with pytest.raises(OwnError, match="code 7") as caught:
        session.run(fail)
    assert caught.value.code == 7
    assert "raise OwnError(7)" in str(caught.value.__cause__)
    with pytest.raises(ZeroDivisionError):
        session.execute("1/0")
    with pytest.raises(ConfigError, match=r"^fn=3 is an int, which cannot be called"):
        session.run(3)  # type: ignore[arg-type]
    assert not session._is_at_rest
    session.forget()
    call = session.launch(wait_for, args=(str(gate),))
    until(lambda: call.metrics)
    assert call.stop() in ("ask", "interrupt")
    with pytest.raises(RunStoppedError, match="the run was stopped before ranks 0, 1 returned"):
        call.result()
    assert list(session.run(get)) == [5, 5]
    assert session._is_at_rest
    with pytest.raises(Exception, match="rank 1"):
        session.run(die)
    assert "rank 1 had died and was restarted" in capfd.readouterr().out
    assert session.pull("kept", ranks=0)[0] == 5


def test_one_call_runs_at_a_time(session: AttachedSession, gate: Path, capfd: pytest.CaptureFixture[str]) -> None:
    call = session.launch(wait_for, args=(str(gate),))
    other = attach_session("exp", show=False)
    assert other.is_busy
    assert repr(other).endswith(": busy>")
    busy = rf"the session is busy with wait_for \({call.id}\), which process \d+ began .* ago. Wait for it"
    with pytest.raises(CallOrderError, match=busy):
        other.run(get)
    with pytest.raises(CallOrderError, match=busy):
        other.forget()
    assert other.latest is not None
    assert other.latest.id == call.id
    until(lambda: call.metrics)
    assert "wait_for" in str(other.latest.stacks())
    assert attach(show=False).id == call.id
    capfd.readouterr()
    attach_session("exp")  # Shows the call that goes on.
    until(lambda: "waits" in capfd.readouterr().out)
    gate.touch()
    for results in (other.latest.result(), call.result()):
        assert [value.tolist() for value in results] == [[0, 1, 2]] * 2
    assert call.state == "done"
    assert [run.name for run in runs()] == ["wait_for", "exp"]


def test_a_short_call_leaves_no_folder_once_its_results_are_opened(session: AttachedSession) -> None:
    session.run(put, args=(1,))  # The ranks may take more than a second to start.
    call = session.launch(put, args=(1,))
    assert list(call.result()) == [None, None]
    assert call.result().folder is None
    until(lambda: not call.folder.exists())
    assert call.state == "done"
    assert (call.logs(0), call.logs_since(0, 0), call.metrics, call.metrics_since(3)[1]) == ("", ("", 0), (), 0)
    later = session.launch(put, args=(1,))
    later.wait()
    # Nobody takes the results within 5 s, so they stay.
    until(lambda: not (later.folder / SOCKET).exists())
    assert later.state == "done"
    assert list(later.result()) == [None, None]


def test_a_name_is_taken_once(session: AttachedSession) -> None:
    with pytest.raises(ConfigError, match=r"^name='exp': a detached session of this name"):
        Session(1, name="exp", detached=True)
    with opened(1, output="none") as one, opened(1, output="none") as another:
        assert one.id != another.id
        assert one.name == another.name == "session"
    with pytest.raises(LookupError, match=r"no detached session 'nix' is open in .*\. Open are 'exp'\."):
        attach_session("nix")
    with pytest.raises(LookupError, match=r"is a session, and not a run: attach_session\('exp'\) reconnects to it"):
        attach(session.id)


def test_the_end_of_a_block_closes_the_session_with_its_call_and_an_error_does_not(
    home: Path, gate: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OwnError), opened(1, name="exp") as session:
        session.run(put, args=(5,))
        session.run(fail)
    assert 'the session stays open: attach_session("exp") reconnects to it' in capfd.readouterr().out
    host = host_of(session)
    family = host.children(recursive=True)
    with attach_session("exp") as other:
        assert list(other.run(get)) == [5]
    host.wait(20)
    assert not any(process.is_running() for process in family)
    assert session.id not in run_folders.list_ids(home)
    assert repr(session).endswith(": closed>")
    session.close()
    with pytest.raises(CallOrderError, match=rf"session {session.id} is closed. Open a new one"):
        session.run(get)
    session = opened(1, name="exp", output="none")
    call = session.launch(wait_for, args=(str(gate),))
    until(lambda: call.metrics)
    attach_session("exp", show=False).close()
    assert isinstance(call.exception(), RunStoppedError)
    assert call.state == "stopped"


def test_a_dead_host_takes_its_ranks_along(home: Path, gate: Path) -> None:
    session = opened(2, name="exp", output="none")
    call = session.launch(wait_for, args=(str(gate),))
    until(lambda: call.metrics)
    host = host_of(session)
    family = host.children(recursive=True)
    host.kill()
    assert f"the host process of {call.id} has ended" in str(call.exception())
    until(lambda: not any(map(lives, family)))
    with pytest.raises(CallOrderError, match=rf"the host process of session {session.id} has ended: it was killed"):
        session.run(get)
    assert {run.name: run.state for run in runs()}["exp"] == "lost"
    session.close()
    # The name is free again.
    with opened(1, name="exp", output="none") as again:
        assert again.id != session.id


def test_session_without_calls_is_closed(home: Path) -> None:
    session = opened(1, name="exp", output="none", idle_timeout=0.5)
    host_of(session).wait(30)
    assert run_folders.list_ids(home) == []
    with pytest.raises(CallOrderError, match="is closed"):
        session.run(get)


def test_runs_and_the_program_know_sessions(
    session: AttachedSession, gate: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    session.run(put, args=(1,))
    pid = host_of(session).pid
    until(lambda: re.search(rf"session +exp .*running .*B, host {pid}\b", runs().as_text()))
    assert main(["attach", "exp"]) == 0
    assert "no call is running" in capfd.readouterr().out
    call = session.launch(wait_for, args=(str(gate),))
    shown = threading.Thread(target=main, args=(["attach", "exp"],))
    shown.start()
    until(lambda: "waits" in capfd.readouterr().out)
    gate.touch()
    shown.join()
    call.result()
    # For some seconds the host keeps the folder even of a short call, whose results nobody has opened.
    session.launch(put, args=(2,)).wait()
    assert runs().stop_all() == 1
    assert runs().stop_all() == 0
    again = opened(1, name="exp", output="none")
    assert main(["attach", "exp", "--stop"]) == 0
    assert repr(again).endswith(": closed>")


def test_session_is_closed_though_its_host_is_stopped(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    session = opened(1, name="exp", output="none")
    host = host_of(session)
    host.suspend()
    with monkeypatch.context() as patched:
        patched.setattr(host_socket, "PATIENCE", 1.0)
        assert repr(session).endswith(": its host does not answer>")
        with pytest.raises(TimeoutError, match=rf"does not answer: .* `kill -CONT {host.pid}` lets it go on"):
            attach_session("exp")
    session.close()
    assert "was stopped (SIGSTOP), and was continued\n" in capfd.readouterr().err
    until(lambda: not lives(host))
    assert not session._folder.exists()


def test_other_calls_wait_for_the_end_of_a_debugger(session: AttachedSession) -> None:
    with (
        contextlib.closing(host_socket.HostConnection(session._folder, SESSION_SOCKET)) as connection,
        pytest.raises(TypeError, match="the host of a session does not answer 'snapshot'"),
    ):
        connection.request("snapshot")
    with pytest.raises(CallOrderError, match=r"no debugger is open in this session: session.debug\(\) opens one"):
        session._request("end")
    with pytest.raises(ZeroDivisionError):
        session.execute("1/0", ranks=1)
    session._request("debug", None)
    with pytest.raises(CallOrderError, match=r"the session is in the debugger of rank 1, which a client has opened"):
        session.run(get)
    assert session.is_busy
    with contextlib.closing(host_socket.HostConnection(session._folder, SESSION_SOCKET)) as connection:
        until(lambda: connection.request("news", 0, 0.0).questions)
        news = connection.request("news", 0, 0.0)
    session._request("interrupt", again=False)
    session._request("end")
    # The client that opened the debugger is on its way to the first prompt.
    assert "waits for an answer" not in repr(news.entries)
