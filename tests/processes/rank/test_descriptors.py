"""Ranks that run out of file descriptors."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from notebook_launcher import RankFailedError, Session

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 80


def open_all(kept: list[int]) -> int:
    """Open files until the process has no descriptor left."""
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    try:
        while True:
            kept.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return len(kept)


def test_rank_that_keeps_all_its_descriptors_is_replaced_after_an_error_that_names_the_limit() -> None:
    kept: list[int] = []

    def keep_all_on_rank_1() -> None:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            open_all(kept)

    with Session(2, output="none") as session:
        before = session.run(os.getpid)
        with pytest.raises(
            RankFailedError,
            match=r"the function has returned, but its value cannot travel: this rank has no file descriptor left "
            r"\(its limit is 80\)\. Close files, .*`ulimit -n`",
        ):
            session.run(keep_all_on_rank_1)
        after = session.run(os.getpid)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_error_of_a_function_that_opens_too_much_arrives_and_its_rank_goes_on() -> None:
    class Opened:
        def __init__(self) -> None:
            self.fds: list[int] = []

        def __del__(self) -> None:
            for fd in self.fds:
                os.close(fd)

    def open_too_much() -> None:
        mine = Opened()
        open_all(mine.fds)
        open(os.devnull)  # noqa: SIM115 - it cannot be opened

    with Session(1, output="none") as session:
        before = session.run(os.getpid)[0]
        with pytest.raises(OSError, match="Too many open files") as caught:
            session.run(open_too_much)
        assert "open(os.devnull)" in str(caught.value.__cause__)
        assert session.run(os.getpid)[0] == before


def test_call_that_cannot_arrive_is_an_error_that_names_the_limit(tmp_path: Path) -> None:
    start, taken = tmp_path / "start", tmp_path / "taken"
    os.mkfifo(start)
    os.mkfifo(taken)

    def take_all_between_calls() -> None:
        """Start a thread that takes all descriptors once the test wants it, while the rank waits for a call."""
        import threading

        def take() -> None:
            with start.open(), taken.open("w") as answer:
                own: list[int] = []
                answer.write(str(open_all(own)))
                answer.flush()
                threading.Event().wait()

        threading.Thread(target=take, daemon=True).start()

    with Session(1, output="none") as session:
        before = session.run(os.getpid)[0]
        session.run(take_all_between_calls)
        start.write_text("now")
        with taken.open() as answer:
            assert answer.read(1)
            with pytest.raises(
                RankFailedError,
                match=r"the function was not called, because the call could not arrive: this rank has no file desc",
            ):
                session.run(os.getpid)
        assert session.run(os.getpid)[0] != before
