"""Messages to the monitor's page: the whole run, and then the news."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher import Accelerator, launch
from notebook_launcher.history.schema import RankFailure, RankPhases, RankSnapshot, RunChange, RunSetting
from notebook_launcher.history.summaries import measure_sync
from notebook_launcher.widgets.monitor.feed import Feed
from tests.support.console_cell import Cell
from tests.support.made_up_run import Drawn, Reader, news, points

if TYPE_CHECKING:
    from notebook_launcher.kernel.display.console import Console

SCRIPT = "<script>alert('\"')</script>\x1b[31m"


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


class ConsoleReader(Reader):
    """A run whose logs are those of a console."""

    def __init__(self, console: Console, **fields: Any) -> None:
        super().__init__(**fields)
        self.console = console

    def logs_since(self, rank: int, position: int) -> tuple[str, int]:
        return self.console.logs[rank].since(position)

    def log_order(self, num_pieces: int) -> list[tuple[int, int]]:
        return self.console.order.pieces(num_pieces)


def texts(message: Any) -> list[tuple[int, str]]:
    return [(log["rank"], log["text"]) for log in message["logs"]]


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
    assert [rank["last_line"] for rank in message["ranks"]] == ["returned 'weights'", "returned 'weights'"]
    assert [rank["state"] for rank in message["ranks"]] == ["returned", "returned"]
    lines = Drawn(message).lines
    assert lines.keys() >= {("loss", "rank 0"), ("loss", "rank 1"), ("broken", "rank 0")}
    # Whoever logs a loss gets these as well.
    assert lines["learning_rate", "rank 1"][1][-1] == 0.1
    assert (lines["grad_norm", "rank 0"][1][-1] or 0) > 0
    assert set(lines["broken", "rank 0"][1]) == {None}
    words = {plot["title"]: plot["latest"] for plot in message["plots"]}
    assert (words["learning_rate"], words["broken"]) == ("0.1 mean of ranks", "not finite on rank 0, 1")
    assert [lane["rank"] for lane in message["lanes"]] == [0, 1]
    assert {phase for lane in message["lanes"] for phase, _, _ in lane["spans"]} >= {"forward", "backward", "step"}
    assert [log["text"] for log in message["logs"]] == ["trained\n", "trained\n"]


def test_saving_by_accumulation_is_measured(trained: Any) -> None:
    phases = trained.phases
    sync = measure_sync(phases.values())
    expected = [own.seconds["sync"] / own.counts["sync"] * (own.micro_batches - own.windows) for own in phases.values()]
    assert {(own.micro_batches, own.windows, own.counts["sync"]) for own in phases.values()} == {(16, 4, 4)}
    assert sync.saved_seconds == pytest.approx(sum(expected) / 2, rel=0.01)
    assert 0 < (sync.share or 0) < 1
    words = r"[\d.]+ % of the time .* other ranks \([\d.]+ \w+ per wait\)\. Accumulation saved [\d.]+ \w+\."
    assert re.fullmatch(words, Feed(trained).reset()["run"]["sync"])


def test_updates_add_up_to_a_reset() -> None:
    reader = Reader(ranks=(RankSnapshot(rank=0), RankSnapshot(rank=1)))
    feed = Feed(reader)
    drawn = Drawn()
    logs = {0: "", 1: ""}
    feed.reset()
    for step in range(50):
        reader.report(step, step % 2, loss=float(step))
        if step > 30:
            reader.report(step, late=1.0)
        reader.logs[step % 2] = reader.logs.get(step % 2, "") + f"step {step}\n"
        update = news(feed)
        assert points(update) <= 2
        drawn.add(update)
        for log in update["logs"]:
            logs[log["rank"]] += log["text"]
    whole = Feed(reader).reset()
    assert drawn.lines == Drawn(whole).lines
    assert logs == {log["rank"]: log["text"] for log in whole["logs"]}


def test_logs_come_in_the_order_of_their_arrival_at_first_and_later() -> None:
    console = Cell(num_processes=4)
    reader = ConsoleReader(console.console, ranks=tuple(RankSnapshot(rank=rank) for rank in range(4)))
    for rank, text in [(3, "a\n"), (1, "b\n"), (3, "é\n"), (1, "d"), (0, "e\n"), (1, "d\n")]:
        console.feed(text, rank)
    feed = Feed(reader)
    expected = [(3, "a\n"), (1, "b\n"), (3, "é\n"), (1, "d"), (0, "e\n"), (1, "d\n")]
    assert texts(feed.reset()) == expected
    for rank, text in [(2, "f\n"), (0, "g\n"), (2, "h\n")]:
        console.feed(text, rank)
    assert texts(feed.update()) == [(2, "f\n"), (0, "g\n"), (2, "h\n")]
    assert texts(feed.reset()) == [*expected, (2, "f\n"), (0, "g\n"), (2, "h\n")]


def test_age_memory_and_seconds_of_a_wait_are_sent_once_a_second_and_a_state_at_once() -> None:
    reader = Reader(ranks=(RankSnapshot(rank=0, state="running", memory=1),))
    feed = Feed(reader)
    feed.reset()
    assert feed.update() is None
    reader.seconds += 0.3
    reader.ranks = (RankSnapshot(rank=0, state="running", memory=2),)
    assert feed.update() is None
    reader.ranks = (RankSnapshot(rank=0, state="saving", memory=3),)
    assert [(rank["state"], rank["words"]["memory"]) for rank in news(feed)["ranks"]] == [("saving", "3 bytes")]
    reader.seconds += 0.8
    update = news(feed)
    assert update.keys() == {"type", "run"}
    assert update["run"]["seconds"] == pytest.approx(2.1)

    def waits(words: str, seconds: float) -> Any:
        reader.fields = {"state": "waiting", "waiting": words}
        reader.seconds += seconds
        return feed.update()

    run = waits("rank 0 has waited 10 s in barrier", 0.25)["run"]
    assert (run["state"], run["waiting"]) == ("waiting", "rank 0 has waited 10 s in barrier")
    assert waits("rank 0 has waited 11 s in barrier", 0.25) is None
    assert waits("rank 0 has waited 11 s in barrier", 0.75)["run"]["waiting"] == "rank 0 has waited 11 s in barrier"
    assert waits("", 0.25)["run"]["waiting"] == ""


def test_names_and_texts_of_users_are_sent_unchanged() -> None:
    failure = RankFailure(rank=0, summary=SCRIPT, traceback=SCRIPT * 10_000, last_lines=(SCRIPT,))
    rank = RankSnapshot(rank=0, last_line=SCRIPT, metrics={SCRIPT: 1.0})
    reader = Reader(ranks=(rank,), logs={0: SCRIPT + "\n"}, fields={"failures": (failure,), "name": SCRIPT})
    reader.report(0, **{SCRIPT: 1.0})
    message = json.loads(json.dumps(Feed(reader).reset(), allow_nan=False))
    assert (
        message["plots"][0]["title"] == message["run"]["name"] == message["errors"]["culprits"][0]["summary"] == SCRIPT
    )
    assert message["logs"][0]["text"] == SCRIPT + "\n"
    assert len(message["errors"]["culprits"][0]["traceback"]) < 21_000


def test_notices_are_in_the_next_message_and_in_every_reset() -> None:
    feed = Feed(Reader())
    feed.reset()
    feed.notice("saved")
    assert news(feed)["notices"] == ["saved"]
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
    assert [(setting["name"], setting["text"], setting["kind"]) for setting in message["settings"]] == [
        ("lr", "0.1", "positive"), ("max_grad_norm", "none", "optional"), ("enough", "off", "switch"),
    ]  # fmt: skip
    assert message["changes"] == message["answers"] == message["findings"] == []
    assert feed.update() is None
    reader.fields["settings"] = (RunSetting(name="lr", value=0.05, kind="positive"),)
    change = RunChange(name="lr", before=0.1, after=0.05, update=7, step=6, time=2.5, source="monitor")
    reader.fields["changes"] = (change,)
    feed.answer("lr", "no")
    update = news(feed)
    assert [setting["text"] for setting in update["settings"]] == ["0.05"]
    assert update["changes"] == [{"name": "lr", "words": "lr 0.1 → 0.05", "who": "by the monitor after update 7"}]
    assert update["answers"] == [{"name": "lr", "problem": "no"}]
    assert feed.update() is None
    found = {"kind": "sample", "drawing": "", "tables": [], "problem": "gone"}
    feed.finding(found)
    assert feed.update() == {"type": "update", "findings": [found]}
    assert feed.update() is None
    message = feed.reset()
    assert (len(message["changes"]), message["findings"]) == (1, [found])


def test_error_is_sent_once_and_a_rank_that_the_user_stopped_is_none() -> None:
    reader = Reader(ranks=(RankSnapshot(rank=0, state="stopped"), RankSnapshot(rank=1, state="failed")))
    feed = Feed(reader)
    feed.reset()
    failures = [RankFailure(rank=0, summary="stopped"), RankFailure(rank=1, summary="ValueError: boom", victim=True)]
    reader.fields["failures"] = tuple(failures)
    errors = news(feed)["errors"]
    assert [(error["who"], error["summary"]) for error in errors["victims"]] == [("rank 1", "ValueError: boom")]
    assert errors["culprits"] == []
    assert feed.update() is None
