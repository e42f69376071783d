"""The monitor's settings, and the marks of their changes, in a real browser: with a fake model, and once with a run."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from notebook_launcher import Accelerator, launch, tunable
from notebook_launcher.widgets.monitor.feed import Feed, setting_item
from notebook_launcher.widgets.monitor.monitor import PageRequests
from tests.support.monitor_page import EVIL, PLOT, Tab, curve, rank, reset, run
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Locator

PART = "Settings"

SETTINGS = [
    setting_item("lr", "0.1", "positive"),
    setting_item("max_grad_norm", "none", "optional"),
    setting_item("gradient_accumulation_steps", "4", "count"),
    setting_item("temperature", "0.7", "number"),
    setting_item("depth", "3", "integer"),
    setting_item("augment", "on", "switch"),
]

TYPED = {
    "lr": ("1e-6", "1e-6"),
    "max_grad_norm": ("x2", "2"),
    "gradient_accumulation_steps": ("2", "2"),
    "temperature": ("x0.5", "0.35"),
    "augment": ("off", "off"),
}
"""For each setting of that run, what is typed and what is shown then."""


def tuned(go: Path) -> None:
    """Train for ever; the function's own settings come before the first update, and the Accelerator's after it."""
    tunable("temperature", 0.7)
    tunable("augment", True)
    while not go.exists():
        time.sleep(0.01)
    accelerator = Accelerator(max_grad_norm=1.0)
    model: Any = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    while True:
        time.sleep(0.01)
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            optimizer.zero_grad()


def change(name: str = "lr", before: str = "0.1", after: str = "0.05", **more: Any) -> dict[str, Any]:
    """Return an item CHANGE."""
    return {"name": name, "words": f"{name} {before} → {after}", "who": "by code after update 12", **more}


def field(tab: Tab, name: str) -> Locator:
    return tab.page.get_by_label(f"New value of {name}", exact=True)


def row(tab: Tab, name: str) -> Locator:
    return tab.find(f".nbl-setting[aria-label='{name}']")


def sent(tab: Tab) -> list[tuple[str, str]]:
    """Return the settings that the page has asked for."""
    messages = tab.page.evaluate("model.sent")
    return [(message["name"], message["value"]) for message in messages if message["type"] == "set"]


def test_each_setting_shows_its_value_and_takes_another(tab: Tab) -> None:
    tab.deliver(reset(settings=SETTINGS))
    assert tab.texts(".nbl-setting-value") == [f"{setting['name']}\n{setting['text']}" for setting in SETTINGS]
    field(tab, "lr").fill(" x0.5 ")
    row(tab, "lr").get_by_role("button", name="Apply").click()
    note = row(tab, "lr").locator(".nbl-setting-note").inner_text()
    assert note == "requested x0.5; takes effect after the next update"
    field(tab, "max_grad_norm").fill("1.5")
    tab.page.keyboard.press("Enter")
    assert sent(tab) == [("lr", "x0.5"), ("max_grad_norm", "1.5")]
    later = [{**SETTINGS[0], "text": "0.05"}, *SETTINGS[1:]]
    tab.deliver({"type": "update", "settings": later, "changes": [change(who="by the monitor after update 12")]})
    assert row(tab, "lr").locator("output").inner_text() == "0.05"
    assert field(tab, "lr").input_value() == ""
    assert row(tab, "lr").locator(".nbl-setting-note").inner_text() == "changed by the monitor after update 12"
    assert field(tab, "max_grad_norm").input_value() == "1.5"
    field(tab, "lr").press_sequentially("0.0")
    tab.deliver({"type": "update", "settings": [{**SETTINGS[0], "text": "0.09"}, *SETTINGS[1:]]})
    tab.page.keyboard.type("2")  # What is typed stays while values change.
    assert field(tab, "lr").input_value() == "0.02"
    assert row(tab, "lr").locator("output").inner_text() == "0.09"


def test_each_field_keeps_its_setting_when_others_come_before_it(tab: Tab) -> None:
    """A function may call `tunable` before the first update, by which the Accelerator's settings come first."""
    tab.deliver(reset(settings=SETTINGS[3:]))
    field(tab, "temperature").fill("0.5")
    later = [*SETTINGS[:3], *reversed(SETTINGS[3:])]
    tab.deliver({"type": "update", "settings": later})
    assert tab.texts(".nbl-setting-value") == [f"{setting['name']}\n{setting['text']}" for setting in later]
    wanted = {"lr": "1e-6", "max_grad_norm": "none", "gradient_accumulation_steps": "2", "depth": "7", "augment": "off"}
    for name, value in wanted.items():
        field(tab, name).fill(value)
    for name in ("temperature", *wanted):
        field(tab, name).press("Enter")
        note = row(tab, name).locator(".nbl-setting-note").inner_text()
        assert note.startswith(f"requested {wanted.get(name, '0.5')};")
    assert sent(tab) == [("temperature", "0.5"), *wanted.items()]


