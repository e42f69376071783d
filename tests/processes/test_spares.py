"""Tests for the rules by which a fork server keeps spare ranks; the processes are this one."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher import LaunchConfig
from notebook_launcher.kernel.plan import make_plan
from notebook_launcher.machine.devices import Machine
from notebook_launcher.messaging import messages
from notebook_launcher.messaging.channel import Channel
from notebook_launcher.processes.spare_ranks import SPARES_AFTER, SpareRanks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Kept:
    """Keeps the ends of the channels of spare processes, in place of processes."""

    def __init__(self) -> None:
        self.ends: list[Channel] = []
        self.spares = SpareRanks()

    def fork(self, _become: Callable[[], None], fd: int) -> int:
        self.ends.append(Channel(socket.socket(fileno=fd)))
        return 1000 + len(self.ends)

    def tend(self) -> int:
        """Fork what is missing, and return the number of processes."""
        before = len(self.ends)
        self.spares.tend(self.fork)
        return len(self.ends) - before

    def launch(self, pid: int, *, may_expect: bool = True, is_interactive: bool = False, **options: Any) -> None:
        """Launch and end."""
        self.spares.note_launch(pid, request(is_interactive=is_interactive, **options))
        self.spares.note_end(pid, may_expect=may_expect)


def setup(*, many_calls: bool = False, **options: Any) -> messages.Setup:
    machine = Machine(num_cores=64, gpus=(), why_no_gpu="")
    config = LaunchConfig(**{"num_processes": 2, "devices": "cpu", **options})
    return make_plan(config, machine).setup(many_calls=many_calls)


def request(*, is_interactive: bool = False, **options: Any) -> messages.StartSupervisor:
    return messages.StartSupervisor(setup=setup(**options), is_interactive=is_interactive, needs=())


@pytest.fixture
def kept() -> Iterator[Kept]:
    made = Kept()
    yield made
    made.spares.dismiss()
    for end in made.ends:
        end.close()


def test_first_launch_of_a_person_at_a_prompt_is_followed_by_spare_ranks(kept: Kept) -> None:
    kept.launch(1, is_interactive=True)
    assert kept.spares.due() == SPARES_AFTER
    assert kept.tend() == 1


def test_second_launch_of_a_kind_is_followed_by_spare_ranks(kept: Kept) -> None:
    kept.launch(1)
    assert (kept.tend(), kept.spares.due()) == (0, None)
    kept.launch(2)
    assert kept.spares.due() == SPARES_AFTER
    assert kept.tend() == 1
    assert kept.spares.due() == pytest.approx(60, abs=5)


def test_launch_of_the_kind_is_handed_to_the_spare_ranks(kept: Kept) -> None:
    kept.launch(1)
    kept.launch(2)
    kept.tend()
    reading, writing = os.pipe()
    assert kept.spares.take(request(seed=3), writing) == 1001
    received = kept.ends[0].receive()
    assert received is not None
    os.close(received[1][0])
    os.close(reading)
    assert kept.tend() == 0


@pytest.mark.parametrize(
    "other", [{"num_processes": 3}, {"env": {"A": "1"}}, {"many_calls": True, "env": {"A": "1"}}], ids=str
)
def test_launch_of_another_kind_dismisses_the_spare_ranks(kept: Kept, other: dict[str, Any]) -> None:
    kept.launch(1)
    kept.launch(2)
    kept.tend()
    assert kept.spares.take(request(**other), -1) is None
    assert kept.ends[0].receive() is None


def test_other_launch_between_two_of_a_kind_prevents_spare_ranks(kept: Kept) -> None:
    kept.launch(1)
    kept.launch(2, num_processes=3)
    kept.launch(3)
    assert kept.tend() == 0


def test_launches_without_a_kind_get_no_spare_ranks(kept: Kept) -> None:
    kept.launch(1, num_processes=9)
    kept.launch(2, num_processes=9)
    assert kept.tend() == 0


def test_sessions_do_not_count_as_launches(kept: Kept) -> None:
    kept.launch(1, many_calls=True)
    kept.launch(2, many_calls=True)
    assert kept.tend() == 0


def test_no_spare_ranks_in_a_retired_deputy(kept: Kept) -> None:
    kept.launch(1)
    kept.launch(2, may_expect=False)
    assert kept.tend() == 0


def test_no_spare_ranks_until_the_last_launch_has_ended(kept: Kept) -> None:
    kept.launch(1)
    for pid in (2, 3):
        kept.spares.note_launch(pid, request())
    kept.spares.note_end(2, may_expect=True)
    assert kept.tend() == 0
    kept.spares.note_end(3, may_expect=True)
    assert kept.tend() == 1


def test_spare_ranks_go_after_their_time(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.launch(1, is_interactive=True)
    kept.tend()
    monkeypatch.setattr("notebook_launcher.processes.spare_ranks.KEPT_FOR", 0.0)
    kept.launch(2, is_interactive=True)
    assert kept.spares.due() == 0.0
    assert kept.tend() == 0
    assert kept.ends[0].receive() is None
    assert kept.spares.due() is None


def test_launch_after_the_death_of_the_spare_ranks_is_not_handed_over(kept: Kept) -> None:
    kept.launch(1, is_interactive=True)
    kept.tend()
    kept.ends[0].close()
    reading, writing = os.pipe()
    assert kept.spares.take(request(), writing) is None
    os.close(writing)
    os.close(reading)
