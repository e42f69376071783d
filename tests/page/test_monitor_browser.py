"""The monitor's page in a real browser, with a fake model."""

from __future__ import annotations

import base64
import math
import re

import pytest

from notebook_launcher.colours import LIGHT
from notebook_launcher.drawing.legend import PHASES
from tests.support.lab import needs_browser
from tests.support.monitor_page import ACTIONS, LANES, Tab, curve, log, open_tab, rank, reset, run

pytestmark = needs_browser

PLOT = ".nbl-plot-canvas"
TIMELINE = "[aria-label^='Timeline of']"
EVIL = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>\"'&amp;"
UNKNOWN = "\N{EN DASH}"
NUM_POINTS = 100_000


def waves(count: int, shift: float = 0.0) -> list[float | None]:
    return [2 + math.sin(step / 20 + shift) for step in range(count)]


def test_view_sends_hello_and_shows_the_run_of_the_reset(tab):
    assert tab.sent() == ["hello"]
    assert "waiting for the kernel" in tab.text(".nbl-header")
    tab.deliver(reset())
    assert tab.text(".nbl-identity").split("\n") == ["running", "train", "1 min 01 s"]
    told = "lr=0.1, epochs=3 · 2 processes on cpu · effective batch 8 x 4 x 2 = 64 samples per update"
    assert tab.text(".nbl-summary") == told
    assert tab.text(".nbl-unseen") == "train: running"


def test_wait_in_a_collective_is_shown_below_the_header_until_it_ends(tab):
    tab.deliver(reset())
    line = tab.find(".nbl-waiting")
    assert line.is_hidden()
    told = f"rank 0 has waited 12 s in all_reduce (Cell In[3], line 4); rank 1 is at line 7: {EVIL}"
    tab.deliver({"type": "update", "run": run(state="waiting", waiting=told), "ranks": [rank(0, state="waiting")]})
    assert line.inner_text() == told
    assert tab.text(".nbl-identity").split()[0] == "waiting"
    assert tab.text(".nbl-unseen") == "train: waiting"
    assert tab.texts("td .nbl-state-word") == ["waiting in a collective", "training"]
    tab.deliver({"type": "update", "run": run(), "ranks": [rank(0)]})
    assert line.is_hidden()
    assert tab.text(".nbl-identity").split()[0] == "running"


def test_progress_shows_the_slowest_rank_and_each_rank_on_demand(tab):
    tab.deliver(reset())
    assert tab.texts(".nbl-progress-text span") == ["epoch 1 · 25 of 100 (25 %)", "12.5 it/s · 6 s left in this epoch"]
    bar = tab.find(".nbl-progress > [role=progressbar]")
    assert [bar.get_attribute(f"aria-value{part}") for part in ("min", "max", "now")] == ["0", "100", "25"]
    assert tab.find(".nbl-each-row").count() == 0
    tab.find(".nbl-progress summary").click()
    tab.deliver({"type": "update", "ranks": [rank(1, done=24)]})
    assert tab.texts(".nbl-each-text") == ["25 of 100 (25 %)", "24 of 100 (24 %)"]


def test_progress_without_a_total_shows_no_percentage(tab):
    tab.deliver(reset(run=run(progress={"done": 25, "total": None, "rate": 0.25, "seconds_left": None})))
    assert tab.texts(".nbl-progress-text span") == ["25 done", "4 s/it"]
    assert tab.find(".nbl-progress > [role=progressbar]").get_attribute("aria-valuenow") is None


def test_each_state_of_a_rank_has_its_own_words_and_icon(tab):
    words = {
        "starting": "starting",
        "running": "training",
        "waiting": "waiting in a collective",
        "saving": "saving",
        "asking": "waiting for input",
        "returned": "done",
        "failed": "failed: ValueError: boom",
        "stopped": "stopped",
        "one of tomorrow": "unknown",
    }
    reasons = {"failed": "ValueError: boom"}
    tab.deliver(reset(ranks=[rank(at, state=state, reason=reasons.get(state, "")) for at, state in enumerate(words)]))
    assert tab.texts("td .nbl-state-word") == list(words.values())
    shapes = tab.find("td .nbl-state path").evaluate_all("paths => paths.map((path) => path.getAttribute('d'))")
    assert len(set(shapes)) == len(words)


def test_ranks_that_do_not_come_back_leave_the_table_and_keep_their_logs(tab):
    tab.deliver(reset(run=run(num_processes=3), ranks=[rank(at) for at in range(3)], logs=[log(2, "last words")]))
    assert len(tab.texts("tbody tr td:nth-child(2)")) == 3
    tab.deliver({"type": "update", "run": run(num_processes=1), "ranks": [rank(0, step=26)]})
    assert tab.texts("tbody tr td:nth-child(3)") == ["26"]
    assert "last words" in tab.text(".nbl-log")


def test_rank_table_shows_units_and_marks_the_slowest_rank_by_a_word(tab):
    tab.deliver(reset(ranks=[rank(0, slowest=True), rank(1, step=None, memory=None, returned="0.97")]))
    assert tab.texts("th") == ["Rank", "State", "Step", "Samples/s, all ranks", "Memory", "Last line"]
    assert tab.texts("tbody tr:nth-child(1) td") == [
        "0",
        "training\nslowest",
        "25",
        "800",
        "612 MB",
        "hello from 0",
    ]
    assert tab.texts("tbody tr:nth-child(2) td") == ["1", "training", UNKNOWN, "800", UNKNOWN, "returned 0.97"]


