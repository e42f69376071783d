"""Phases of a rank's time: records of the rank, and their sums in the run."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import Accelerator, launch, report, track
from notebook_launcher.history.summaries import share_done
from notebook_launcher.kernel.run.live_values import LiveValues
from notebook_launcher.training.recording import phases
from notebook_launcher.training.recording.phases import PHASES, PhaseClock, make_clock
from tests.support.toy_training import micro_batch

if TYPE_CHECKING:
    from tests.support.toy_training import Sessions


class Line:
    """A clock whose time is set by hand, and what it sends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.sent: list[Any] = []
        monkeypatch.setattr(phases, "read_clock", lambda: self.now)
        self.clock = PhaseClock(self.sent.append)
        self.clock.mark(None)

    def spend(self, **seconds: float) -> None:
        for phase, duration in seconds.items():
            self.now += duration
            self.clock.mark(phase)  # type: ignore[arg-type] # a keyword is any string

    def sums(self) -> Any:
        """Return the seconds and the counts of each phase in what was sent."""
        return [{phase: sum(getattr(record, what)[phase] for record in self.sent) for phase in PHASES}
                for what in ("seconds", "counts")]  # fmt: skip


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    return Line(monkeypatch)


def test_spans_follow_each_other(line: Line) -> None:
    line.spend(data=0.25, forward=0.5)
    line.now += 8  # Nobody's.
    line.clock.mark(None)
    line.spend(step=0.125)
    line.now += 4  # Nobody's either.
    line.clock.mark(None)
    line.clock.note_window((2, 32.0))
    line.spend(sync=1.0)
    line.clock.flush()
    seconds, counts = line.sums()
    assert seconds == {"data": 0.25, "forward": 0.5, "backward": 0.0, "sync": 1.0, "step": 0.125}
    assert counts == {"data": 1, "forward": 1, "backward": 0, "sync": 1, "step": 1}
    assert [span for record in line.sent for span in record.spans] == [
        ("data", 100.0, 0.25),
        ("forward", 100.25, 0.5),
        ("step", 108.75, 0.125),
        ("sync", 112.875, 1.0),
    ]
    assert sum(record.windows for record in line.sent) == 1
    assert sum(record.micro_batches for record in line.sent) == 2
    assert sum(record.samples for record in line.sent) == 32.0


def test_records_are_few_and_bounded_and_lose_nothing_of_the_sums(line: Line) -> None:
    for _ in range(1000):
        line.spend(forward=2**-10, backward=2**-10)
        line.clock.note_window((1, 1.0))
    assert len(line.sent) == 9  # 1.95 s
    line.clock.flush()
    assert max(len(record.spans) for record in line.sent) == 64
    assert sum(record.seconds["forward"] for record in line.sent) == 1000 * 2**-10
    assert sum(record.counts["backward"] for record in line.sent) == 1000
    assert sum(record.windows for record in line.sent) == 1000
    newest = line.sent[-1].spans[-1]
    assert newest == ("backward", line.now - 2**-10, 2**-10)
    starts = [start for record in line.sent for _, start, _ in record.spans]
    assert starts == sorted(set(starts))


def begin_backward(line: Line, *, syncs: bool) -> bool:
    line.clock.note(("forward", line.now))
    return line.clock.attend(line.now, syncs=syncs)


def synced_backward(line: Line, *, computing: float, waiting: float) -> bool:
    """Spend a backward that waits for the ranks; return whether it was watched."""
    watched = begin_backward(line, syncs=True)
    line.now += computing
    if watched:
        line.clock.mark_computed()
    line.now += waiting
    if watched:
        line.clock.end_watched()
    line.clock.note(("synced backward", line.now))
    return watched


def test_wait_for_the_ranks_is_measured_now_and_then_and_taken_to_be_the_same_between(line: Line) -> None:
    assert synced_backward(line, computing=0.03, waiting=0.01)
    assert not synced_backward(line, computing=0.05, waiting=0.03)
    line.now += 0.1
    assert synced_backward(line, computing=0.02, waiting=0.02)
    assert not begin_backward(line, syncs=False)
    line.now += 0.5
    line.clock.note(("backward", line.now))
    line.clock.flush()
    seconds, counts = line.sums()
    assert seconds["sync"] == pytest.approx(0.01 + 0.02 + 0.02)
    assert seconds["backward"] == pytest.approx(0.03 + 0.06 + 0.02 + 0.5)
    assert (counts["backward"], counts["sync"]) == (4, 3)


