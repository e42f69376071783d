"""Curves, pictures and tables of the monitor's page in a real browser."""

from __future__ import annotations

import base64
import math

import pytest

from tests.support.monitor_page import EVIL, PLOT, curve, reset, waves

NUM_POINTS = 100_000
WHY_EMPTY = {False: "No finite value", True: "No value above zero, which a log scale needs"}


def test_curves_are_drawn_and_grow_with_each_update(tab):
    tab.deliver(reset(curves=[curve("loss", number, waves(300, number)) for number in range(2)]))
    assert tab.texts(".nbl-plot-name") == ["loss"]
    inks = [tab.variable(f"--nbl-rank-{number}") for number in range(2)]
    drawn = [tab.columns(PLOT, ink) for ink in inks]
    assert all(len(columns) > 300 for columns in drawn)
    later = {"name": "loss", "rank": 0, "steps": list(range(300, 600)), "values": waves(300)}
    tab.deliver({"type": "update", "curves": [later]})
    assert abs(max(tab.columns(PLOT, inks[0])) - max(drawn[0])) <= 2
    # Rank 1 now ends halfway along the axis.
    assert max(tab.columns(PLOT, inks[1])) < 0.6 * max(drawn[1])


def test_value_that_is_not_finite_leaves_a_gap_a_tick_and_a_word(tab):
    values = waves(300)
    values[100:200] = [None] * 100
    tab.deliver(reset(curves=[curve("loss", 0, values)]))
    height = tab.find(PLOT).evaluate("canvas => canvas.height")
    ink = tab.variable("--nbl-rank-0")
    width = tab.width(PLOT)
    middle = set(range(int(0.4 * width), int(0.6 * width)))
    above, on_axis = (middle & tab.columns(PLOT, ink, rows) for rows in ((0, height - 30), (height - 20, height - 14)))
    assert above == set()
    assert len(on_axis) > 0.3 * len(middle)
    assert tab.text(".nbl-latest").endswith(", some not finite")
    tab.deliver({"type": "update", "curves": [{"name": "loss", "rank": 0, "steps": [300], "values": [None]}]})
    assert tab.text(".nbl-latest") == "not finite"


@pytest.mark.parametrize("values", [[None, None], [0.0], [1e308, -1e308], [1e-300, 5e-324]])
def test_curve_of_extreme_values_is_drawn_on_linear_and_log_scale(tab, values):
    tab.deliver(reset(curves=[curve("loss", 0, values)]))
    ink = tab.variable("--nbl-rank-0")
    is_drawn = tab.find(PLOT).count() == 1 and bool(tab.columns(PLOT, ink))
    assert is_drawn == any(value is not None for value in values)
    tab.find("text=Log scale").click()
    tab.settle()
    is_drawn = tab.find(PLOT).count() == 1 and bool(tab.columns(PLOT, ink))
    assert is_drawn == any(value is not None and value > 0 for value in values)
    assert tab.find(".nbl-plot-words").inner_text() == (
        "" if is_drawn else WHY_EMPTY[any(value is not None for value in values)]
    )


def test_ranks_are_averaged_on_demand_and_by_default_if_there_are_many(tab):
    tab.deliver(reset(curves=[curve("loss", number, [1.0 + number] * 50) for number in range(2)]))
    average = tab.page.get_by_label("Average of ranks")
    assert (average.is_checked(), tab.texts(".nbl-chip")) == (False, ["rank 0", "rank 1"])
    average.check()
    tab.settle()
    tab.find(".nbl-plot-canvas").hover()
    tab.settle()
    assert tab.texts(".nbl-tip-row") == ["mean of ranks\n1.5", "lowest\n1", "highest\n2"]
    tab.deliver(reset(curves=[curve("loss", number, [1.0 + number] * 50) for number in range(16)]))
    average.uncheck()
    tab.settle()
    assert len(tab.texts(".nbl-chip")) == 16
    tab.find(".nbl-plot-canvas").hover()
    tab.settle()
    assert tab.texts(".nbl-tip-row")[-1].startswith("and 8 more")