def test_column_of_throughput_appears_once_a_rank_counts_samples(tab):
    tab.deliver(reset(ranks=[rank(number, samples_per_second=None) for number in range(2)]))
    assert tab.texts("th") == ["Rank", "State", "Step", "Memory", "Last line"]
    tab.deliver({"type": "update", "ranks": [rank(1, samples_per_second=12.0)]})
    assert tab.texts("th") == ["Rank", "State", "Step", "Samples/s, all ranks", "Memory", "Last line"]
    assert tab.texts("tbody tr td:nth-child(4)") == [UNKNOWN, "12"]
    gpu = rank(1, samples_per_second=None, gpu_memory=1_000_000_000)
    tab.deliver(reset(ranks=[rank(0, samples_per_second=None), gpu]))
    assert tab.texts("th") == ["Rank", "State", "Step", "Memory", "GPU memory", "Last line"]


def test_columns_keep_their_widths_in_rendered_html(tab):
    tab.deliver(reset(ranks=[rank(0), rank(1)]))
    before = tab.find("th").evaluate_all("cells => cells.map((cell) => cell.offsetWidth)")
    style = """.lab table { table-layout: fixed; margin: 0 auto 1em } .lab tbody tr { background: red }
        .lab td, .lab th, .lab tr { text-align: right; max-width: none; padding: 0.5em }"""
    tab.page.add_style_tag(content=style)
    tab.page.evaluate("document.body.className = 'lab'")
    try:
        assert tab.find("th").evaluate_all("cells => cells.map((cell) => cell.offsetWidth)") == before
        row = tab.find("tbody tr").first
        assert row.evaluate("row => getComputedStyle(row).backgroundColor") == "rgba(0, 0, 0, 0)"
    finally:
        tab.page.evaluate("document.body.className = ''")


def test_gpu_columns_appear_once_a_rank_reports_a_gpu(tab):
    tab.deliver(reset())
    tab.deliver({"type": "update", "ranks": [rank(1, gpu_memory=11_400_000_000, gpu_utilization=0.93)]})
    assert tab.texts("th")[5:7] == ["GPU memory", "GPU"]
    assert [tab.texts(f"tbody tr:nth-child({row}) td")[5:7] for row in (1, 2)] == [
        [UNKNOWN, UNKNOWN],
        ["11.4 GB", "93 %"],
    ]


def test_update_of_one_rank_out_of_64_writes_one_cell(tab):
    tab.deliver(reset(ranks=[rank(number) for number in range(64)]))
    assert tab.find("tbody tr").count() == 64
    watch = """() => {
        window.writes = 0;
        window.watcher = new MutationObserver((all) => { writes += all.length; });
        const everything = { childList: true, subtree: true, characterData: true, attributes: true };
        watcher.observe(document.querySelector("tbody"), everything);
    }"""
    tab.page.evaluate(watch)
    tab.deliver({"type": "update", "ranks": [rank(number, step=26 if number == 9 else 25) for number in range(64)]})
    assert tab.page.evaluate("writes + watcher.takeRecords().length") == 1
    tab.page.evaluate("watcher.disconnect()")
    table = tab.find("[aria-label='Table of ranks']")
    assert table.evaluate("box => box.scrollHeight > box.clientHeight && box.clientHeight < 400")


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


def test_curve_with_replace_drops_its_earlier_points(tab):
    tab.deliver(reset(curves=[curve("loss", 0, waves(100))]))
    tab.deliver({"type": "update", "curves": [curve("loss", 0, [5.0, 7.0], replace=True)]})
    assert tab.text(".nbl-latest") == "7"


def test_value_that_is_not_finite_leaves_a_gap_a_tick_and_a_word(tab):
    values = waves(300)
    values[100:200] = [None] * 100
    tab.deliver(reset(curves=[curve("loss", 0, values)]))
    height = tab.find(PLOT).evaluate("canvas => canvas.height")
    ink = tab.variable("--nbl-rank-0")
    width = tab.width(PLOT)
    middle = set(range(int(0.4 * width), int(0.6 * width)))
    above, on_axis = (middle & tab.columns(PLOT, ink, rows) for rows in ((0, height - 30), (height - 19, height - 15)))
    assert above == set()
    assert len(on_axis) > 0.3 * len(middle)
    assert tab.text(".nbl-latest").startswith("some not finite")
    tab.deliver({"type": "update", "curves": [{"name": "loss", "rank": 0, "steps": [300], "values": [None]}]})
    assert tab.text(".nbl-latest") == "not finite"


@pytest.mark.parametrize("values", [[None], [None, None], [], [0.0], [3.0, 3.0], [1e308, -1e308], [1e-300, 5e-324]])
def test_curve_of_extreme_values_is_drawn_on_linear_and_log_scale(tab, values):
    tab.deliver(reset(curves=[curve("loss", 0, values)]))
    ink = tab.variable("--nbl-rank-0")
    assert bool(tab.columns(PLOT, ink)) == any(value is not None for value in values)
    tab.find("text=Log scale").click()
    tab.settle()
    assert bool(tab.columns(PLOT, ink)) == any(value is not None and value > 0 for value in values)


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


