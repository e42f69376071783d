"""Marks of forwards that ranks compare, where a program runs ahead of its peers and of its GPU, as with NCCL.

Two ranks take turns in this process, on one board, in orders that only a GPU allows. No GPU is used.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher import LaunchConfig
from notebook_launcher.context import RankContext, begin_call, enter
from notebook_launcher.messaging.board_layout import BOARD_SIZE, STEPS
from notebook_launcher.training.parallelism.forward_check import (
    IN_WRITING,
    MAX_AHEAD,
    Drift,
    ForwardMark,
    ForwardMarks,
    PassedForwards,
)
from notebook_launcher.training.parallelism.unit_order import NUMBERS

if TYPE_CHECKING:
    from collections.abc import Iterator


class Rank:
    """One of two ranks, with a model that is shared out."""

    def __init__(self, rank: int, board: bytearray) -> None:
        nobody: Any = None
        self.context = RankContext(
            rank=rank,
            num_processes=2,
            pid=os.getpid(),
            settings=LaunchConfig().training_settings(),
            send=print,
            board=board,
            rendezvous=nobody,
        )
        self.num_steps = self.num_forwards = 0
        self.marks = ForwardMarks([1 - rank], lambda: self.num_steps)

    def forward(self, marks: ForwardMarks | None = None) -> ForwardMark:
        """Begin a forward of the model, or of another one."""
        enter(self.context)
        self.num_forwards += 1
        mark = (marks or self.marks).begin(self.num_forwards)
        assert mark is not None
        return mark

    def compare_forwards(self, mark: ForwardMark) -> Drift | None:
        enter(self.context)
        return self.marks.compare_forwards(mark)

    def compare_steps(self) -> Drift | None:
        enter(self.context)
        return self.marks.compare_steps()


@pytest.fixture
def ranks() -> Iterator[tuple[Rank, Rank]]:
    board = bytearray(BOARD_SIZE)
    yield Rank(0, board), Rank(1, board)
    enter(None)


@pytest.mark.parametrize("ahead", [1, 5, MAX_AHEAD + 1])
def test_a_rank_that_runs_ahead_of_its_peer_has_not_drifted(ranks: tuple[Rank, Rank], ahead: int) -> None:
    first, second = ranks
    queued: list[ForwardMark] = []
    for number in range(3 * NUMBERS):
        queued.append(first.forward())
        assert first.compare_steps() is None
        first.num_steps += number % 3 == 2
        if number < ahead:
            continue
        mark = second.forward()
        assert second.compare_steps() is None
        assert second.compare_forwards(mark) is None, "its peer is ahead"
        second.num_steps += (number - ahead) % 3 == 2
        assert first.compare_forwards(queued[number - ahead]) is None, "the peer has begun that forward by now"


def test_a_forward_that_a_peer_has_not_begun_is_found_once_the_gpu_has_passed_it(ranks: tuple[Rank, Rank]) -> None:
    first, second = ranks
    queued = [first.forward() for _ in range(4)]
    for _ in range(3):
        second.forward()
    assert [first.compare_forwards(mark) for mark in queued[:3]] == [None] * 3
    assert first.compare_forwards(queued[3]) == Drift(queued[3], [1], {})


@pytest.mark.parametrize("ahead", [0, 1, 5, 30])
def test_an_update_that_one_rank_leaves_out_is_found_by_the_rank_that_is_ahead(
    ranks: tuple[Rank, Rank], ahead: int
) -> None:
    first, second = ranks
    for number in range(40 + ahead):
        first.forward()
        drift = first.compare_steps()
        assert drift is None or number > ahead, "found before there was any"
        if drift is not None:
            break
        first.num_steps += 1
        if number >= ahead:
            second.forward()
            assert second.compare_steps() is None or number > ahead
            second.num_steps += number > ahead  # It leaves the first one out.
    assert drift is not None
    assert drift.steps == {1: drift.forward.num_steps - 1}


def test_a_mark_that_is_being_written_is_not_compared(ranks: tuple[Rank, Rank]) -> None:
    first, second = ranks
    first.num_steps = 1
    second.forward()
    first.forward()
    first.num_steps += 1
    second.forward()
    first.forward()
    assert first.compare_steps() is not None
    first.context.board[STEPS + 1] = IN_WRITING
    assert first.compare_steps() is None


def test_forwards_of_two_models_are_not_confused_after_any_number(ranks: tuple[Rank, Rank]) -> None:
    others = [ForwardMarks([1 - at], lambda rank=rank: rank.num_steps) for at, rank in enumerate(ranks)]  # type: ignore[misc]
    for number in range(2 * NUMBERS):
        for at, rank in enumerate(ranks):
            mark = rank.forward(None if number % 100 == 0 else others[at])
            assert rank.compare_steps() is None
            assert rank.compare_forwards(mark) is None or at == 0, "rank 1 begins after rank 0"
            rank.num_steps += 1


def test_a_new_call_forgets_the_forwards_of_the_last(ranks: tuple[Rank, Rank]) -> None:
    first, _ = ranks
    first.forward()
    begin_call(1, None)
    assert first.context.forwards == {}


class Work:
    """Work of a GPU."""

    def __init__(self) -> None:
        self.is_done = self.was_waited_for = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = self.was_waited_for = True


def test_forwards_are_taken_in_order_once_the_gpu_has_passed_them() -> None:
    passed, works = PassedForwards(), [Work() for _ in range(MAX_AHEAD + 1)]
    marks = [ForwardMark(at + 1, at + 1, 0) for at in range(MAX_AHEAD + 1)]
    for mark, work in zip(marks[:-1], works, strict=False):
        passed.add(mark, work)
        assert list(passed.take()) == []
    works[1].is_done = True
    assert list(passed.take()) == [], "the first one is not done"
    passed.add(marks[-1], works[-1])
    assert list(passed.take()) == marks[:2]
    assert [work.was_waited_for for work in works] == [True] + [False] * MAX_AHEAD
