"""Phases of a rank whose device lags behind its program."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from notebook_launcher import Accelerator
from notebook_launcher.training.recording import phases
from notebook_launcher.training.recording.device_phases import DevicePhaseClock, record_cuda_event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REDUCTION = 0.06
"""Seconds that a reduction takes on the device."""
UPDATES = 5


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
    assert seconds["forward"] == pytest.approx(20 * 0.25, rel=0.02)
    assert seconds["backward"] == pytest.approx(20 * 0.5, rel=0.02)
    assert seconds["sync"] == pytest.approx(20 * 0.125, rel=0.02)
    assert seconds["step"] == pytest.approx(20 * 2**-10, rel=0.02)
    assert seconds["data"] < 0.01
    assert sum(record.counts["sync"] for record in device.sent) == 20
    assert sum(record.windows for record in device.sent) == 20
    assert sum(record.samples for record in device.sent) == 160.0
    spans = [span for record in device.sent for span in record.spans]
    ends = [start + duration for _, start, duration in spans]
    assert all(later[1] >= end - 1e-9 for end, later in zip(ends, spans[1:], strict=False))
    assert max(ends) == pytest.approx(device.done)


def test_backward_that_reduces_nothing_lasts_as_long_as_the_device_takes(device: Device) -> None:
    for _ in range(10):
        device.clock.note((None, device.now))
        device.clock.note(("data", device.now))
        device.compute(0.25, 2**-10)
        device.clock.note(("forward", device.now))
        assert not device.clock.attend(device.now, syncs=False)
        device.compute(0.5, 2**-10)
        device.clock.note(("backward", device.now))
    device.now = device.done
    device.clock.flush()
    seconds = device.sums()
    assert seconds["forward"] == pytest.approx(2.5, rel=0.02)
    assert seconds["backward"] == pytest.approx(5.0, rel=0.02)
    assert (seconds["sync"], seconds["step"]) == (0.0, 0.0)
    assert seconds["data"] < 0.05


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


def test_device_is_asked_nothing_while_a_graph_is_captured(device: Device) -> None:
    device.update(forward=0.5, backward=0.5, wait=0.5)
    device.now = device.done
    device.is_capturing = True
    for _ in range(3):
        device.now += 1.0
        device.clock.mark("forward")
    assert not device.sent
    device.is_capturing = False
    device.now += 1.0
    device.clock.mark("forward")
    assert device.sums()["backward"] == pytest.approx(0.5, rel=0.02)
    assert sum(record.windows for record in device.sent) == 1


def test_process_without_a_gpu_in_use_has_the_phases_of_its_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(phases, "read_clock", lambda: now[0])
    sent: list[Any] = []
    clock = DevicePhaseClock(sent.append, lambda: None)
    clock.mark(None)
    now[0] += 1.0
    clock.mark("forward")
    assert sum(record.seconds["forward"] for record in sent) == pytest.approx(1.0)


def test_window_counts_once_the_device_is_done_with_it(device: Device) -> None:
    device.weight = 8.0
    device.update(forward=1.0, backward=1.0, wait=0.0)
    device.clock._report(device.now)
    assert sum(record.windows for record in device.sent) == 0
    device.now = device.done
    device.clock._report(device.now)
    assert [(record.windows, record.samples) for record in device.sent][-1] == (1, 8.0)
    device.clock.note_window((1, 8.0))  # No mark waits for the device.
    device.clock.flush()
    assert device.sent[-1].windows == 1


def test_weight_that_cannot_be_counts_as_nothing(device: Device) -> None:
    device.clock.note_window((2, torch.tensor(float("nan"))))
    device.now += 1.0
    device.clock.flush()
    assert [(record.windows, record.samples) for record in device.sent] == [(1, 0.0)]


def test_device_that_never_answers_costs_bounded_memory(device: Device) -> None:
    device.compute(1e9)
    for _ in range(10_000):
        device.now += 0.001
        device.clock.mark("forward")
    assert len(device.clock._moments) < 4096 + 300


def test_no_event_is_queued_before_the_process_uses_its_gpu() -> None:
    assert not torch.cuda.is_initialized()
    assert record_cuda_event() is None


class Stream(threading.Thread):
    """A device of real time, which does what is queued in a thread."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.queued: queue.Queue[Callable[[], Any] | None] = queue.Queue()
        self.start()

    def run(self) -> None:
        while (work := self.queued.get()) is not None:
            work()

    def record(self) -> StreamMoment:
        moment = StreamMoment()
        self.queued.put(moment.passed.set_result_of_now)
        return moment


