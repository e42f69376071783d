"""Messages to the monitor's page: complete, bounded, and JSON whatever the run does."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher import Accelerator, launch
from notebook_launcher.drawing.legend import LIMITS
from notebook_launcher.history.merged_progress import merge_progress, progress_line
from notebook_launcher.history.schema import (
    FailureRecord,
    MetricPoint,
    PhaseSpan,
    RankPhases,
    RankSnapshot,
    RunChange,
    RunPicture,
    RunSetting,
    RunSnapshot,
)
from notebook_launcher.history.synchronization import measure_sync, slowest_rank
from notebook_launcher.widgets.monitor import feeds
from notebook_launcher.widgets.monitor.feed import Feed
from notebook_launcher.widgets.monitor.monitor import interval_after
from notebook_launcher.widgets.monitor.page_records import number

if TYPE_CHECKING:
    from collections.abc import Sequence

SCRIPT = "<script>alert('\"')</script>\x1b[31m"


@dataclasses.dataclass
class Reader:
    """A run that is what the test says."""

    ranks: tuple[RankSnapshot, ...] = (RankSnapshot(rank=0, state="running"),)
    metrics: list[MetricPoint] = dataclasses.field(default_factory=list)
    pictures: list[RunPicture] = dataclasses.field(default_factory=list)
    logs: dict[int, str] = dataclasses.field(default_factory=dict)
    phases: dict[int, RankPhases] = dataclasses.field(default_factory=dict)
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 1.0

    def snapshot(self) -> RunSnapshot:
        fields: dict[str, Any] = {
            "id": "1",
            "name": "train",
            "state": "running",
            "started": 0.0,
            "seconds": self.seconds,
            "summary": "",
            "seed": 0,
            "num_processes": len(self.ranks),
        }
        return RunSnapshot(**{**fields, "ranks": self.ranks, "phases": self.phases, **self.fields})

    def metrics_since(self, position: int) -> tuple[Sequence[MetricPoint], int]:
        return self.metrics[position:], len(self.metrics)

    def pictures_since(self, position: int) -> tuple[Sequence[RunPicture], int]:
        return self.pictures[position:], len(self.pictures)

    def logs_since(self, rank: int, position: int) -> tuple[str, int]:
        text = self.logs.get(rank, "")
        return text[position:], len(text)

    def report(self, step: int, rank: int = 0, /, **values: float) -> None:
        self.metrics.append(MetricPoint(rank=rank, step=step, time=0.0, values=values))


def size(message: Any) -> int:
    return len(json.dumps(message, allow_nan=False))


def points(message: Any) -> int:
    return sum(len(curve["steps"]) for curve in message.get("curves", ()))


def train_steps() -> str:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(gradient_accumulation_steps=4, max_grad_norm=1.0)
    model = torch.nn.Linear(4, 1)
    data = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": loss.item(), "broken": math.nan})
    print("trained")
    return "weights"


@pytest.fixture(scope="module")
def trained() -> Any:
    run = launch(train_steps, 2, output="none")
    run.result(50)
    return run


def test_reset_holds_a_whole_real_run(trained: Any) -> None:
    message = json.loads(json.dumps(Feed(trained).reset(), allow_nan=False))
    assert message["type"] == "reset"
    assert message["run"]["state"] == "done"
    assert message["run"]["is_over"]
    assert message["run"]["progress"]["done"] == message["run"]["progress"]["total"] == 16
    assert message["run"]["effective_batch"] == "2 x 4 x 2 = 16 samples per update"
    assert not any(message["run"]["actions"].values())
    assert [rank["returned"] for rank in message["ranks"]] == ["'weights'", "'weights'"]
    assert [rank["state"] for rank in message["ranks"]] == ["returned", "returned"]
    assert {(curve["name"], curve["rank"]) for curve in message["curves"]} >= {("loss", 0), ("broken", 0)}
    # Whoever logs a loss gets these as well.
    assert {curve["values"][-1] for curve in message["curves"] if curve["name"] == "learning_rate"} == {0.1}
    assert next(curve for curve in message["curves"] if curve["name"] == "grad_norm")["values"][-1] > 0
    assert set(next(curve for curve in message["curves"] if curve["name"] == "broken")["values"]) == {None}
    assert [lane["rank"] for lane in message["lanes"]] == [0, 1]
    assert {phase for lane in message["lanes"] for phase, _, _ in lane["spans"]} >= {"forward", "backward", "step"}
    assert [log["text"] for log in message["logs"]] == ["trained\n", "trained\n"]


def test_saving_by_accumulation_is_measured(trained: Any) -> None:
    phases = trained.phases
    sync = Feed(trained).reset()["run"]["sync"]
    expected = [one.seconds["sync"] / one.counts["sync"] * (one.micro_batches - one.windows) for one in phases.values()]
    assert {(one.micro_batches, one.windows, one.counts["sync"]) for one in phases.values()} == {(16, 4, 4)}
    assert sync["saved_seconds"] == pytest.approx(sum(expected) / 2, rel=0.01)
    assert 0 < sync["share"] < 1
    words = r"[\d.]+ % of the time .* other ranks \([\d.]+ \w+ per wait\)\. Accumulation saved [\d.]+ \w+\."
    assert re.fullmatch(words, sync["text"])


@pytest.mark.parametrize(
    ("windows", "micro_batches", "samples", "fullest", "num_fullest", "text"),
    [
        (1, 4, 256.0, (4, 256.0), 1, "32 x 4 x 2 = 256 samples per update"),
        # 29 batches an epoch: its last window has one of them, and that one is not full.
        (80, 290, 17_970.0, (4, 256.0), 70, "32 x 4 x 2 = 256 samples per update"),
        (1, 3, 148.0, (3, 148.0), 1, "24.7 x 3 x 2 = 148 samples per update"),
        (9, 36, 7_200_000.0, (4, 800_000.0), 9, "100,000 x 4 x 2 = 800,000 samples per update"),
        # Tokens as weights: no two windows are alike.
        (10, 40, 10_240.0, (4, 1900.0), 1, "128 x 4 x 2 = 1,024 samples per update on average"),
        (10, 25, 800.0, (4, 128.0), 4, "16 x 2.5 x 2 = 80 samples per update on average"),
        # Without a prepared loader, nobody counts samples.
        (10, 40, 80.0, (4, 8.0), 10, "4 x 2 = 8 micro-batches per update"),
        (0, 0, 0.0, (0, 0.0), 0, ""),
        (3, 6, math.inf, (2, math.inf), 1, ""),
        (3, 6, 0.0, (2, 0.0), 3, ""),
    ],
)
def test_effective_batch_is_that_of_a_full_window(
    windows: int, micro_batches: int, samples: float, fullest: tuple[int, float], num_fullest: int, text: str
) -> None:
    told = RankPhases(
        windows=windows, micro_batches=micro_batches, samples=samples, fullest=fullest, num_fullest=num_fullest
    )
    reader = Reader(ranks=(RankSnapshot(rank=0), RankSnapshot(rank=1)), phases={0: told})
    assert Feed(reader).reset()["run"]["effective_batch"] == text


def test_missing_measurement_is_named() -> None:
    assert "Not measured" in measure_sync([]).text
    alone = measure_sync([RankPhases(windows=3, micro_batches=6, seconds={"forward": 1.0}, counts={"forward": 6})])
    assert (alone.saved_seconds, alone.mean_seconds, alone.share) == (None, None, 0.0)
    assert "Not measured" in alone.text


def test_share_of_waiting_names_the_time_of_which_it_is_the_share() -> None:
    told = RankPhases(
        windows=2, micro_batches=2, seconds={"forward": 1.0, "sync": 1.0}, counts={"forward": 2, "sync": 2}
    )
    assert measure_sync([told]).text.startswith("50 % of the time in these phases was spent waiting for other ranks")


def test_updates_add_up_to_a_reset() -> None:
    reader = Reader(ranks=(RankSnapshot(rank=0), RankSnapshot(rank=1)))
    feed = Feed(reader)
    curves: dict[tuple[str, int], list[int]] = {}
    logs = {0: "", 1: ""}
    feed.reset()
    for step in range(50):
        reader.report(step, step % 2, loss=float(step))
        if step > 30:
            reader.report(step, late=1.0)
        reader.logs[step % 2] = reader.logs.get(step % 2, "") + f"step {step}\n"
        update = feed.update()
        assert update is not None
        for curve in update["curves"]:
            assert not curve["replace"]
            curves.setdefault((curve["name"], curve["rank"]), []).extend(curve["steps"])
        for log in update["logs"]:
            logs[log["rank"]] += log["text"]
    whole = Feed(reader).reset()
    assert curves == {(curve["name"], curve["rank"]): curve["steps"] for curve in whole["curves"]}
    assert logs == {log["rank"]: log["text"] for log in whole["logs"]}


def test_no_news_is_no_message_but_the_age_once_a_second() -> None:
    reader = Reader()
    feed = Feed(reader)
    feed.reset()
    assert feed.update() is None
    reader.seconds += 0.3
    assert feed.update() is None
    reader.seconds += 0.8
    update = feed.update()
    assert update is not None
    assert update.keys() == {"type", "run"}
    assert update["run"]["seconds"] == pytest.approx(2.1)


def test_memory_is_sent_once_a_second_and_a_state_at_once() -> None:
    reader = Reader(ranks=(RankSnapshot(rank=0, state="running", memory=1),))
    feed = Feed(reader)
    feed.reset()
    reader.ranks = (RankSnapshot(rank=0, state="running", memory=2),)
    assert feed.update() is None
    reader.ranks = (RankSnapshot(rank=0, state="saving", memory=3),)
    update = feed.update()
    assert update is not None
    assert [(rank["state"], rank["memory"]) for rank in update["ranks"]] == [("saving", 3)]


def test_ten_thousand_metrics_a_second_make_small_messages() -> None:
    reader = Reader()
    feed = Feed(reader)
    feed.reset()
    step = 0
    for _ in range(40):
        for _ in range(2500):
            reader.report(step, loss=math.sin(step), spike=1e9 if step == 70_001 else 0.0)
            step += 1
        update = feed.update()
        assert update is not None
        assert points(update) <= 2 * feeds.MAX_SENT
        assert any(curve["replace"] for curve in update["curves"]) or points(update) <= 2 * feeds.NEW_OF_A_CURVE
        assert {curve["steps"][-1] for curve in update["curves"]} == {step - 1}
    reset = feed.reset()
    assert points(reset) <= 2 * feeds.MAX_SENT
    assert max(reset["curves"][1]["values"]) == 1e9
    assert reset["curves"][0]["steps"][-1] == 99_999


def test_page_never_gets_more_points_than_it_keeps() -> None:
    reader = Reader()
    feed = Feed(reader)
    feed.reset()
    kept: list[int] = []
    for step in range(100_000):
        reader.report(step, loss=1.0 / (step + 1))
        if step % 700 == 0:
            update = feed.update()
            assert update is not None
            (curve,) = update["curves"]
            kept = curve["steps"] if curve["replace"] else kept + curve["steps"]
            assert len(kept) <= 2000
    assert (kept[0], kept[-1]) == (0, 99_400)


def test_messages_of_64_ranks_are_bounded() -> None:
    spans = tuple(PhaseSpan(phase="forward", start=at / 1000, seconds=0.001) for at in range(1024))
    reader = Reader(
        ranks=tuple(RankSnapshot(rank=rank, state="running", last_line="x" * 10_000) for rank in range(64)),
        logs=dict.fromkeys(range(64), ("y" * 99 + "\n") * 20000),
        phases={
            rank: RankPhases(windows=9, micro_batches=9, seconds={"forward": 1.0}, spans=spans) for rank in range(64)
        },
    )
    for step in range(300):
        for rank in range(64):
            reader.report(step, rank, **{f"metric {name}": 0.123456789 for name in range(10)})
    feed = Feed(reader)
    assert size(feed.reset()) < 10_000_000
    for step in range(300, 400):
        for rank in range(64):
            reader.report(step, rank, **{f"metric {name}": 0.123456789 for name in range(10)})
    for rank in range(64):
        reader.logs[rank] += ("z" * 99 + "\n") * 1000
    update = feed.update()
    assert update is not None
    assert size(update) < 1_000_000
    assert all(log["text"].endswith("z\n") for log in update["logs"])


@pytest.mark.parametrize(("seconds", "expected"), [(0.001, 0.25), (0.06, 0.6), (5.0, 1.0)])
def test_messages_that_cost_much_are_fewer(seconds: float, expected: float) -> None:
    assert interval_after(seconds) == pytest.approx(expected)


def test_curves_beyond_the_limit_are_left_out() -> None:
    reader = Reader()
    for name in range(3000):
        reader.report(0, **{str(name): 1.0})
    feed = Feed(reader)
    assert len(feed.reset()["curves"]) == 1024
    reader.report(1, **{"2999": 1.0, "0": 2.0})
    update = feed.update()
    assert update is not None
    assert [curve["name"] for curve in update["curves"]] == ["0"]


def test_numbers_that_are_not_finite_are_null() -> None:
    ranks = (RankSnapshot(rank=0, rate=math.inf, metrics={"loss": math.nan, "x": -math.inf}),)
    reader = Reader(ranks=ranks)
    reader.report(0, loss=math.nan, x=math.inf, ok=1.5)
    message = json.loads(json.dumps(Feed(reader).reset(), allow_nan=False))
    assert [curve["values"] for curve in message["curves"]] == [[None], [None], [1.5]]
    assert message["ranks"][0]["metrics"] == {"loss": None, "x": None}
    assert message["ranks"][0]["rate"] is None


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-320, 1.7976931348623157e308, -123456.789, 5e-324])
def test_rounding_stays_near_and_finite(value: float) -> None:
    assert number(value) == pytest.approx(value, rel=1e-5, abs=1e-322)
    rounded = number(value, 1)
    assert rounded is not None
    assert math.isfinite(rounded)


def test_names_and_texts_of_users_are_sent_unchanged() -> None:
    failure = FailureRecord(rank=0, summary=SCRIPT, traceback=SCRIPT * 10_000, last_lines=(SCRIPT,))
    rank = RankSnapshot(rank=0, last_line=SCRIPT, metrics={SCRIPT: 1.0})
    reader = Reader(ranks=(rank,), logs={0: SCRIPT + "\n"}, fields={"failures": (failure,), "name": SCRIPT})
    reader.report(0, **{SCRIPT: 1.0})
    message = json.loads(json.dumps(Feed(reader).reset(), allow_nan=False))
    assert message["curves"][0]["name"] == message["run"]["name"] == message["errors"][0]["summary"] == SCRIPT
    assert message["logs"][0]["text"] == SCRIPT + "\n"
    assert len(message["errors"][0]["traceback"]) < 21_000


def test_page_gets_the_end_of_a_long_log_in_whole_lines() -> None:
    reader = Reader(logs={0: "".join(f"line {at}\n" for at in range(100_000))})
    feed = Feed(reader)
    (log,) = feed.reset()["logs"]
    lines = log["text"].splitlines()
    assert lines[-1] == "line 99999"
    assert lines[0] == f"line {100_000 - len(lines)}"
    assert 1000 < len(lines) <= LIMITS.lines
    reader.logs[0] += "new\n" * 100_000 + "last\n"
    update = feed.update()
    assert update is not None
    (log,) = update["logs"]
    assert "B not shown; run.logs(0) has everything" in log["text"][:100]
    assert log["text"].endswith("new\nlast\n")
    assert len(log["text"]) < feeds.NEW_BYTES + 200


def test_spans_are_sent_once_and_newest_first_when_there_are_too_many() -> None:
    def lane(first: int, last: int) -> dict[int, RankPhases]:
        spans = tuple(PhaseSpan(phase="data", start=float(at), seconds=0.5) for at in range(first, last))
        return {0: RankPhases(seconds={"data": 1.0}, spans=spans)}

    reader = Reader(phases=lane(0, 10))
    feed = Feed(reader)
    assert [span[1] for span in feed.reset()["lanes"][0]["spans"]] == list(range(10))
    reader.phases = lane(5, 12)
    update = feed.update()
    assert update is not None
    assert update["lanes"] == [{"rank": 0, "spans": [["data", 10.0, 0.5], ["data", 11.0, 0.5]]}]
    update = feed.update()
    assert update is None


def test_notices_are_in_the_next_message_and_in_every_reset() -> None:
    feed = Feed(Reader())
    feed.reset()
    feed.notice("saved")
    update = feed.update()
    assert update is not None
    assert update["notices"] == ["saved"]
    assert feed.update() is None
    for count in range(100):
        feed.notice(str(count))
    assert feed.reset()["notices"][-1] == "99"
    assert len(feed.reset()["notices"]) <= 20


def test_buttons_are_enabled_while_the_run_can_act() -> None:
    reader = Reader(phases={0: RankPhases(windows=1, micro_batches=1, samples=1.0, seconds={"step": 1.0})})
    assert not any(Feed(reader).reset()["run"]["actions"].values())
    record = Feed(reader, can_act=True).reset()["run"]
    without = {"stop", "interrupt", "stacks", "save", "sample"}
    assert {name for name, is_on in record["actions"].items() if is_on} == without
    assert record["change_hint"] == "Needs an Accelerator that has made an update"
    reader.fields["settings"] = (RunSetting(name="lr", value=0.1, kind="positive"),)
    record = Feed(reader, can_act=True).reset()["run"]
    assert [name for name, is_on in record["actions"].items() if not is_on] == ["resume"]
    assert record["change_hint"] == ""
    reader.fields["state"] = "paused"
    record = Feed(reader, can_act=True).reset()["run"]
    assert [name for name, is_on in record["actions"].items() if not is_on] == ["pause", "sample", "profile"]
    reader.fields["state"] = "stopping"
    actions = Feed(reader, can_act=True).reset()["run"]["actions"]
    assert (actions["stop"], actions["interrupt"], actions["save"]) == (False, True, False)
    reader.fields["state"] = "done"
    assert not any(Feed(reader, can_act=True).reset()["run"]["actions"].values())


def test_settings_are_sent_when_they_change_and_each_change_once() -> None:
    reader = Reader()
    reader.fields["settings"] = (
        RunSetting(name="lr", value=0.1, kind="positive"),
        RunSetting(name="max_grad_norm", value=None, kind="optional"),
        RunSetting(name="enough", value=False, kind="switch"),
    )
    feed = Feed(reader, can_act=True)
    message = feed.reset()
    assert [(one["name"], one["text"], one["kind"]) for one in message["settings"]] == [
        ("lr", "0.1", "positive"), ("max_grad_norm", "none", "optional"), ("enough", "off", "switch"),
    ]  # fmt: skip
    assert message["changes"] == message["answers"] == message["findings"] == []
    assert feed.update() is None
    reader.fields["settings"] = (RunSetting(name="lr", value=0.05, kind="positive"),)
    change = RunChange(name="lr", before=0.1, after=0.05, update=7, step=6, time=2.5, source="monitor")
    reader.fields["changes"] = (change,)
    feed.answer("lr", "no")
    update = feed.update()
    assert update is not None
    assert [one["text"] for one in update["settings"]] == ["0.05"]
    assert update["changes"] == [
        {"name": "lr", "before": "0.1", "after": "0.05", "update": 7, "step": 6, "seconds": 2.5, "source": "monitor"}
    ]
    assert update["answers"] == [{"name": "lr", "problem": "no"}]
    assert feed.update() is None
    found = {"kind": "sample", "drawing": "", "tables": [], "problem": "gone"}
    feed.finding(found)
    assert feed.update() == {"type": "update", "findings": [found]}
    assert feed.update() is None
    message = feed.reset()
    assert (len(message["changes"]), message["findings"]) == (1, [found])


def test_ranks_that_the_user_stopped_are_not_errors() -> None:
    failures = (FailureRecord(rank=0, summary="stopped"), FailureRecord(rank=1, summary="ValueError: boom"))
    ranks = (RankSnapshot(rank=0, state="stopped"), RankSnapshot(rank=1, state="failed"))
    reader = Reader(ranks=ranks, fields={"failures": failures})
    assert [error["rank"] for error in Feed(reader).reset()["errors"]] == [1]


def test_later_error_is_sent_once() -> None:
    reader = Reader()
    feed = Feed(reader)
    feed.reset()
    reader.fields["failures"] = (FailureRecord(rank=0, summary="ValueError: boom", victim=True),)
    update = feed.update()
    assert update is not None
    assert [(error["summary"], error["victim"]) for error in update["errors"]] == [("ValueError: boom", True)]
    assert feed.update() is None


def test_progress_is_that_of_the_rank_furthest_behind() -> None:
    ranks = [
        RankSnapshot(rank=0, done=30, total=100, rate=10.0),
        RankSnapshot(rank=1, done=20, total=100, rate=8.0, description="epoch 1", metrics={"loss": 0.31, "lr": 1e-3}),
        RankSnapshot(rank=2),
    ]
    merged = merge_progress(ranks)
    assert merged is not None
    assert (merged.rank, merged.share, merged.seconds_left) == (1, 0.2, 10.0)
    line = "train: epoch 1, 20 % 20/100, 8 it/s, 10 s left in this epoch, loss 0.31, lr 0.001"
    assert progress_line("train", ranks) == line


def test_rank_that_has_begun_the_next_epoch_is_not_behind() -> None:
    ranks = (
        RankSnapshot(rank=0, done=1, total=8, rate=9.0, description="epoch 10"),
        RankSnapshot(rank=1, done=7, total=8, rate=8.0, description="epoch 9"),
    )
    merged = merge_progress(ranks)
    assert merged is not None
    assert (merged.rank, merged.rate) == (1, 8.0)
    assert slowest_rank(Reader(ranks=ranks).snapshot()) is None


def test_page_and_line_of_a_loop_that_is_done_have_the_same_pace_and_no_time_left() -> None:
    rank = RankSnapshot(rank=0, done=4, total=4, rate=20.0, description="epoch 7")
    progress = Feed(Reader(ranks=(rank,))).reset()["run"]["progress"]
    assert (progress["rate"], progress["seconds_left"]) == (20.0, None)
    assert progress_line("f", [rank]) == "f: epoch 7, 100 % 4/4, 20 it/s"


@pytest.mark.parametrize(
    ("rank", "line"),
    [
        (RankSnapshot(rank=0), ""),
        (RankSnapshot(rank=0, done=1234, rate=2000.0), "f: 1,234, 2,000 it/s"),
        (RankSnapshot(rank=0, step=1234, metrics={"loss": math.nan}), "f: step 1,234, loss NaN"),
        (RankSnapshot(rank=0, done=1, total=7200, rate=1.0), "f: <0.1 % 1/7,200, 1 it/s, 2 h 00 min left"),
        (RankSnapshot(rank=0, done=10, total=100, rate=0.5), "f: 10 % 10/100, 2 s/it, 3 min 00 s left"),
        (RankSnapshot(rank=0, done=2, total=2, rate=1.0), "f: 100 % 2/2, 1 it/s"),
        (RankSnapshot(rank=0, done=0, total=0), "f: 0"),
        (RankSnapshot(rank=0, done=3, total=4, description="long " * 9), "f: long long long long lon…, 75 % 3/4"),
        (RankSnapshot(rank=0, step=1, metrics={"a\r\nb\x1b": 1.0}), "f: step 1, a  b  1"),
    ],
)
def test_progress_line_shows_share_rate_and_metrics(rank: RankSnapshot, line: str) -> None:
    assert progress_line("f", [rank]) == line


def test_progress_line_without_a_counted_loop_has_the_pace_and_the_ranks_that_differ() -> None:
    running = RankSnapshot(rank=0, state="running", step=1200, samples_per_second=298.4, metrics={"loss": 0.31})
    others = [
        RankSnapshot(rank=1, state="waiting", step=1200, waited=12.0),
        RankSnapshot(rank=2, state="returned", step=1200),
        RankSnapshot(rank=3, state="failed", step=3),
    ]
    line = "train: step 1,200, 298 samples/s, loss 0.31"
    assert progress_line("train", [running]) == line
    words = "1 of 4 ranks done, 1 of 4 ranks failed, 1 of 4 ranks waiting"
    assert progress_line("train", [running, *others]) == f"{line}, {words}"


def test_slowest_rank_is_behind_or_waits_least() -> None:
    def run(*ranks: RankSnapshot, **waits: float) -> int | None:
        phases = {
            int(name[1:]): RankPhases(seconds={"sync": share, "forward": 1.0 - share}, counts={"sync": 5})
            for name, share in waits.items()
        }
        return slowest_rank(Reader(ranks=ranks, phases=phases).snapshot())

    ahead, behind = RankSnapshot(rank=0, done=50), RankSnapshot(rank=1, done=40)
    assert run(ahead, behind) == 1
    assert run(ahead, RankSnapshot(rank=1, done=49)) is None
    assert run(r0=0.5, r1=0.1) == 1
    assert run(r0=0.11, r1=0.1) is None
    assert run() is None


def test_seconds_of_a_wait_are_sent_once_a_second() -> None:
    reader = Reader()
    feed = Feed(reader)
    feed.reset()

    def waits(words: str, at: float) -> Any:
        reader.fields, reader.seconds = {"state": "waiting", "waiting": words}, at
        return feed.update()

    run = waits("rank 0 has waited 10 s in barrier", 1.25)["run"]
    assert (run["state"], run["waiting"]) == ("waiting", "rank 0 has waited 10 s in barrier")
    assert waits("rank 0 has waited 11 s in barrier", 1.5) is None
    assert waits("rank 0 has waited 11 s in barrier", 2.25)["run"]["waiting"] == "rank 0 has waited 11 s in barrier"
    assert waits("", 2.5)["run"]["waiting"] == ""


def test_update_before_a_reset_holds_the_run() -> None:
    message = Feed(Reader()).update()
    assert message is not None
    assert message["run"]["state"] == Reader().snapshot().state