def test_click_on_a_rank_chip_hides_its_line(tab):
    tab.deliver(reset(curves=[curve("loss", number, waves(200, number)) for number in range(2)]))
    ink = tab.variable("--nbl-rank-1")
    tab.find(".nbl-chip").nth(1).click()
    tab.page.mouse.move(0, 0)
    tab.settle()
    assert tab.columns(PLOT, ink) == set()
    assert tab.find(".nbl-chip").nth(1).get_attribute("aria-pressed") == "false"


def test_drag_zooms_a_plot_and_double_click_resets_it(tab):
    tab.deliver(reset(curves=[curve("loss", 0, [float(step) for step in range(1001)])]))
    box = tab.find(PLOT).bounding_box()
    reset_zoom = tab.page.get_by_role("button", name="Reset zoom")
    x, y = box["x"], box["y"] + 50
    tab.page.mouse.move(x + 0.5 * box["width"], y)
    tab.page.mouse.down()
    tab.page.mouse.move(x + 0.7 * box["width"], y, steps=3)
    tab.page.mouse.up()
    tab.settle()
    assert reset_zoom.is_visible()
    tab.page.mouse.move(x + box["width"] - 2, y)
    tab.settle()
    assert 650 < int(tab.text(".nbl-tip-title").removeprefix("step ")) < 750
    tab.page.mouse.dblclick(x + 0.5 * box["width"], y)
    tab.page.mouse.move(x + box["width"] - 2, y)
    tab.settle()
    assert (reset_zoom.is_visible(), tab.text(".nbl-tip-title")) == (False, "step 1,000")


def test_200_metrics_are_drawn_12_at_a_time_and_found_by_name(tab):
    tab.deliver(reset(curves=[curve(f"metric_{number}", 0, waves(50)) for number in range(200)]))
    assert tab.find(".nbl-plot").count() == 12
    assert tab.text(".nbl-foot") == "12 of 200 metrics shown\nShow 12 more"
    height = tab.find(".nbl-plots").bounding_box()["height"]
    tab.page.get_by_role("button", name="Show 12 more").click()
    tab.settle()
    assert tab.find(".nbl-plot").count() == 24
    assert tab.find(".nbl-plots").bounding_box()["height"] < 1.1 * height  # The others are scrolled to.
    assert tab.find(PLOT).count() < 24  # those out of sight hold no pixels
    tab.page.get_by_label("Find a metric").fill("_199")
    tab.settle()
    assert tab.texts(".nbl-plot-name") == ["metric_199"]
    tab.page.get_by_label("Find a metric").fill("absent")
    tab.settle()
    assert tab.text(".nbl-foot") == "No metric matches"


def test_pinned_metrics_and_losses_are_drawn_first_and_the_others_in_sections_by_prefix(tab):
    names = ["lr", "ctc_loss", "glossary", "loss", "accuracy"]
    tab.deliver(reset(curves=[curve(name, 0, waves(50)) for name in names]))
    assert tab.texts(".nbl-plot-name") == ["loss", "ctc_loss", "lr", "glossary", "accuracy"]
    for name in ("accuracy", "lr"):
        tab.page.get_by_role("button", name=f"Pin {name}").click()
        tab.settle()
    assert tab.texts(".nbl-plot-name") == ["accuracy", "lr", "loss", "ctc_loss", "glossary"]
    assert tab.page.get_by_role("button", name="Pin", pressed=True).count() == 2
    assert tab.page.evaluate("document.activeElement.getAttribute('aria-label')") == "Pin lr"
    tab.deliver(reset(curves=[curve(name, 0, waves(50)) for name in [*names, "late"]]))
    assert tab.texts(".nbl-plot-name")[:3] == ["accuracy", "lr", "loss"]
    tab.page.get_by_role("button", name="Pin accuracy").click()
    tab.settle()
    assert tab.texts(".nbl-plot-name")[:3] == ["lr", "loss", "ctc_loss"]
    names = ["loss", *(f"{section}/of_{number}" for section in ("layers", "system") for number in range(3))]
    tab.deliver(reset(curves=[curve(name, 0, waves(20)) for name in names]))
    assert tab.texts(".nbl-prefix") == ["layers", "system"]
    tab.page.get_by_role("button", name="Pin system/of_2").click()
    tab.settle()
    assert tab.texts(".nbl-plot-name")[:2] == ["system/of_2", "loss"]