@pytest.mark.slow
def test_what_is_typed_changes_this_setting_of_the_run_and_no_other(tab: Tab, tmp_path: Path) -> None:
    run = launch(tuned, 2, args=(tmp_path / "go",), output="none", devices="cpu")
    feed = Feed(run, can_act=True)
    requests = PageRequests(run, feed, threading.RLock())
    tab.deliver(feed.reset())

    def values() -> dict[str, str]:
        """Return the name and the value that each row shows, after what is new."""
        tab.deliver(feed.update())
        return dict(text.split("\n") for text in tab.texts(".nbl-setting-value"))

    def answered(name: str) -> bool:
        """Return whether the page shows what has become of the last value."""
        return bool(values()) and "changed by the monitor" in row(tab, name).inner_text()

    try:
        until(lambda: list(values()) == ["temperature", "augment"], run)
        (tmp_path / "go").touch()
        until(lambda: list(values()) == list(TYPED), run)
        for name, (typed, shown) in TYPED.items():
            expected = {**values(), name: shown}
            field(tab, name).fill(typed)
            field(tab, name).press("Enter")
            asked = tab.page.evaluate("model.sent.at(-1)")
            assert asked == {"type": "set", "name": name, "value": typed}
            requests.carry_out("set", asked, lambda: None)
            until(lambda name=name: answered(name), run)  # type: ignore[misc]
            assert values() == expected
    finally:
        run.stop()
        run.wait()


@pytest.mark.parametrize(
    ("name", "good", "bad", "words"),
    [
        ("lr", ("1e-3", "x0.5", "* 2"), ("half", "-1", "0", "x", "none"), "A number above 0"),
        ("max_grad_norm", ("none", "1"), ("0", "nan"), "or none"),
        ("gradient_accumulation_steps", ("8",), ("0", "1.5", "x2"), "A whole number, 1 or more"),
        ("temperature", ("-1", "0", "x2"), ("warm", "Infinity"), "A number, or a factor"),
        ("depth", ("-1", "x2"), ("1.5",), "A whole number"),
        ("augment", ("on", "OFF"), ("1", "yes"), "on or off"),
    ],
)
def test_text_that_is_no_value_is_refused_beside_its_field(
    tab: Tab, name: str, good: tuple[str, ...], bad: tuple[str, ...], words: str
) -> None:
    tab.deliver(reset(settings=SETTINGS))
    problem = row(tab, name).locator(".nbl-setting-problem")
    for text in bad:
        field(tab, name).fill(text)
        assert words in problem.inner_text()
        assert field(tab, name).get_attribute("aria-invalid") == "true"
        tab.page.keyboard.press("Enter")
    assert sent(tab) == []
    for text in good:
        field(tab, name).fill(text)
        assert problem.is_hidden()
        tab.page.keyboard.press("Enter")
    assert sent(tab) == [(name, text) for text in good]


def test_refusal_by_the_kernel_is_shown_beside_its_field(tab: Tab) -> None:
    tab.deliver(reset(settings=SETTINGS))
    field(tab, "lr").fill("2")
    tab.page.keyboard.press("Enter")
    tab.deliver({"type": "update", "answers": [{"name": "lr", "problem": f"the run is over {EVIL}"}]})
    assert row(tab, "lr").locator(".nbl-setting-problem").inner_text() == f"the run is over {EVIL}"
    assert row(tab, "lr").locator(".nbl-setting-note").is_hidden()
    assert field(tab, "lr").input_value() == "2"
    field(tab, "lr").fill("3")
    tab.deliver({"type": "update", "settings": SETTINGS})
    assert row(tab, "lr").locator(".nbl-setting-problem").is_hidden()