class Passed(Future[float]):
    """The time at which a moment was passed."""

    def set_result_of_now(self) -> None:
        self.set_result(time.monotonic())


class StreamMoment:
    """A moment of a stream, by the protocol of CUDA's events."""

    def __init__(self) -> None:
        self.passed = Passed()

    def query(self) -> bool:
        return self.passed.done()

    def elapsed_time(self, end: StreamMoment) -> float:
        return (end.passed.result(0) - self.passed.result(0)) * 1000


class LateWork(dist.Work):
    """Work that is done later than its `wait()` says, as NCCL's: that holds up the stream and not the program."""

    def __init__(self, result: Any, wait: Callable[[], object] = bool) -> None:
        super().__init__()
        self._wait = wait
        self._future: Any = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        self._wait()
        return True

    def get_future(self) -> Any:
        return self._future


class LateGroup(dist.ProcessGroup):
    """A group of two equal ranks, whose reductions take a while, on a stream of their own."""

    def __init__(self, stream: Stream, network: Stream) -> None:
        super().__init__(0, 2)  # type: ignore[call-arg]
        self.stream, self.network = stream, network
        self.may_reduce = threading.Event()

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "late"

    def allreduce(self, tensors: Any, _options: Any = None) -> Any:  # type: ignore[override]
        self.network.queued.put(self._reduce)
        done = self.network.record().passed
        return LateWork(tensors, lambda: self.stream.queued.put(done.result))

    def _reduce(self) -> None:
        assert self.may_reduce.wait(60)
        time.sleep(REDUCTION)

    def allgather(self, outputs: Any, inputs: Any, _options: Any = None) -> Any:
        for gathered, one in zip(outputs, inputs, strict=True):
            for output in gathered:
                output.copy_(one)
        return LateWork(outputs)

    def broadcast(self, tensors: Any, _options: Any = None) -> Any:  # type: ignore[override]
        return LateWork(tensors)

    def barrier(self, _options: Any = None) -> Any:
        return LateWork([])


@pytest.fixture
def late_group() -> Iterator[LateGroup]:
    """The process group of two ranks over a stream."""
    stream, network = Stream(), Stream()
    group = LateGroup(stream, network)
    dist.Backend.register_backend("late", lambda *_: group, devices=["cpu"])
    dist.init_process_group("late", rank=0, world_size=2, store=dist.HashStore())
    yield group
    dist.destroy_process_group()
    for thread in (stream, network):
        thread.queued.put(None)
        thread.join()


def test_reduction_that_ends_after_the_backward_counts_as_a_wait(late_group: LateGroup) -> None:
    """The order of the real calls: autograd has computed, then the stream waits, then the backward returns.

    Of a leaf tensor: DDP takes the future of its work from C++, which no work that is written in Python can delay.
    """
    accelerator = Accelerator(cpu=True, check_ranks=False)
    leaf: Any = accelerator.prepare(torch.zeros(4, requires_grad=True))
    sent: list[Any] = []
    clock = accelerator._micro_batches._clock = DevicePhaseClock(sent.append, late_group.stream.record)
    for _ in range(UPDATES):
        clock.mark("data")
        accelerator.backward(leaf.sum())
    late_group.may_reduce.set()  # Here the program is at its end, and its device before the first reduction.
    late_group.stream.record().passed.result(20)
    clock.flush()
    seconds = {phase: sum(record.seconds[phase] for record in sent) for phase in phases.PHASES}
    assert seconds["sync"] > 0.9 * UPDATES * REDUCTION
    assert seconds["sync"] > seconds["backward"] + seconds["forward"]