def test_parts_of_the_data_share_a_chart(tab):
    names = ["train/loss", "val/loss", "lr", "accuracy_test", "epoch"]
    tab.deliver(reset(curves=[curve(name, 0, waves(50, at)) for at, name in enumerate(names)]))
    assert tab.texts(".nbl-plot-name") == ["loss", "lr", "accuracy_test", "epoch"]
    assert [text.split()[0] for text in tab.texts(".nbl-parts > span")] == ["train", "val"]
    for number in (0, 1):
        assert len(tab.columns(PLOT, tab.variable(f"--nbl-rank-{number}"))) > 100
    tab.page.get_by_label("Group train and val").uncheck()
    tab.settle()
    assert tab.texts(".nbl-plot-name")[:2] == ["train/loss", "val/loss"]


def test_axis_counts_steps_seconds_or_epochs(tab):
    epochs = curve("epoch", 0, [float(step // 25) for step in range(100)])
    tab.deliver(reset(curves=[curve("loss", 0, waves(100)), epochs]))
    box = tab.find(PLOT).first.bounding_box()
    axis = tab.page.get_by_label("Horizontal axis")
    seen = []
    for kind in ("step", "time", "epoch"):
        axis.select_option(kind)
        tab.page.mouse.move(0, 0)
        tab.page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 60)
        tab.settle()
        seen.append(tab.text(".nbl-tip-title"))
    assert seen == ["step 99", "9.9 s", "epoch 3.96"]
    # Python draws the picture that stays in the same way.
    drawn = {"type": "draw", "axis": "epoch", "grouped": True, "average": None, "log": False, "smoothing": 0}
    sent = tab.page.evaluate("model.sent.findLast(({ type }) => type === 'draw')")
    assert {name: value for name, value in sent.items() if name != "turn"} == drawn
    tab.deliver(reset(curves=[curve("loss", 0, waves(100))]))
    assert tab.page.locator("option:has-text('by epoch')").is_hidden()


def test_memory_and_load_are_drawn_by_time(tab):
    memory = [curve("memory, GB", rank, [0.3, 0.4]) for rank in range(2)]
    tab.deliver(reset())
    section = tab.page.get_by_role("region", name="Memory and load")
    tab.open("Memory and load")
    assert section.is_hidden()
    more = [{**curve, "steps": [2], "times": [0.2], "values": [0.5]} for curve in memory]
    tab.deliver({"type": "update", "usage": [*memory, *more, curve("load, processors", 0, [0.0, 1.0])]})
    assert section.is_visible()
    assert section.locator(".nbl-plot-name").all_inner_texts() == ["memory, GB", "load, processors"]
    assert section.locator(".nbl-latest").all_inner_texts() == ["0.5 mean of ranks", "1"]
    tab.deliver(reset())
    assert section.is_hidden()


def test_points_and_charts_are_downloaded(tab):
    tab.deliver(reset(curves=[curve('a "b", c', 0, [1.0, None]), curve("=1+1", 0, [1.0])]))
    with tab.page.expect_download() as csv:
        tab.page.get_by_role("button", name="CSV").click()
        tab.settle()
    assert csv.value.suggested_filename == "20261121-142501-train-3f9c.csv"
    head = "metric,rank,step,seconds,value\n"
    assert csv.value.path().read_text() == head + '\'=1+1,0,0,0.0,1\n"a ""b"", c",0,0,0.0,1\n"a ""b"", c",0,1,0.1,nan\n'
    with tab.page.expect_download() as png:
        tab.page.get_by_role("button", name="as PNG").first.click()
    assert png.value.path().read_bytes().startswith(b"\x89PNG")


def test_pictures_show_the_newest_and_earlier_ones_by_a_slider(tab):
    def record(step, name="sample"):
        source = f"data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' width='9' height='{step + 1}'/>"
        return {"name": name, "rank": 0, "step": step, "source": source}

    tab.open("Pictures and tables")
    tab.deliver(reset(pictures=[record(0), record(10), record(5, EVIL)]))
    assert tab.texts(".nbl-pictures figcaption") == ["sample, rank 0, step 10", f"{EVIL}, rank 0, step 5"]
    assert tab.find(".nbl-pictures input").nth(1).is_hidden()
    tab.deliver({"type": "update", "pictures": [record(20)]})
    assert tab.text(".nbl-pictures figcaption") == "sample, rank 0, step 20"
    tab.find(".nbl-pictures input").first.fill("0")
    tab.deliver({"type": "update", "pictures": [record(30)]})
    assert tab.text(".nbl-pictures figcaption") == "sample, rank 0, step 0"
    assert tab.page.evaluate("window.hacked") is None


def test_table_is_shown_and_downloaded(tab):
    data = base64.b64encode(b"text,score\nfour,0.5\n").decode()
    table = {"name": "answers", "rank": 0, "step": 3, "source": f"data:text/csv;base64,{data}"}
    tab.open("Pictures and tables")
    tab.deliver(reset(pictures=[{**table, "rows": [["text", "score"], [EVIL, "0.5"]]}]))
    assert tab.texts(".nbl-pictures th, .nbl-pictures td") == ["text", "score", EVIL, "0.5"]
    assert tab.find(".nbl-pictures img").is_hidden()
    with tab.page.expect_download() as csv:
        tab.find(".nbl-pictures").get_by_text("CSV").click()
    assert csv.value.suggested_filename == "answers-rank-0-step-3.csv"
    assert csv.value.path().read_bytes() == b"text,score\nfour,0.5\n"
    assert tab.page.evaluate("window.hacked") is None


def test_100_000_points_are_drawn_in_bounded_memory_and_time(tab):
    tab.deliver(reset(curves=[curve("loss", 0, [0.0])]))
    nodes = tab.page.evaluate("document.querySelectorAll('*').length")
    measure = """() => { window.longest = 0; window.fire = model.fire; model.fire = (...all) => {
        const begin = performance.now();
        fire.apply(model, all);
        longest = Math.max(longest, performance.now() - begin);
    }; }"""
    tab.page.evaluate(measure)
    for first in range(1, NUM_POINTS, 20_000):
        steps = list(range(first, first + 20_000))
        values = [9.0 if step == 54_321 else math.sin(step) for step in steps]
        tab.deliver({"type": "update", "curves": [{"name": "loss", "rank": 0, "steps": steps, "values": values}]})
    assert tab.page.evaluate("longest") < 250
    assert tab.page.evaluate("document.querySelectorAll('*').length") <= nodes + 5
    # The only peak is kept: nothing else is in the upper half.
    ink = tab.variable("--nbl-rank-0")
    peak = tab.columns(PLOT, ink, rows=(8, 70))
    width = tab.width(PLOT)
    assert 1 <= len(peak) <= 4
    assert min(peak) / width == pytest.approx(0.54, abs=0.03)


def test_zoom_shows_what_was_reported_between_the_points_of_the_whole_curve(tab):
    tab.deliver(reset(curves=[curve("loss", 0, [float(step % 10) for step in range(50_000)])]))
    tab.find(".nbl-plot-canvas").hover()
    for _ in range(11):
        tab.find(".nbl-plot-canvas").press("+")
    tab.settle()
    seen = set()
    for _ in range(8):
        tab.find(".nbl-plot-canvas").press("ArrowRight")
        tab.settle()
        seen.add(tab.text(".nbl-tip-title"))
        step = int(tab.text(".nbl-tip-title").removeprefix("step ").replace(",", ""))
        assert tab.text(".nbl-tip-row b") == str(step % 10)
    assert len(seen) > 2  # Of ten steps, the curve as a whole keeps two or fewer.


def test_keys_read_values_and_zoom_and_linked_plots_follow(tab):
    tab.deliver(reset(curves=[curve(name, 0, [float(step) for step in range(1001)]) for name in ("loss", "accuracy")]))
    reset_zoom = tab.find("text=Reset zoom >> visible=true")
    for is_linked in (False, True):
        if is_linked:
            tab.page.get_by_label("Link plots").check()
        tab.find(".nbl-plot-canvas").first.focus()
        for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
            tab.page.keyboard.press(key)
        tab.settle()
        titles = tab.texts(".nbl-tip-title")
        assert titles.count(titles[0]) == 1 + is_linked
        assert 500 < int(titles[0].removeprefix("step ")) < 600
        tab.page.keyboard.press("+")
        tab.settle()
        assert reset_zoom.count() == 1 + is_linked
        assert tab.sent().count("zoom") == 1 + 2 * is_linked
        tab.page.keyboard.press("Escape")
        tab.settle()
        assert reset_zoom.count() == 0


def test_outliers_are_left_out_of_the_axis_on_request(tab):
    tab.deliver(reset(curves=[curve("loss", 0, [1e6 if step == 50 else math.sin(step / 9) for step in range(200)])]))
    ink, height = tab.variable("--nbl-rank-0"), tab.find(PLOT).evaluate("canvas => canvas.height")
    middle = (height // 4, height // 2)
    assert len(tab.columns(PLOT, ink, middle)) < 10
    tab.page.get_by_label("No outliers").check()
    tab.settle()
    assert len(tab.columns(PLOT, ink, middle)) > 30


def test_log_scale_and_smoothing_change_the_plot(tab):
    tab.deliver(reset(curves=[curve("loss", 0, [10 ** (3 * math.sin(step)) for step in range(200)])]))
    pictures = {tab.picture(PLOT)}
    tab.find("text=Log scale").click()
    tab.settle()
    pictures.add(tab.picture(PLOT))
    tab.find("input[type=range]").fill("0.9")
    tab.settle()
    pictures.add(tab.picture(PLOT))
    assert (len(pictures), tab.text("output")) == (3, "0.90")


def test_one_plot_is_shown_large(tab):
    tab.deliver(reset(curves=[curve(name, 0, waves(100)) for name in ("loss", "accuracy")]))
    small = tab.find(PLOT).first.bounding_box()
    tab.page.get_by_role("button", name="Enlarge loss").click()
    tab.settle()
    large = tab.find(PLOT).first.bounding_box()
    assert large["width"] > 1.9 * small["width"]
    assert large["height"] > 2 * small["height"]
    assert tab.page.get_by_role("button", name="Enlarge loss", pressed=True).count() == 1


def test_ends_of_long_names_stay_in_sight_beside_long_values(tab):
    values = [*waves(50), None, 0.123456]
    names = [f"group0/a_long_metric_of_block_{number}" for number in range(3)]
    tab.deliver(reset(curves=[curve(name, rank, values) for name in names for rank in range(2)]))
    for at in range(3):
        end = tab.find(".nbl-plot-name span:last-child").nth(at)
        name = tab.find(".nbl-plot-name").nth(at).bounding_box()
        assert end.inner_text().endswith(f"block_{at}")
        box = end.bounding_box()
        assert box["x"] + box["width"] <= name["x"] + name["width"] + 1
