"""Messages to the monitor's page are bounded, and are JSON whatever the run reports."""

from __future__ import annotations

import json
import math

import pytest

from notebook_launcher.drawing.legend import LIMITS
from notebook_launcher.history.curves import MAX_POINTS
from notebook_launcher.history.schema import PhaseSpan, RankPhases, RankSnapshot
from notebook_launcher.widgets.monitor.feed import NEW_BYTES, Feed
from notebook_launcher.widgets.monitor.plot_feed import NEW_POINTS, json_number
from tests.support.made_up_run import Drawn, Reader, news, points


def test_ten_thousand_metrics_a_second_make_small_messages() -> None:
    reader = Reader()
    feed = Feed(reader)
    drawn = Drawn(feed.reset())
    step = 0
    for _ in range(40):
        for _ in range(2500):
            reader.report(step, loss=math.sin(step), spike=1e9 if step == 70_001 else 0.0)
            step += 1
        update = news(feed)
        drawn.add(update)
        assert points(update) <= NEW_POINTS + MAX_POINTS
        assert {places[-1] for places, _ in drawn.lines.values()} == {step - 1}
    for lines in (drawn.lines, Drawn(feed.reset()).lines):
        assert max(lines["spike", "rank 0"][1]) == 1e9  # type: ignore[type-var]
        assert lines["loss", "rank 0"][0][-1] == 99_999


def test_of_a_long_curve_only_news_are_sent() -> None:
    reader = Reader()
    feed = Feed(reader)
    feed.reset()
    drawn, sent = Drawn(), 0
    for step in range(100_000):
        reader.report(step, loss=1.0 / (step + 1))
        if step % 700 == 0:
            update = news(feed)
            drawn.add(update)
            sent += points(update)
            assert len(drawn.lines["loss", "rank 0"][0]) <= MAX_POINTS + 4
    places, _ = drawn.lines["loss", "rank 0"]
    assert (places[0], places[-1]) == (0, 99_400)
    assert sent < 20 * MAX_POINTS  # Of 143 messages, few had all points.


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
    assert len(json.dumps(feed.reset())) < 10_000_000
    for step in range(300, 400):
        for rank in range(64):
            reader.report(step, rank, **{f"metric {name}": 0.123456789 for name in range(10)})
    for rank in range(64):
        reader.logs[rank] += ("z" * 99 + "\n") * 1000
    update = news(feed)
    assert len(json.dumps(update)) < 1_000_000
    assert all(log["text"].endswith("z\n") for log in update["logs"])


def test_curves_beyond_the_limit_are_left_out() -> None:
    reader = Reader()
    for name in range(3000):
        reader.report(0, **{str(name): 1.0})
    feed = Feed(reader)
    assert len(feed.reset()["plots"]) == 1024
    reader.report(1, **{"2999": 1.0, "0": 2.0})
    assert [plot["title"] for plot in news(feed)["plots"]] == ["0"]


def test_numbers_that_are_not_finite_are_null() -> None:
    ranks = (RankSnapshot(rank=0, rate=math.inf, metrics={"loss": math.nan, "x": -math.inf}),)
    reader = Reader(ranks=ranks)
    reader.report(0, loss=math.nan, x=math.inf, ok=1.5)
    message = json.loads(json.dumps(Feed(reader).reset(), allow_nan=False))
    assert [plot["lines"][0]["y"] for plot in message["plots"]] == [[None], [None], [1.5]]


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-320, 1.7976931348623157e308, -123456.789, 5e-324])
def test_rounding_stays_near_and_finite(value: float) -> None:
    assert json_number(value) == pytest.approx(value, rel=1e-5, abs=1e-322)
    assert math.isfinite(json_number(value) or 0.0)


def test_page_gets_the_end_of_a_long_log_in_whole_lines() -> None:
    reader = Reader(logs={0: "".join(f"line {at}\n" for at in range(100_000))})
    feed = Feed(reader)
    (log,) = feed.reset()["logs"]
    lines = log["text"].splitlines()
    assert lines[-1] == "line 99999"
    assert lines[0] == f"line {100_000 - len(lines)}"
    assert 1000 < len(lines) <= LIMITS.lines
    reader.logs[0] += "new\n" * 100_000 + "last\n"
    (log,) = news(feed)["logs"]
    assert "B not shown; run.logs(0) has everything" in log["text"][:100]
    assert log["text"].endswith("new\nlast\n")
    assert len(log["text"]) < NEW_BYTES + 200


def test_spans_are_sent_once_and_newest_first_when_there_are_too_many() -> None:
    def lane(first: int, last: int) -> dict[int, RankPhases]:
        spans = tuple(PhaseSpan(phase="data", start=float(at), seconds=0.5) for at in range(first, last))
        return {0: RankPhases(seconds={"data": 1.0}, spans=spans)}

    reader = Reader(phases=lane(0, 10))
    feed = Feed(reader)
    assert [span[1] for span in feed.reset()["lanes"][0]["spans"]] == list(range(10))
    reader.phases = lane(5, 12)
    assert news(feed)["lanes"] == [{"rank": 0, "spans": [["data", 10.0, 0.5], ["data", 11.0, 0.5]]}]
    assert feed.update() is None