def test_fullest_windows_are_counted(line: Line) -> None:
    live = LiveValues(launched=0.0)
    for micro_batches, samples in [(3, 192.0), (4, 256.0), (4, 240.0), (4, 256.0), (1, 999.0)]:
        line.clock.note_window((micro_batches, samples))
        line.clock.flush()  # Each in a record of its own,
    for _ in range(2):
        line.clock.note_window((4, 256.0))
    line.clock.flush()  # or several in one.
    for record in line.sent:
        live.fold(0, record)
    assert (live.phases[0].fullest, live.phases[0].num_fullest, live.phases[0].windows) == ((4, 256.0), 4, 7)


def train(num_windows: int) -> None:
    clock = make_clock()
    assert clock is not None
    assert clock is make_clock()
    for _ in range(num_windows):
        clock.mark("data")  # At first it only begins to measure.
        time.sleep(0.002 * (1 + int(os.environ["RANK"])))
        clock.mark("forward")
        clock.mark("backward")
        clock.mark("step")
        clock.note_window((2, 4.0))
    clock.mark("data")


def test_run_knows_each_ranks_phases(ranks: Sessions) -> None:
    for num_windows in (3, 20):  # The second run knows nothing of the first.
        run = ranks[2].launch(train, args=(num_windows,))
        run.result()
        assert sorted(run.phases) == [0, 1]
        for rank, known in run.phases.items():
            assert known.counts == {**dict.fromkeys(PHASES, num_windows), "sync": 0}
            assert (known.windows, known.micro_batches) == (num_windows, 2 * num_windows)
            assert known.samples == 4.0 * num_windows
            assert known.seconds["forward"] > 0.002 * (1 + rank) * num_windows
            assert known.shares["forward"] > 0.5
            assert all(span.start > 0 for span in known.spans)


def test_reported_number_of_steps_tells_what_part_of_the_run_is_done() -> None:
    def loop_of_known_length() -> None:
        for step in range(40):
            for _ in track(range(3), description="inside"):
                pass
            metrics: dict[str, Any] = {} if step else {"loss": 1.0}
            report(**metrics, total_steps=80)

    run = launch(loop_of_known_length, 1, output="none")
    run.result()
    (rank,) = run.ranks
    assert (rank.total, rank.description) == (80, "whole run")
    assert 0 < (share_done(run.snapshot()) or 0) <= 0.5


def test_prepared_loader_reports_its_progress(ranks: Sessions) -> None:
    def train() -> None:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.ones(12, 1)), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for (inputs,) in loader:
            with micro_batch(accelerator, optimizer, model) as backward:
                backward(model(inputs).mean())

    run = ranks[2].launch(train)
    run.result()
    assert [(rank.done, rank.total) for rank in run.ranks] == [(3, 3), (3, 3)]
    for told in run.phases.values():
        assert (told.windows, told.micro_batches, told.samples) == (2, 3, 12)
        assert told.counts == {"data": 3, "forward": 3, "backward": 3, "sync": 2, "step": 2}


@pytest.mark.parametrize(("around", "num_syncs"), [("backward", 4), ("both", 2)])
def test_loop_without_windows_counts_the_backwards_that_waited_for_the_ranks(
    ranks: Sessions, around: str, num_syncs: int
) -> None:
    def train() -> None:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        for _ in range(2):
            for alone in (True, False):
                no_sync = accelerator.no_sync if alone else lambda _: contextlib.nullcontext()
                with no_sync(model) if around == "both" else contextlib.nullcontext():
                    loss = model(torch.ones(2, 1)).mean()
                    with no_sync(model) if around == "backward" else contextlib.nullcontext():
                        accelerator.backward(loss)

    run = ranks[2].launch(train)
    run.result()
    for told in run.phases.values():
        assert told.counts["sync"] == num_syncs
