"""Looks of the monitor's page in a real browser: themes, contrast, keys, width, and nothing from text of the user."""

from __future__ import annotations

import dataclasses
import re

import pytest

from notebook_launcher.colours import SERIES
from notebook_launcher.history.schema import RankFailure
from notebook_launcher.widgets.monitor.feed import setting_item
from tests.support.monitor_page import EVIL, LANES, PLOT, TIMELINE, curve, errors, log, rank, reset, run, waves


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_html_in_text_of_the_user_is_not_interpreted(tab):
    error = RankFailure(rank=0, summary=EVIL, traceback=EVIL, last_lines=(EVIL,))
    message = reset(
        run=run(
            id=EVIL,
            name=EVIL,
            summary=EVIL,
            arguments=EVIL,
            error=EVIL,
            effective_batch=EVIL,
            action_hint=EVIL,
            progress={"done": 1, "total": 2, "text": EVIL, "pace": EVIL},
            sync=EVIL,
        ),
        ranks=[rank(0, reason=EVIL, last_line=EVIL, state="failed"), rank(1, returned=EVIL)],
        curves=[curve(EVIL, 0, waves(30))],
        lanes=[{"rank": 0, "spans": [[EVIL, 0, 1], ["step", 1, 1]]}],
        logs=[log(0, EVIL), log(1, EVIL)],
        errors=errors(error, dataclasses.replace(error, rank=1, victim=True)),
        notices=[EVIL, f"{EVIL}\n{EVIL}"],
    )
    tab.deliver(message)
    tab.open("Logs")
    tab.page.get_by_label("Search the log").fill("<script>")
    tab.open("Timeline")
    tab.find(TIMELINE).hover()
    tab.find(".nbl-plot-canvas").hover()
    tab.settle()
    assert tab.find(".nbl-monitor img, .nbl-monitor script").count() == 0
    assert tab.page.evaluate("window.hacked") is None
    for place in (".nbl-name", ".nbl-summary", ".nbl-hint", ".nbl-error code", ".nbl-plot-name", ".nbl-sync"):
        assert EVIL in tab.find(place).first.text_content()


def test_narrow_page_does_not_scroll_sideways(tab):
    width = 360
    tab.page.set_viewport_size({"width": width, "height": 900})
    long = "x" * 400
    tab.deliver(
        reset(
            run=run(name=long, summary=long, action_hint=long),
            ranks=[rank(number, last_line=long, gpu_memory=1, gpu_utilization=1.0) for number in range(64)],
            curves=[curve(f"{long}{number}", 0, waves(50)) for number in range(5)],
            lanes=LANES,
            logs=[log(number, long) for number in range(64)],
            errors=errors(RankFailure(rank=0, summary=long, traceback=long, last_lines=(long,))),
            notices=[long],
            settings=[setting_item(long, "0.1", "number")],
            changes=[{"name": long, "words": f"{long} {long} → {long}", "who": "by code after update 12"}],
        )
    )
    for part in ("Ranks", "Settings", "Timeline", "Logs"):
        tab.open(part)
        if part == "Settings":
            tab.find(".nbl-changes summary").click()
        assert tab.page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize(
    ("scheme", "variables", "theme", "ground"),
    [
        ("light", {}, "light", "rgb(255, 255, 255)"),
        ("dark", {}, "dark", "rgb(23, 25, 29)"),
        ("light", {"--jp-layout-color1": "#111", "--jp-ui-font-color1": "#eee"}, "dark", "rgb(17, 17, 17)"),
        ("dark", {"--jp-layout-color1": "#fff", "--jp-ui-font-color1": "#111"}, "light", "rgb(255, 255, 255)"),
        ("light", {"--vscode-editor-background": "#1e1e1e"}, "dark", "rgb(30, 30, 30)"),
    ],
)
def test_theme_follows_the_notebook_and_then_the_system(tab, scheme, variables, theme, ground):
    tab.deliver(reset(curves=[curve("loss", 0, waves(200))]))
    tab.page.emulate_media(color_scheme=scheme)
    # As JupyterLab does: the variables, and an attribute of the body.
    change = """variables => {
        for (const [name, value] of Object.entries(variables)) document.documentElement.style.setProperty(name, value);
        document.body.dataset.jpThemeName = "another";
    }"""
    tab.page.evaluate(change, variables)
    tab.settle()
    root = tab.find(".nbl-monitor")
    assert root.get_attribute("data-theme") == theme
    assert root.evaluate("root => getComputedStyle(root).backgroundColor") == ground
    assert len(tab.columns(PLOT, tab.variable("--nbl-rank-0"))) > 200


@pytest.mark.parametrize(("scheme", "ground"), [("light", "#ffffff"), ("dark", "#17191d")])
def test_colours_have_enough_contrast_to_the_background(tab, scheme, ground):
    tab.page.emulate_media(color_scheme=scheme)
    tab.settle()
    names = {f"--nbl-rank-{number}": 3.0 for number in range(len(SERIES))}
    names |= {f"--nbl-{tone}": 4.5 for tone in ("live", "good", "bad", "warn")}
    for name, least in names.items():
        low, high = sorted(luminance(color) for color in (tab.variable(name), ground))
        assert (high + 0.05) / (low + 0.05) >= least, name


def test_every_control_has_a_name_and_is_reached_by_the_tab_key(tab):
    curves = [curve("loss", number, waves(50)) for number in range(2)]
    tab.deliver(reset(curves=curves, lanes=LANES, logs=[log(0, "x")]))
    look = """() => {
        const at = document.activeElement;
        const name = at.getAttribute("aria-label") || at.textContent || at.parentElement.textContent;
        return [name, getComputedStyle(at).outlineStyle];
    }"""
    reached: list[str] = []
    for part, last in (("Ranks", "Table of ranks"), ("Timeline", "Lanes of the ranks"), ("Logs", "Search the log")):
        tab.open(part)
        while last not in reached:
            tab.page.keyboard.press("Tab")
            name, outline = tab.page.evaluate(look)
            assert outline != "none", name
            assert name not in reached or name == part, f"round again after {reached}"
            reached.append(name)
        tab.page.get_by_role("tab", name=part).focus()
    wanted = (
        *("Stop after this step", "Interrupt", "Dump stacks", "Save now", "Each rank", "Table of ranks"),
        *("Average of ranks", "Log scale", "Smoothing", "rank 0", "rank 1", "loss", "Steps that", "Lanes", "Search"),
    )
    assert [name for name in wanted if not any(re.match(name, address) for address in reached)] == []


def test_500_messages_in_one_frame_are_drawn_once(tab):
    tab.deliver(reset(curves=[curve("loss", 0, waves(100))]))
    flood = """async (message) => {
        let count = 0;
        const draw = CanvasRenderingContext2D.prototype.clearRect;
        CanvasRenderingContext2D.prototype.clearRect = function (...all) { count += 1; return draw.apply(this, all); };
        for (let at = 0; at < 500; at += 1) model.fire("msg:custom", message, []);
        await new Promise(requestAnimationFrame);
        await new Promise(requestAnimationFrame);
        CanvasRenderingContext2D.prototype.clearRect = draw;
        return count;
    }"""
    message = tab.with_plots({"type": "update", "curves": [curve("loss", 0, [1.0])]})
    assert 1 <= tab.page.evaluate(flood, message) <= 2
