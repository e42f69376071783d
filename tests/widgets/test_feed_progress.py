"""Progress, pace and waiting of a run, as the monitor's page and the line of progress show them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from notebook_launcher.history.schema import RankPhases, RankSnapshot, RunSetting
from notebook_launcher.history.summaries import measure_sync, merge_progress, progress_line, share_done, slowest_rank
from notebook_launcher.widgets.monitor.feed import Feed
from tests.support.made_up_run import Reader


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
    assert alone.text == ""
    both = [RankPhases(windows=3, micro_batches=6, seconds={"forward": 1.0}, counts={"forward": 6})] * 2
    assert "Not measured" in measure_sync(both).text


def test_share_of_waiting_names_the_time_of_which_it_is_the_share() -> None:
    told = RankPhases(
        windows=2, micro_batches=2, seconds={"forward": 1.0, "sync": 1.0}, counts={"forward": 2, "sync": 2}
    )
    assert measure_sync([told]).text.startswith("50 % of the time of the steps was spent waiting for other ranks")


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
    assert (progress["text"], progress["pace"]) == ("epoch 7 · 4 of 4 (100 %)", "20 it/s")
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
        (RankSnapshot(rank=0, step=1, metrics={"a\r\nb\x1b": 1.0}), "f: step 1, a b\ufffd 1"),
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


@pytest.mark.parametrize(
    ("rank", "fields", "share"),
    [
        ({"done": 10, "total": 40, "description": "epoch 1"}, {"arguments": {"lr": "0.1", "epochs": "4"}}, 0.3125),
        ({"done": 10, "total": 40, "description": "epoch 1"}, {"arguments": {"config": "{'num_epochs': 2}"}}, 0.625),
        (
            {"done": 10, "total": 40, "description": "epoch 1"},
            {"settings": (RunSetting(name="epochs", kind="integer", value=2),)},
            0.625,
        ),
        ({"done": 10, "total": 40, "description": "epoch 1"}, {"arguments": {"lr": "0.1"}}, None),
        ({"done": 10, "total": 40, "description": "epoch 1"}, {"arguments": {"epochs": "2", "max_epochs": "4"}}, None),
        ({"done": 10, "total": 40, "description": "whole run"}, {}, 0.25),  # transformers' Trainer
        ({"done": 10, "total": 40, "description": "validate"}, {}, None),
        ({"done": 1, "total": 4}, {"arguments": {"epochs": "4"}}, 0.25),
        ({"last_line": "50%|█████     | 5/10 [00:05<00:05,  1.00it/s]"}, {"arguments": {"epochs": "10"}}, 0.5),
        ({"last_line": "50%|█████     | 5/10 [00:05<00:05,  1.00it/s]"}, {"arguments": {"epochs": "3"}}, None),
        ({"step": 30}, {"arguments": {"max_steps": "120"}}, 0.25),
        ({"step": 30}, {"arguments": {"warmup_steps": "120", "steps_per_epoch": "9"}}, None),
        ({}, {}, None),
    ],
)
def test_part_of_the_whole_run_is_known_from_its_epochs_or_steps(rank: Any, fields: Any, share: float | None) -> None:
    reader = Reader(ranks=(RankSnapshot(rank=0, **rank),), fields=fields)
    assert share_done(reader.snapshot()) == share


def test_time_left_of_the_run_follows_its_mean_pace_and_leaves_pauses_out() -> None:
    reader = Reader(fields={"arguments": {"max_steps": "1000"}})
    feed = Feed(reader)

    def left(step: int, seconds: float, state: str = "running") -> str:
        reader.ranks, reader.seconds = (RankSnapshot(rank=0, step=step),), seconds
        reader.fields["state"] = state
        return str(feed.reset()["run"]["left"])

    assert left(100, 50.0) == ""
    assert left(110, 51.0) == ""  # too early to tell
    assert left(200, 60.0) == "about 80 s left"
    assert left(200, 360.0, "paused") == "about 80 s left"
    assert left(300, 370.0) == "about 70 s left"
    assert left(301, 470.0) == "about 7 min left"
    assert left(990, 471.0, "done") == ""