def test_ranks_are_averaged_on_demand_and_by_default_if_there_are_many(tab):
    tab.deliver(reset(curves=[curve("loss", number, [1.0 + number] * 50) for number in range(2)]))
    average = tab.page.get_by_label("Average of ranks")
    assert (average.is_checked(), tab.texts(".nbl-chip")) == (False, ["rank 0", "rank 1"])
    average.check()
    tab.settle()
    tab.find(PLOT).hover()
    tab.settle()
    assert tab.texts(".nbl-tip-row") == ["mean\n1.5", "lowest\n1", "highest\n2"]
    tab.deliver(reset(curves=[curve("loss", number, [1.0 + number] * 50) for number in range(16)]))
    average.uncheck()
    tab.settle()
    assert len(tab.texts(".nbl-chip")) == 16
    tab.find(PLOT).hover()
    tab.settle()
    assert tab.texts(".nbl-tip-row")[-1].startswith("and 8 more")


def test_click_on_a_rank_chip_hides_its_line(tab):
    tab.deliver(reset(curves=[curve("loss", number, waves(200, number)) for number in range(2)]))
    ink = tab.variable("--nbl-rank-1")
    tab.find(".nbl-chip").nth(1).click()
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


def test_arrow_keys_read_values_and_plus_and_escape_zoom(tab):
    tab.deliver(reset(curves=[curve("loss", 0, [float(step) for step in range(1001)])]))
    tab.find(PLOT).focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        tab.page.keyboard.press(key)
    tab.settle()
    assert 500 < int(tab.text(".nbl-tip-title").removeprefix("step ")) < 560
    tab.page.keyboard.press("+")
    tab.settle()
    assert tab.page.get_by_role("button", name="Reset zoom").is_visible()
    tab.page.keyboard.press("Escape")
    assert not tab.page.get_by_role("button", name="Reset zoom").is_visible()


def test_metric_first_seen_in_an_update_gets_a_plot(tab):
    tab.deliver(reset(curves=[curve("loss", 0, waves(100))]))
    tab.deliver({"type": "update", "curves": [{"name": "accuracy", "rank": 0, "steps": [99], "values": [0.5]}]})
    assert tab.texts(".nbl-plot-name") == ["loss", "accuracy"]


def test_200_metrics_are_drawn_12_at_a_time_and_found_by_name(tab):
    tab.deliver(reset(curves=[curve(f"metric_{number}", 0, waves(50)) for number in range(200)]))
    assert tab.find(".nbl-plot").count() == 12
    assert tab.text(".nbl-foot") == "12 of 200 metrics shown\nShow 12 more"
    height = tab.find(".nbl-plots").bounding_box()["height"]
    tab.page.get_by_role("button", name="Show 12 more").click()
    tab.settle()
    assert tab.find(".nbl-plot").count() == 24
    assert tab.find(".nbl-plots").bounding_box()["height"] < 1.1 * height  # The others are scrolled to.
    held = "canvases => canvases.filter((canvas) => canvas.width).length"
    assert tab.find(PLOT).evaluate_all(held) < 24  # those out of sight hold no pixels
    tab.page.get_by_label("Find a metric").fill("_199")
    tab.settle()
    assert tab.texts(".nbl-plot-name") == ["metric_199"]
    tab.page.get_by_label("Find a metric").fill("absent")
    tab.settle()
    assert tab.text(".nbl-foot") == "No metric matches"


def test_pinned_metrics_and_losses_are_drawn_first(tab):
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
        tab.page.mouse.move(box["x"] + box["width"] - 4, box["y"] + 60)
        tab.settle()
        seen.append(tab.text(".nbl-tip-title"))
    assert seen == ["step 99", "9.9 s", "epoch 3.96"]
    # Python draws the picture that stays in the same way.
    drawn = {"type": "draw", "axis": "epoch", "grouped": True, "log": False, "smoothing": 0}
    assert tab.page.evaluate("model.sent.at(-1)") == drawn
    tab.deliver(reset(curves=[curve("loss", 0, waves(100))]))
    assert tab.page.locator("option:has-text('by epoch')").is_hidden()


def test_memory_and_load_are_drawn_from_three_samples_on(tab):
    memory = [curve("memory, GB", rank, [0.3, 0.4]) for rank in range(2)]
    tab.deliver(reset(usage=memory))
    section = tab.page.get_by_role("region", name="Memory and load")
    assert section.is_hidden()
    more = [{**one, "steps": [2], "times": [0.2], "values": [0.5]} for one in memory]
    tab.deliver({"type": "update", "usage": [*more, curve("load, processors", 0, [0.0, 1.0])]})
    assert section.is_visible()
    assert section.locator(".nbl-plot-name").all_inner_texts() == ["memory, GB", "load, processors"]
    assert section.locator(".nbl-latest").all_inner_texts() == ["mean 0.5", "1"]
    tab.deliver(reset())
    assert section.is_hidden()


