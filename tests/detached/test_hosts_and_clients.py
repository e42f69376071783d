"""Hosts and clients that come, go, hang and die: nothing is lost or doubled, and nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from notebook_launcher import RankFailedError, ReturnValueError, RunTimeoutError, attach, launch, prewarm, report, runs
from notebook_launcher.detached import host_socket
from notebook_launcher.detached.requests import Ask
from tests.detached.hosts import host_of, lives, wait_for
from tests.support.waiting import until

if TYPE_CHECKING:
    from notebook_launcher.detached.attached_run import AttachedRun

CYCLES = 20


def count_up(gate: str, leave: str) -> int:
    number = 0
    while not Path(gate).exists():
        report(step=number, loss=float(number))
        print(number, flush=True)
        number += 1
        time.sleep(0.002)
    print("counted", flush=True)
    while not Path(leave).exists():
        time.sleep(0.02)
    return number


def write_much(gate: str) -> bytes:
    print("x" * 8_000_000)
    print("written", flush=True)
    while not Path(gate).exists():
        time.sleep(0.02)
    return os.urandom(1_000_000)


class SlowToLeave:
    """A value whose packing takes until a file is there."""

    def __init__(self, gate: str, packs: str) -> None:
        self.gate, self.packs = gate, packs

    def __reduce__(self) -> tuple[Any, ...]:
        Path(self.packs).touch()
        while not Path(self.gate).exists():
            time.sleep(0.02)
        return str, ("left",)


class Client:
    """Attaches and detaches again and again, and keeps what each visit brings."""

    def __init__(self, run: AttachedRun) -> None:
        self.run = run
        self.steps: list[int | None] = []
        self.text = ""
        self._position = self._metric = 0

    def visit(self, patience: float) -> None:
        visitor = attach(self.run.id, show=False)
        points, self._metric = visitor.metrics_since(self._metric)
        self.steps += [point.step for point in points]
        with contextlib.closing(host_socket.HostConnection(self.run.folder)) as connection:
            news = connection.request("news", self._position, patience)
        assert news.num_left_out == 0
        self._position = news.position
        self.text += "".join(entry.args[1] for entry in news.entries if entry.method == "text")


def test_clients_that_come_and_go_lose_and_double_nothing(
    home: Path, tmp_path: Path, gate: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    leave = tmp_path / "leave"
    run = launch(count_up, 1, args=(str(gate), str(leave)), detached=True, output="rank0", monitor=False)
    until(lambda: run.metrics)
    clients = [Client(run), Client(run)]
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda client: [client.visit(0.02) for _ in range(CYCLES)], clients))
    assert run.state == "running"
    gate.touch()
    for client in clients:
        while "counted" not in client.text:
            client.visit(1.0)
    capfd.readouterr()
    recent = attach(run.id, since=0.0)
    leave.touch()
    (num,) = run.result()
    every = list(range(num))
    for client in clients:
        assert [int(line) for line in client.text.split("\n") if line.strip().isdecimal()] == every
        points, _ = attach(run.id, show=False).metrics_since(len(client.steps))
        assert [*client.steps, *(point.step for point in points)] == every
    # Output from before the visit is not shown again.
    recent.wait()
    assert "\n0\n" not in capfd.readouterr().out


@pytest.mark.parametrize("stage", ["starting", "returning"])
def test_a_host_that_dies_at_any_stage_takes_its_ranks_along(
    home: Path, tmp_path: Path, gate: Path, stage: str
) -> None:
    packs = tmp_path / "packs"
    run = launch(SlowToLeave, 2, args=(str(gate), str(packs)), detached=True, output="none")
    if stage == "returning":
        until(packs.exists)
    host = host_of(run)
    family = host.children(recursive=True)
    host.kill()
    error = run.exception()
    assert isinstance(error, RankFailedError)
    assert f"the host process of {run.id} has ended: it was killed, its disk was full, or its machine" in str(error)
    assert run.state == "lost"
    run.stop()
    until(lambda: not any(map(lives, family)))


def test_stopped_host_is_named_and_ends_its_run_in_time(
    home: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_socket, "PATIENCE", 1.0)
    run = launch(wait_for, 2, args=(str(gate),), detached=True, output="none", timeout=4)
    host = host_of(run)
    host.suspend()
    until(lambda: f"host {host.pid} does not answer" in runs(home).as_text(5))
    with pytest.raises(TimeoutError, match=rf"does not answer: .* `kill -CONT {host.pid}` lets it go on"):
        attach(run.id)
    assert isinstance(run.exception(60), RunTimeoutError)
    assert run.snapshot().seconds < 4 + 5


def test_client_that_reads_nothing_does_not_delay_others(home: Path, gate: Path) -> None:
    run = launch(write_much, 1, args=(str(gate),), detached=True, output="none")
    until(lambda: run.logs_since(0, 7_999_999)[0].endswith("written\n"))
    host, stuck = host_of(run), host_socket.HostConnection(run.folder)
    stuck._link.send(Ask("logs", (0,), {}))  # The answer is never read.
    began = time.monotonic()
    assert not run.wait(0)
    # What the host has no room to keep is lost alone: the run is a success, and its other results are there.
    resource.prlimit(host.pid, resource.RLIMIT_FSIZE, (500_000, resource.RLIM_INFINITY))
    gate.touch()
    results = run.result()
    assert time.monotonic() - began < 60
    assert run.state == "done"
    with pytest.raises(ReturnValueError, match=r"it could not be kept in .*File too large"):
        results[0]
    host.wait(60)
    stuck.close()


def test_launch_that_is_interrupted_before_its_host_is_up_leaves_no_run(home: Path) -> None:
    prewarm()
    until(servers_of_this_process)
    (server,) = servers_of_this_process()
    server.suspend()  # As a server that takes long to start, it gives the kernel no host.
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    def interrupt() -> None:
        until(lambda: "receive" in names_of_frames(main_thread) and "hand_over" in names_of_frames(main_thread))
        signal.pthread_kill(main_thread, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt) as interrupted:
            launch(int, 1, detached=True, output="none")
    finally:
        server.resume()
        thread.join()
    shown = "".join(interrupted.value._render_traceback_())  # type: ignore[attr-defined]
    assert shown == "KeyboardInterrupt: the run was given up before it began; nothing of it is left"
    later = launch(int, 1, detached=True, output="none")
    assert later.wait(60)
    assert [run.id for run in runs()] == [later.id]


def servers_of_this_process() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if "notebook_launcher.processes.forkserver" in " ".join(child.cmdline())]


def names_of_frames(thread: int) -> set[str]:
    frame, names = sys._current_frames().get(thread), set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names
