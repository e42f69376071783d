"""Phases of a rank whose device lags behind its program."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from notebook_launcher.training.queued_work import mark_queued_work
from notebook_launcher.training.recording import phases
from notebook_launcher.training.recording.phases import DevicePhaseClock


class Device:
    """A program and its device, whose times are set by hand: work is queued, and takes place one after another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.done = 100.0
        """Time at which the device will be done with all that is queued."""
        self.sent: list[Any] = []
        self.weight: Any = torch.tensor(8.0)
        """The weight of each window."""
        self.dead = self.is_capturing = False
        monkeypatch.setattr(phases, "read_clock", lambda: self.now)
        self.clock = DevicePhaseClock(self.sent.append, lambda: None if self.is_capturing else Moment(self))
        self.clock.mark(None)

    def compute(self, seconds: float, queueing: float = 0.0) -> None:
        """Have the program queue work of the device."""
        self.now += queueing
        self.done = max(self.done, self.now) + seconds

    def update(self, *, forward: float, backward: float, wait: float, data: float = 0.0) -> None:
        """Make an update whose program takes a millisecond for each step, but for the data."""
        self.now += data
        self.clock.mark("data")
        self.compute(forward, 2**-10)
        self.clock.note(("forward", self.now))
        watched = self.clock.attend(self.now, syncs=True)
        self.compute(backward, 2**-10)
        if watched:
            self.clock.mark_computed()
        self.compute(wait)
        if watched:
            self.clock.end_watched()
        self.clock.note(("synced backward", self.now))
        self.compute(2**-10, 2**-10)
        self.clock.mark("step")
        self.clock.note_window((2, self.weight))

    def sums(self) -> dict[str, float]:
        return {phase: sum(record.seconds[phase] for record in self.sent) for phase in phases.PHASES}


class Moment:
    """A moment of the device, by the protocol of CUDA's events."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, max(device.now, device.done)

    def query(self) -> bool:
        assert not self.device.is_capturing
        if self.device.dead:
            raise RuntimeError("device-side assert")
        return self.at <= self.device.now

    def elapsed_time(self, end: Moment) -> float:
        if self.device.dead:
            raise RuntimeError("device-side assert")
        assert self.query()
        assert end.query()
        return (end.at - self.at) * 1000


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


@pytest.mark.parametrize("weight", [torch.tensor(8.0), 8.0], ids=["on the device", "number"])
def test_phases_last_as_long_as_the_device_takes(weight: Any, device: Device) -> None:
    device.weight = weight
    for _ in range(20):
        device.update(forward=0.25, backward=0.5, wait=0.125)
    device.now = device.done
    device.clock.flush()
    seconds = device.sums()
    assert seconds.pop("data") < 0.01
    for phase, each in {"forward": 0.25, "backward": 0.5, "sync": 0.125, "step": 2**-10}.items():
        assert seconds[phase] == pytest.approx(20 * each, rel=0.02)
    assert sum(record.counts["sync"] for record in device.sent) == 20
    assert sum(record.windows for record in device.sent) == 20
    assert sum(record.samples for record in device.sent) == 160.0
    spans = [span for record in device.sent for span in record.spans]
    ends = [start + duration for _, start, duration in spans]
    assert all(later[1] >= end - 1e-9 for end, later in zip(ends, spans[1:], strict=False))
    assert max(ends) == pytest.approx(device.done)


def test_idle_time_of_the_device_after_late_data_counts_as_data(device: Device) -> None:
    for _ in range(10):
        device.update(data=0.5, forward=0.125, backward=0.0625, wait=0.0)
    device.now = device.done
    device.clock.flush()
    seconds = device.sums()
    assert seconds["forward"] == pytest.approx(1.25, rel=0.02)
    assert seconds["data"] == pytest.approx(0.5 + 9 * (0.5 - 0.1875), rel=0.03)


def test_record_holds_what_the_device_has_passed_and_waits_for_nothing(device: Device) -> None:
    device.update(forward=1.0, backward=1.0, wait=1.0)
    device.now = 100.25
    device.clock.mark("data")  # A record is due, and the device is in the first forward.
    assert device.sums()["forward"] == 0
    assert not any(record.windows for record in device.sent)
    device.now = 102.6  # In the wait: the backward is told with it.
    device.clock.mark("data")
    assert device.sums()["forward"] == pytest.approx(1.0, abs=0.01)
    assert device.sums()["backward"] == 0
    device.now = device.done + 0.25
    device.clock.mark("data")
    assert device.sums()["backward"] == pytest.approx(1.0, abs=0.01)
    assert device.sums()["sync"] == pytest.approx(1.0, abs=0.01)
    assert sum(record.windows for record in device.sent) == 1


@pytest.mark.parametrize("dead", [False, True])
def test_function_that_ends_before_its_device_has_the_phases_of_the_program(device: Device, dead: bool) -> None:
    device.update(forward=50.0, backward=50.0, wait=50.0)
    device.dead = dead
    device.clock.flush()
    seconds = device.sums()
    assert 0 < sum(seconds.values()) < 0.01
    assert all(seconds[phase] >= 0 for phase in seconds)
    assert sum(record.windows for record in device.sent) == 1
    assert sum(record.samples for record in device.sent) == 0  # They have not arrived; their memory may hold anything.


def test_device_that_never_answers_costs_bounded_memory(device: Device) -> None:
    device.compute(1e9)
    for _ in range(10_000):
        device.now += 0.001
        device.clock.mark("forward")
    assert len(device.clock._moments) < 4096 + 300


def test_no_event_is_queued_before_the_process_uses_its_gpu() -> None:
    assert not torch.cuda.is_initialized()
    assert mark_queued_work(timed=True) is None
