"""Threads come to rest before a rank forks, where the interpreter's fork copies a lock that is held."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time

import pytest

from notebook_launcher import launch, notebook_launch
from notebook_launcher.processes.rank import rank_process


def test_defect_is_known_by_python_version():
    has_it = [(3, 10, 14), (3, 11, 2), (3, 11, 9)]
    for version in (*has_it, (3, 10, 15), (3, 11, 10), (3, 12, 0), (3, 13, 1)):
        assert rank_process.has_the_defect(version) is (version in has_it)


def test_fork_waits_for_a_thread_that_is_about_to_rest():
    finished: list[bool] = []

    def work() -> None:
        started.set()
        hashlib.sha256(bytes(2_000_000))  # about 5 ms, without the interpreter's lock
        finished.append(True)
        go_home.wait()

    started, go_home = threading.Event(), threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        started.wait()
        rank_process.let_threads_settle()
        assert finished
    finally:
        go_home.set()
        thread.join()


def test_fork_does_not_wait_for_a_thread_that_never_rests():
    def work() -> None:
        while not stop.is_set():
            hashlib.sha256(bytes(2_000_000))

    stop = threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        before = time.monotonic()
        rank_process.let_threads_settle()
        assert rank_process.PATIENCE_S <= time.monotonic() - before < 100 * rank_process.PATIENCE_S
    finally:
        stop.set()
        thread.join()


@pytest.mark.skipif(not rank_process.has_the_defect(sys.version_info[:3]), reason="this Python's fork is safe")
def test_ranks_look_before_they_fork():
    def fork_under_a_profile() -> list[str]:
        import os
        import sys

        called = []
        sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
        child = os.fork()
        if child == 0:
            os._exit(0)
        sys.setprofile(None)
        os.waitpid(child, 0)
        return called

    (called,) = notebook_launch(fork_under_a_profile, 1, output="none")
    assert called.count("let_threads_settle") == 1


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("return", 0, ""),
        ("raise", 1, "ValueError: the child's"),
        (None, 0, ""),
        (5, 5, ""),
        ("gone", 1, "gone"),
        (-1, 255, ""),
    ],
)
def test_fork_that_leaves_the_function_ends_and_is_no_second_rank(how, status, said):
    def fork(how: str | int | None) -> int | str:
        import torch.distributed as dist

        status = 0
        if dist.get_rank() == 0:
            child = os.fork()
            if child == 0:
                if how == "return":
                    return "the child's"
                if how == "raise":
                    raise ValueError("the child's")
                sys.exit(how)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        dist.barrier()  # The other rank has not ended before this one comes.
        return status

    run = launch(fork, 2, args=(how,), output="none", timeout=10)
    assert list(run.result()) == [status, 0]
    lines = run.logs(0).splitlines()
    assert lines[-1:] == ([said] if said else [])
    assert (lines[:1] == ["Traceback (most recent call last):"]) is (how == "raise")
    assert "notebook_launcher/processes" not in run.logs(0)