def test_a_few_kilobytes_do_not_fill_the_axis_of_memory(tab):
    tab.deliver(reset(usage=[curve("memory, GB", 0, [0.185644, 0.185650, 0.185654])]))
    section = tab.page.get_by_role("region", name="Memory and load")
    canvas = ".nbl-grid .nbl-plot-canvas:visible"
    section.scroll_into_view_if_needed()
    tab.settle()
    ink, height = tab.variable("--nbl-rank-0"), section.locator("canvas").evaluate("canvas => canvas.height")
    assert tab.columns(canvas, ink, rows=(height // 4, 3 * height // 4))
    assert not tab.columns(canvas, ink, rows=(0, height // 4))
    # These charts keep their order: nothing can be pinned.
    assert section.get_by_role("button", name="Pin").count() == 0


def test_points_and_charts_are_downloaded(tab):
    tab.deliver(reset(curves=[curve('a "b", c', 0, [1.0, None])]))
    with tab.page.expect_download() as csv:
        tab.page.get_by_role("button", name="CSV").click()
    assert csv.value.suggested_filename == "20261121-142501-train-3f9c.csv"
    head = "metric,rank,step,seconds,value\n"
    assert csv.value.path().read_text() == head + '"a ""b"", c",0,0,0,1\n"a ""b"", c",0,1,0.1,nan\n'
    with tab.page.expect_download() as png:
        tab.page.get_by_role("button", name="as PNG").click()
    assert png.value.path().read_bytes().startswith(b"\x89PNG")


def test_pictures_show_the_newest_and_earlier_ones_by_a_slider(tab):
    def record(step, name="sample"):
        source = f"data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' width='9' height='{step + 1}'/>"
        return {"name": name, "rank": 0, "step": step, "source": source}

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
    tab.deliver(reset(pictures=[{**table, "rows": [["text", "score"], [EVIL, "0.5"]]}]))
    assert tab.texts(".nbl-pictures th, .nbl-pictures td") == ["text", "score", EVIL, "0.5"]
    assert tab.find(".nbl-pictures img").is_hidden()
    with tab.page.expect_download() as csv:
        tab.find(".nbl-pictures").get_by_text("CSV").click()
    assert csv.value.suggested_filename == "answers-rank-0-step-3.csv"
    assert csv.value.path().read_bytes() == b"text,score\nfour,0.5\n"
    assert tab.page.evaluate("window.hacked") is None


def test_100_000_points_are_drawn_in_bounded_memory_and_time(tab):
    feed = """async (count) => {
        const frame = () => new Promise(requestAnimationFrame);
        const valueAt = (step) => (step === 54321 ? 9 : Math.sin(step));
        const send = (steps) => {
            const curve = { name: "loss", rank: 0, steps, values: steps.map(valueAt) };
            const begin = performance.now();
            model.fire("msg:custom", { type: "update", curves: [curve] }, []);
            return performance.now() - begin;
        };
        let longest = 0;
        for (let from = 1; from < count; from += 1000)
            longest = Math.max(longest, send(Array.from({ length: 1000 }, (_, at) => from + at)));
        await frame();
        const begin = performance.now();
        send([count + 1]);
        await frame();
        return [longest, performance.now() - begin];
    }"""
    tab.deliver(reset(curves=[curve("loss", 0, [0.0])]))
    nodes = tab.page.evaluate("document.querySelectorAll('*').length")
    milliseconds = tab.page.evaluate(feed, NUM_POINTS)
    assert max(milliseconds) < 250
    assert tab.page.evaluate("document.querySelectorAll('*').length") == nodes
    # The only peak is kept: nothing else is in the upper half.
    ink = tab.variable("--nbl-rank-0")
    peak = tab.columns(PLOT, ink, rows=(8, 70))
    width = tab.width(PLOT)
    assert 1 <= len(peak) <= 4
    assert min(peak) / width == pytest.approx(0.54, abs=0.03)


def test_timeline_shows_phases_in_colours_letters_and_words(tab):
    tab.deliver(reset(lanes=LANES))
    for look in PHASES.values():
        assert len(tab.columns(TIMELINE, look.colour)) > 50
    words = ["D\ndata", "F\nforward", "B\nbackward", "S\nsync", "O\noptimizer", "other"]
    assert [text.strip() for text in tab.texts(".nbl-phase")] == words
    assert tab.text(".nbl-sync") == "14 % of a window waits for the network"


def test_page_takes_words_limits_and_formats_from_the_legend_of_the_reset(tab):
    message = reset(lanes=LANES, curves=[curve(f"metric{number}", 0, waves(20)) for number in range(5)])
    legend = message["legend"]
    legend["phases"]["sync"] = {"letter": "W", "word": "wait", "colour": "#123456"}
    legend["rank_states"]["running"]["word"] = "computing"
    legend["limits"]["plots"] = 3
    legend["formats"]["digits"] = 2
    tab.deliver(message)
    assert tab.texts(".nbl-phase")[3].split() == ["W", "wait"]
    assert len(tab.columns(TIMELINE, "#123456")) > 50
    assert tab.texts("td .nbl-state-word") == ["computing"] * 2
    assert tab.find(".nbl-plot").count() == 3
    assert tab.text(".nbl-latest") == "2.8"


def test_phases_have_the_colours_of_the_static_picture_in_both_themes(tab):
    tab.deliver(reset(lanes=LANES))
    read = "all => all.map((one) => [one.dataset.phase, getComputedStyle(one).backgroundColor])"
    for theme in ("light", "dark"):
        tab.page.emulate_media(color_scheme=theme)
        colours = dict(tab.find(".nbl-phase i").evaluate_all(read))
        for phase, look in PHASES.items():
            red, green, blue = bytes.fromhex(look.colour[1:])
            assert colours[phase] == f"rgb({red}, {green}, {blue})"


def test_update_before_the_reset_is_ignored(tab):
    tab.deliver({"type": "update", "ranks": [rank(0)], "curves": [curve("loss", 0, waves(20))]})
    assert tab.find("tbody tr, .nbl-plot").count() == 0
    tab.deliver(reset())
    assert tab.find("tbody tr").count() == 2


def test_hover_over_a_span_shows_its_phase_start_and_length(tab):
    tab.deliver(reset(lanes=LANES))
    canvas = tab.find(TIMELINE)
    box = canvas.bounding_box()
    tab.page.mouse.move(box["x"] + box["width"] - 4, box["y"] + box["height"] - 10)
    tip = tab.text(".nbl-section[aria-label=Timeline] .nbl-tip")
    assert tip.split("\n") == ["rank 1, optimizer", "took", "100 ms", "at", "7.5 s"]


def test_timeline_ends_at_the_last_common_report_unless_a_rank_is_stuck(tab):
    late = {"rank": 0, "spans": [["step", 8.0, 0.5]]}
    tab.deliver(reset(lanes=[*LANES, late]))
    before = tab.picture(TIMELINE)
    tab.deliver({"type": "update", "lanes": [{"rank": 0, "spans": [["step", 8.6, 0.5]]}]})
    assert tab.picture(TIMELINE) == before
    tab.deliver({"type": "update", "lanes": [{"rank": 0, "spans": [["step", 12.0, 0.5]]}]})
    assert tab.picture(TIMELINE) != before


def lines(tab: Tab) -> list[str]:
    return tab.texts(".nbl-line-text")


def test_logs_are_shown_merged_with_rank_labels_and_one_by_one(tab):
    tab.deliver(reset(logs=[log(0, "one"), log(1, "two")]))
    tab.deliver({"type": "update", "logs": [log(0, "three")]})
    assert list(zip(tab.texts(".nbl-line-rank"), lines(tab), strict=True)) == [
        ("0", "one"),
        ("1", "two"),
        ("0", "three"),
    ]
    tab.page.get_by_role("tab", name="rank 1").click()
    assert lines(tab) == ["two"]


def test_line_that_arrives_in_pieces_is_shown_as_in_a_terminal(tab):
    tab.deliver(reset(logs=[{"rank": 0, "text": "\x1b[31mred\x1b[0"}]))
    tab.deliver({"type": "update", "logs": [{"rank": 0, "text": "m and\r 10 %\r 20 %"}]})
    assert lines(tab) == [" 20 %"]
    tab.deliver({"type": "update", "logs": [{"rank": 0, "text": "\r 30 %\r\n\x1b[1mbold\x1b[0m\tend\x07\n"}]})
    assert tab.find(".nbl-line-text").all_text_contents() == [" 30 %", "bold\tend"]


def test_search_shows_matching_lines_and_marks_the_words(tab):
    tab.deliver(reset(logs=[log(0, "a Loss of 1", "nothing", "loss and LOSS")]))
    tab.page.get_by_label("Search the log").fill("loss")
    assert (lines(tab), tab.text(".nbl-count")) == (["a Loss of 1", "loss and LOSS"], "2 of 3 lines")
    assert tab.texts(".nbl-line mark") == ["Loss", "loss", "LOSS"]
    tab.page.get_by_label("Search the log").fill("absent")
    assert tab.text(".nbl-count") == "No line contains “absent” (3 searched)"


def test_only_differences_hides_lines_that_every_rank_wrote(tab):
    tab.deliver(reset(logs=[log(0, "same", "mine"), log(1, "same", "yours")]))
    tab.page.get_by_label("Only differences").check()
    assert lines(tab) == ["mine", "yours"]
    tab.deliver({"type": "update", "logs": [log(1, "mine")]})
    assert lines(tab) == ["yours"]


def test_log_keeps_5_000_lines_and_draws_500(tab):
    tab.deliver(reset(logs=[log(0, *[f"line {number}" for number in range(12_000)])]))
    assert (tab.find(".nbl-line").count(), lines(tab)[-1]) == (500, "line 11999")
    assert tab.text(".nbl-count") == "Last 500 of 5,000 lines"


def test_log_follows_new_lines_only_while_scrolled_to_its_end(tab):
    at_end = "box => box.scrollHeight - box.scrollTop - box.clientHeight < 24"
    tab.deliver(reset(logs=[log(0, *[f"line {number}" for number in range(100)])]))
    panel = tab.find("[role=tabpanel]")
    assert panel.evaluate(at_end)
    tab.deliver({"type": "update", "logs": [log(0, "more")]})
    assert panel.evaluate(at_end)
    panel.evaluate("box => { box.scrollTop = 100; }")
    tab.deliver({"type": "update", "logs": [log(0, "and more")]})
    assert panel.evaluate("box => box.scrollTop") == 100


def test_arrow_keys_move_between_log_tabs_and_tab_key_stops_once(tab):
    tab.deliver(reset(logs=[log(0, "zero"), log(1, "one")]))
    tab.find("[role=tab]").first.focus()
    walked = []
    for key in ("ArrowRight", "End", "ArrowRight", "ArrowLeft", "Home"):
        tab.page.keyboard.press(key)
        walked.append(tab.page.evaluate("document.activeElement.textContent"))
    assert walked == ["rank 0", "rank 1", "all", "rank 1", "all"]
    assert tab.find("[role=tab][tabindex='0']").count() == 1


def test_culprit_is_shown_with_its_traceback_and_victims_are_folded(tab):
    culprit = {"rank": 1, "summary": "ValueError: boom", "traceback": "Traceback:\n  here", "victim": False}
    victim = {"rank": 0, "summary": "RuntimeError: gone", "traceback": "Traceback:\n  there", "victim": True}
    message = reset(
        run=run(state="failed", is_over=True, error="ValueError: boom"),
        errors=[{**victim, "last_lines": []}, {**culprit, "last_lines": ["the last"]}],
    )
    tab.deliver(message)
    assert tab.texts(".nbl-errors > div .nbl-error-head")[0] == "rank 1\nValueError: boom"
    assert tab.find("text=Traceback:").first.is_visible()
    assert not tab.find("text=RuntimeError: gone").is_visible()
    tab.page.get_by_text("1 rank failed as a consequence (caused by rank 1)").click()
    assert tab.find("text=RuntimeError: gone").is_visible()
    assert tab.text(".nbl-unseen") == "train: failed"


def test_equal_failures_are_one_box_with_one_traceback(tab):
    failure = {"summary": "ValueError: boom", "traceback": "Traceback:\n  here", "victim": False, "last_lines": []}
    errors = [{**failure, "rank": number} for number in (1, 0, 2, 5)]
    tab.deliver(reset(run=run(state="failed", is_over=True), errors=errors[:1]))
    assert tab.texts(".nbl-error-head") == ["rank 1\nValueError: boom"]
    tab.deliver({"type": "update", "errors": [*errors[1:], {**failure, "rank": 3, "summary": "KeyError: 3"}]})
    assert tab.texts(".nbl-error-head") == ["ranks 0-2, 5\nValueError: boom", "rank 3\nKeyError: 3"]
    assert tab.find(".nbl-error pre").count() == 2
    spoken = [{**failure, "rank": number, "last_lines": [f"last {number // 2}"]} for number in range(3)]
    tab.deliver(reset(run=run(state="failed", is_over=True), errors=spoken))
    titles = ["Traceback", "Last lines of output of ranks 0, 1", "Last lines of output of rank 2"]
    assert tab.texts(".nbl-error summary") == titles


def test_run_stopped_on_request_shows_no_error(tab):
    message = reset(
        run=run(state="stopped", is_over=True, error="RunStoppedError: the run was stopped"),
        ranks=[rank(0, state="stopped", reason="KeyboardInterrupt"), rank(1, state="stopped")],
    )
    tab.deliver(message)
    assert not tab.find(".nbl-errors").is_visible()
    assert tab.texts(".nbl-state-word") == ["stopped", "stopped", "stopped"]
    assert tab.find("[data-tone=bad]").count() == 0


def test_error_of_the_run_without_a_failed_rank_is_shown(tab):
    tab.deliver(reset(run=run(state="failed", is_over=True, error="TimeoutError: 60 s are over")))
    assert tab.text(".nbl-error-line") == "TimeoutError: 60 s are over"


def test_notices_are_shown_newest_first_and_the_oldest_are_dropped(tab):
    tab.deliver(reset(notices=["Stacks of 2 ranks\nrank 0: train"]))
    assert tab.find("text=rank 0: train").is_visible()
    tab.deliver({"type": "update", "notices": [f"notice {number}" for number in range(50)]})
    assert (tab.find(".nbl-notice").count(), tab.texts(".nbl-notice")[0]) == (20, "notice 49")


RECORD = """() => {
    model.traits.key = "k1";
    cleanups.push(monitor.initialize({ model }));
    const record = '<div id="record" data-nbl-explore="k1"><p>tables</p></div>';
    document.body.insertAdjacentHTML("beforeend", `<div id="place">${record}<p data-nbl-cover="k1">drawing</p></div>`);
}"""


def test_saved_picture_is_covered_by_the_monitor_while_its_model_lives(tab):
    tab.page.evaluate(RECORD)
    tab.settle()
    assert tab.find("#record > p").is_visible()  # Until the kernel has answered.
    tab.deliver(reset(run=run(state="done", is_over=True), curves=[curve("loss", 0, waves(100))]))
    assert tab.text("#record .nbl-plot-name") == "loss"
    assert not tab.find("#record > p").is_visible()
    assert not tab.find("[data-nbl-cover]").is_visible()
    tab.page.evaluate("cleanups.pop()()")
    assert tab.find("#record .nbl-monitor").count() == 0
    assert tab.text("#place") == "tables\n\ndrawing"


def test_covering_view_takes_over_data_and_options_of_the_closed_view(tab):
    tab.page.evaluate("() => { model.traits.key = 'k1'; cleanups.pop()(); mount(); }")
    tab.deliver(reset(curves=[curve(name, 0, waves(100)) for name in ("loss", "accuracy")], logs=[log(0, "one")]))
    tab.page.get_by_role("button", name="Pin accuracy").click()
    tab.page.evaluate("cleanups.pop()()")
    tab.page.evaluate(RECORD)
    tab.settle()
    assert tab.texts("#record .nbl-plot-name") == ["accuracy", "loss"]
    assert tab.texts("#record .nbl-line-text") == ["one"]


def test_view_is_closed_when_its_picture_leaves_the_page(tab):
    tab.page.evaluate(RECORD)
    tab.deliver(reset())
    tab.page.evaluate("document.querySelector('#place').remove()")
    tab.settle()
    assert tab.page.evaluate("[...model.calls.values()].flat().length") == 3  # Those of the first view alone.


def test_each_button_sends_its_message(tab):
    tab.deliver(reset())
    for name in ("Stop after this step", "Interrupt", "Dump stacks", "Save now", "Pause"):
        button = tab.page.get_by_role("button", name=name)
        assert button.get_attribute("title")
        button.click()
    assert tab.sent() == ["hello", *ACTIONS]
    assert tab.text(".nbl-hint") == "Requested: Pause."


def test_only_buttons_that_the_run_allows_are_enabled(tab):
    for allowed in ACTIONS:
        tab.deliver(reset(run=run(actions={name: name == allowed for name in ACTIONS})))
        on = tab.find(".nbl-button[data-action]:enabled").evaluate_all("all => all.map((one) => one.dataset.action)")
        assert on == [allowed]


def test_action_hint_of_the_run_is_shown_beside_the_buttons(tab):
    tab.deliver(reset(run=run(action_hint="Heard when the cell ends")))
    assert tab.text(".nbl-hint") == "Heard when the cell ends"


def test_finished_run_stays_visible_with_its_buttons_disabled(tab):
    tab.deliver(reset(curves=[curve("loss", 0, waves(100))], logs=[log(0, "one")], lanes=LANES))
    tab.deliver({"type": "update", "run": run(state="done", is_over=True, seconds=75.2)})
    assert tab.find(".nbl-button[data-action]:enabled").count() == 0
    assert tab.page.evaluate("running.interval.size") == 0
    assert tab.text(".nbl-identity").split("\n") == ["done", "train", "1 min 15 s"]
    assert (lines(tab), tab.texts(".nbl-plot-name")) == (["one"], ["loss"])


def test_clock_ticks_between_updates(tab):
    tab.deliver(reset(run=run(seconds=59.0)))
    tab.page.wait_for_function("document.querySelector('.nbl-clock').textContent === '1 min 01 s'")
    assert tab.page.evaluate("running.interval.size") == 1


@pytest.mark.parametrize("way", ["throws", "rejects"])
def test_closed_comm_shows_kernel_not_responding(tab, way):
    tab.deliver(reset())
    send = "model.isDead = true" if way == "throws" else "model.send = () => Promise.reject(new Error('closed'))"
    tab.page.evaluate(f"() => {{ {send}; }}")
    tab.page.get_by_role("button", name="Interrupt").click()
    tab.settle()
    assert tab.text(".nbl-hint") == "Kernel not responding. Last update shown."
    assert tab.text(".nbl-header .nbl-state-word") == "not responding"
    assert tab.find(".nbl-button[data-action]:enabled").count() == 0


KERNEL = """() => {
    const calls = new Set();
    const statusChanged = { connect: (call) => calls.add(call), disconnect: (call) => calls.delete(call) };
    const tell = (status) => { kernel.status = status; for (const call of calls) call(kernel, status); };
    window.kernel = { status: "busy", statusChanged, tell, calls };
    model.widget_manager = { kernel };
    cleanups.splice(0).forEach((cleanup) => cleanup());
    mount();
}"""


@pytest.mark.parametrize("status", ["restarting", "autorestarting", "dead"])
def test_live_run_is_lost_when_its_kernel_restarts(tab, status):
    tab.page.evaluate(KERNEL)
    tab.deliver(reset(ranks=[rank(0), rank(1, state="returned")]))
    tab.page.evaluate("status => kernel.tell(status)", status)
    tab.deliver({"type": "update", "run": run()})  # It was on its way.
    tab.page.evaluate("kernel.tell('idle')")
    tab.page.evaluate("model.fire('comm_live_update')")
    tab.settle()
    assert tab.text(".nbl-header .nbl-state-word") == "lost"
    assert tab.texts("tbody .nbl-state-word") == ["lost", "done"]
    assert 'open_run("20261121-142501-train-3f9c") shows what its folder holds' in tab.text(".nbl-hint")
    assert tab.text(".nbl-unseen") == "train: lost"
    assert (tab.find(".nbl-button[data-action]:enabled").count(), tab.text(".nbl-pace")) == (0, "")
    tab.page.evaluate("cleanups.splice(0).forEach((cleanup) => cleanup())")
    assert tab.page.evaluate("kernel.calls.size") == 0


def test_finished_run_stays_done_when_its_kernel_restarts(tab):
    tab.page.evaluate(KERNEL)
    tab.deliver(reset(run=run(state="done", is_over=True)))
    tab.page.evaluate("kernel.tell('restarting')")
    tab.settle()
    assert tab.text(".nbl-header .nbl-state-word") == "done"
    assert not tab.find(".nbl-hint").is_visible()


def test_kernel_silent_for_10_seconds_is_shown_as_not_responding(window):
    window.clock.install()
    with open_tab(window) as tab:
        tab.deliver(reset())
        window.clock.run_for(9_000)
        tab.deliver({"type": "update", "run": run()})
        window.clock.run_for(9_000)
        assert tab.text(".nbl-header .nbl-state-word") == "running"
        window.clock.run_for(3_000)
        assert tab.text(".nbl-header .nbl-state-word") == "not responding"
        assert tab.text(".nbl-hint") == "Kernel not responding. Last update shown."
        tab.deliver({"type": "update", "run": run()})
        assert tab.text(".nbl-header .nbl-state-word") == "running"
    window.clock.resume()


def test_reconnected_kernel_is_asked_for_the_run_again(tab):
    tab.deliver(reset())
    tab.page.evaluate("model.fire('comm_live_update')")
    tab.settle()
    assert tab.text(".nbl-hint") == "Kernel not responding. Last update shown."
    assert tab.sent() == ["hello", "hello"]
    tab.deliver(reset())
    assert not tab.find(".nbl-hint").is_visible()
    assert tab.find(".nbl-button[data-action]:enabled").count() == 5


def test_two_views_of_one_model_have_independent_states(tab):
    tab.page.evaluate("mount()")
    assert tab.sent() == ["hello", "hello"]
    tab.deliver(reset(logs=[log(0, "zero"), log(1, "one")], curves=[curve("loss", 0, waves(50))]))
    tab.page.get_by_role("tab", name="rank 1").nth(1).click()
    assert lines(tab) == ["zero", "one", "one"]
    tab.page.evaluate("cleanups.shift()()")
    tab.deliver({"type": "update", "logs": [log(1, "more")]})
    assert lines(tab) == ["one", "more"]


def test_closed_view_ignores_messages_and_themes(tab):
    tab.deliver(reset())
    root = tab.find(".nbl-monitor").element_handle()
    tab.page.evaluate("cleanups.pop()()")
    shown = root.evaluate("root => root.outerHTML")
    tab.page.emulate_media(color_scheme="dark")
    tab.page.evaluate("document.body.dataset.jpThemeName = 'another'")
    tab.deliver(reset(run=run(name="another")))
    assert root.evaluate("root => root.outerHTML") == shown


def test_second_reset_shows_nothing_twice_and_keeps_the_selected_tab(tab):
    message = reset(logs=[log(0, "zero"), log(1, "one")], curves=[curve("loss", 0, waves(50))], notices=["a notice"])
    tab.deliver(message)
    tab.page.get_by_role("tab", name="rank 1").click()
    tab.deliver(message)
    assert (lines(tab), tab.texts(".nbl-plot-name"), tab.texts(".nbl-notice")) == (["one"], ["loss"], ["a notice"])


def test_unknown_or_empty_messages_are_ignored(tab):
    tab.deliver(reset())
    before = tab.text(".nbl-monitor")
    for message in (None, "text", 3, {}, {"type": "update"}, {"type": "of tomorrow", "ranks": [rank(0, step=99)]}):
        tab.deliver(message)
    assert tab.text(".nbl-monitor") == before


def test_html_in_text_of_the_user_is_not_interpreted(tab):
    error = {"rank": 0, "summary": EVIL, "traceback": EVIL, "victim": False, "last_lines": [EVIL]}
    message = reset(
        run=run(
            id=EVIL,
            name=EVIL,
            summary=EVIL,
            arguments=EVIL,
            error=EVIL,
            effective_batch=EVIL,
            action_hint=EVIL,
            progress={"done": 1, "total": 2, "rate": 1, "seconds_left": 1, "left": EVIL, "description": EVIL},
            sync={"share": 0, "saved_seconds": 0, "text": EVIL},
        ),
        ranks=[rank(0, reason=EVIL, last_line=EVIL, state="failed"), rank(1, returned=EVIL)],
        curves=[curve(EVIL, 0, waves(30))],
        lanes=[{"rank": 0, "spans": [[EVIL, 0, 1], ["step", 1, 1]]}],
        logs=[log(0, EVIL), log(1, EVIL)],
        errors=[error, {**error, "rank": 1, "victim": True}],
        notices=[EVIL, f"{EVIL}\n{EVIL}"],
    )
    tab.deliver(message)
    tab.page.get_by_label("Search the log").fill("<script>")
    canvas = tab.find(TIMELINE)
    canvas.hover()
    tab.find(PLOT).hover()
    tab.settle()
    assert tab.find(".nbl-monitor img, .nbl-monitor script").count() == 0
    assert tab.page.evaluate("window.hacked") is None
    for place in (".nbl-name", ".nbl-summary", ".nbl-hint", ".nbl-error code", ".nbl-plot-name", ".nbl-sync"):
        assert EVIL in tab.find(place).first.text_content()


@pytest.mark.parametrize("width", [600, 360])
def test_narrow_page_does_not_scroll_sideways(tab, width):
    tab.page.set_viewport_size({"width": width, "height": 900})
    long = "x" * 400
    tab.deliver(
        reset(
            run=run(name=long, summary=long, action_hint=long),
            ranks=[rank(number, last_line=long, gpu_memory=1, gpu_utilization=1.0) for number in range(64)],
            curves=[curve(f"{long}{number}", 0, waves(50)) for number in range(5)],
            lanes=LANES,
            logs=[log(number, long) for number in range(64)],
            errors=[{"rank": 0, "summary": long, "traceback": long, "victim": False, "last_lines": [long]}],
            notices=[long],
        )
    )
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


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize(("scheme", "ground"), [("light", "#ffffff"), ("dark", "#17191d")])
def test_colours_have_enough_contrast_to_the_background(tab, scheme, ground):
    tab.page.emulate_media(color_scheme=scheme)
    tab.settle()
    names = {f"--nbl-rank-{number}": 3.0 for number in range(len(LIGHT.ranks))}
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
    while "Search the log" not in reached:
        tab.page.keyboard.press("Tab")
        name, outline = tab.page.evaluate(look)
        assert outline != "none", name
        assert name not in reached, f"round again after {reached}"
        reached.append(name)
    wanted = (
        *("Stop after this step", "Interrupt", "Dump stacks", "Save now", "Each rank", "Table of ranks"),
        *("Average of ranks", "Log scale", "Smoothing", "rank 0", "rank 1", "loss", "Steps that", "Lanes", "Search"),
    )
    assert [name for name in wanted if not any(re.match(name, one) for one in reached)] == []


def test_nothing_is_animated_with_reduced_motion(tab):
    tab.deliver(reset())
    tab.page.emulate_media(reduced_motion="reduce")
    moving = "all => all.filter((one) => parseFloat(getComputedStyle(one).transitionDuration) > 0).length"
    assert tab.find(".nbl-monitor *").evaluate_all(moving) == 0


def test_canvas_out_of_sight_is_not_drawn(tab):
    tab.page.set_viewport_size({"width": 1000, "height": 300})
    tab.deliver(reset(curves=[curve("loss", 0, waves(100))], lanes=LANES))
    canvas = tab.find(TIMELINE)
    assert canvas.evaluate("canvas => canvas.width") == 0
    canvas.scroll_into_view_if_needed()
    tab.settle()
    assert canvas.evaluate("canvas => canvas.width") > 0


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
    assert 1 <= tab.page.evaluate(flood, {"type": "update", "curves": [curve("loss", 0, [1.0])]}) <= 2