def test_enter_applies_a_value_also_where_its_default_action_is_taken_away(tab: Tab) -> None:
    tab.deliver(reset(settings=SETTINGS))
    tab.page.evaluate(
        """window.taken = (event) => event.preventDefault();
        document.addEventListener("keydown", taken, { capture: true })"""
    )
    try:
        field(tab, "lr").fill("7e-5")
        field(tab, "lr").press("Enter")
    finally:
        tab.page.evaluate("document.removeEventListener('keydown', taken, { capture: true })")
    assert sent(tab) == [("lr", "7e-5")]


def test_fields_and_pause_are_disabled_with_the_reason(tab: Tab) -> None:
    reason = "Needs an Accelerator that has made an update"
    off = {**run()["actions"], "pause": False, "set": False}
    tab.deliver(reset(run=run(actions=off, change_hint=reason), settings=SETTINGS[3:4]))
    pause = tab.page.get_by_role("button", name="Pause")
    assert (pause.is_enabled(), pause.get_attribute("title")) == (False, reason)
    apply = tab.page.get_by_role("button", name="Apply")
    assert (apply.is_enabled(), apply.get_attribute("title")) == (False, reason)
    assert field(tab, "temperature").is_disabled()
    tab.deliver(reset(settings=[]))
    assert tab.page.get_by_role("region", name="Settings").is_hidden()


def test_pause_becomes_resume_and_a_paused_run_has_no_pace_and_no_time_left(tab: Tab) -> None:
    tab.deliver(reset())
    tab.page.get_by_role("button", name="Pause").click()
    paused = {**run()["actions"], "pause": False, "resume": True}
    ranks = [rank(number, state="waiting") for number in range(2)]
    tab.deliver({"type": "update", "run": run(state="paused", actions=paused), "ranks": ranks})
    assert tab.text(".nbl-identity").split("\n")[0] == "paused"
    assert tab.texts(".nbl-progress-text span")[1] == ""
    tab.open("Ranks")
    assert tab.texts("td .nbl-state") == ["paused", "paused"]
    tab.page.get_by_role("button", name="Resume").click()
    assert tab.text(".nbl-hint") == "Requested: Resume."
    assert tab.sent() == ["hello", "pause", "resume"]
    tab.deliver({"type": "update", "run": run(), "ranks": [rank(0, slowest=True), rank(1)]})
    assert tab.texts("td .nbl-state") == ["training", "training"]
    assert tab.texts(".nbl-progress-text span")[1] == "12.5 it/s · 6 s left in this epoch"


def test_changes_are_marked_on_each_curve_and_listed_also_when_the_run_is_over(tab: Tab) -> None:
    values: list[float | None] = [1 + step / 100 for step in range(101)]
    tab.deliver(reset(curves=[curve("loss", 0, values), curve("accuracy", 0, values)], settings=SETTINGS))
    before = [tab.picture(f".nbl-plot:nth-child({at}) canvas") for at in (1, 2)]
    assert tab.find(".nbl-changes").is_hidden()
    changes = [change(), change(EVIL, "0.7", "0.9"), change("lr", "0.05", "0.01", who="by code after update 99")]
    marks = [(50, f"lr 0.1 → 0.05, {EVIL} 0.7 → 0.9")]
    tab.deliver({"type": "update", "changes": changes, "marks": marks})
    after = [tab.picture(f".nbl-plot:nth-child({at}) canvas") for at in (1, 2)]
    assert all(value != other for value, other in zip(before, after, strict=True))
    box = tab.find(PLOT).first.bounding_box()
    assert box is not None
    for part in range(40, 60):  # The labels of the values take some room at the left.
        tab.page.mouse.move(box["x"] + part / 100 * box["width"], box["y"] + 40)
        tab.settle()
        if len(rows := tab.texts(".nbl-tip-row")) > 1:
            break
    assert rows[0].strip() == f"lr 0.1 → 0.05, {EVIL} 0.7 → 0.9"
    tab.page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 40)
    tab.settle()
    assert tab.texts(".nbl-plot:nth-child(1) .nbl-tip-row") == ["rank 0\n2"]
    tab.find(".nbl-changes summary").click()
    assert tab.text(".nbl-changes summary") == "3 changes"
    assert tab.texts(".nbl-changes li")[::2] == [
        "lr 0.05 → 0.01 by code after update 99",
        "lr 0.1 → 0.05 by code after update 12",
    ]
    assert tab.page.evaluate("window.hacked") is None
    tab.deliver({"type": "update", "run": run(state="done", is_over=True)})
    assert tab.find(".nbl-setting").count() == 0
    assert tab.text(".nbl-changes summary") == "3 changes"
