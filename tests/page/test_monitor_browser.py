"""The monitor's page in a real browser, with a fake model: the run, its ranks, the timeline and the buttons."""

from __future__ import annotations

from notebook_launcher.drawing.legend import PHASES
from tests.support.monitor_page import ACTIONS, EVIL, LANES, curve, lines, log, rank, reset, run, waves

UNKNOWN = "\N{EN DASH}"


def background(element):
    return element.evaluate("one => getComputedStyle(one).backgroundColor")


def rgb(colour):
    return "rgb({}, {}, {})".format(*bytes.fromhex(colour[1:]))


def seconds_in_sight(tab):
    """Return the first and the last second of the timeline's window."""
    titles = tab.find(".nbl-lane i").evaluate_all("all => all.map((one) => one.title)")
    starts = [float(title.partition(" at ")[2].split()[0]) for title in titles]
    return min(starts), max(starts)


def test_view_sends_hello_and_shows_the_run_of_the_reset(tab):
    assert tab.sent() == ["hello"]
    assert "waiting for the kernel" in tab.text(".nbl-header")
    tab.deliver(reset())
    assert tab.text(".nbl-identity").split("\n") == ["running", "train", "1 min 01 s", "about 12 min left"]
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
    tab.find(".nbl-progress summary").click()
    tab.deliver({"type": "update", "ranks": [rank(1, done=24)]})
    assert tab.texts(".nbl-each-text") == ["25 of 100 (25 %)", "24 of 100 (24 %)"]


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
    assert "last words" in lines(tab)


def test_rank_table_shows_units_marks_the_slowest_rank_and_has_the_columns_that_are_known(tab):
    tab.deliver(reset(ranks=[rank(0, slowest=True), rank(1, step=None, memory=None, returned="0.97")]))
    assert tab.texts("th") == ["Rank", "State", "Step", "Samples/s, all ranks", "Memory", "Last line"]
    cells = ["0", "training\nslowest", "25", "800", "612 MB", "hello from 0"]
    assert tab.texts("tbody tr:nth-child(1) td") == cells
    assert tab.texts("tbody tr:nth-child(2) td") == ["1", "training", UNKNOWN, "800", UNKNOWN, "returned 0.97"]
    tab.deliver(reset(ranks=[rank(number, samples_per_second=None) for number in range(2)]))
    assert tab.texts("th") == ["Rank", "State", "Step", "Memory", "Last line"]
    tab.deliver({"type": "update", "ranks": [rank(1, samples_per_second=12.0, gpu_memory=10**9)]})
    assert tab.texts("th") == ["Rank", "State", "Step", "Samples/s, all ranks", "Memory", "GPU memory", "Last line"]
    assert tab.texts("tbody tr td:nth-child(4)") == [UNKNOWN, "12"]


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


def test_timeline_shows_phases_in_colours_letters_and_words(tab):
    tab.open("Timeline")
    tab.deliver(reset(lanes=LANES))
    for phase, look in PHASES.items():
        spans = tab.find(f".nbl-lane i[data-phase={phase}]")
        assert spans.count() == 8  # Of four steps on two ranks.
        assert (spans.first.inner_text(), background(spans.first)) == (look.letter, rgb(look.colour))
    words = ["D\ndata", "F\nforward", "B\nbackward", "S\nsync", "O\noptimizer", "other"]
    assert [text.strip() for text in tab.texts(".nbl-phase")] == words
    assert tab.text(".nbl-sync") == "14 % of a window waits for the network"
    assert tab.find(".nbl-lane i").last.get_attribute("title") == "rank 1, optimizer: took 100 ms at 7.5 s"


def test_timeline_shows_as_many_steps_as_chosen_up_to_the_last_common_report(tab):
    late = {"rank": 0, "spans": [["step", 8.0, 0.5]]}
    tab.open("Timeline")
    tab.deliver(reset(lanes=[*LANES, late]))
    assert seconds_in_sight(tab) == (4.0, 7.5)
    tab.deliver({"type": "update", "lanes": [{"rank": 0, "spans": [["step", 8.6, 0.5]]}]})
    assert seconds_in_sight(tab) == (4.0, 7.5)
    # A rank that reports nothing for two seconds is stuck.
    tab.deliver({"type": "update", "lanes": [{"rank": 0, "spans": [["step", 12.0, 0.5]]}]})
    assert seconds_in_sight(tab)[1] == 12.0
    tab.page.get_by_label("Steps that the timeline shows").select_option("all kept steps")
    assert tab.find(".nbl-lane i").count() == 83


def test_each_button_sends_its_message_if_the_run_allows_it(tab):
    tab.deliver(reset())
    for name in ("Stop after this step", "Interrupt", "Dump stacks", "Save now", "Pause"):
        button = tab.page.get_by_role("button", name=name)
        assert button.get_attribute("title")
        button.click()
    assert tab.sent() == ["hello", *ACTIONS]
    assert tab.text(".nbl-hint") == "Requested: Pause."
    for allowed in ACTIONS:
        tab.deliver(reset(run=run(actions={name: name == allowed for name in ACTIONS})))
        on = tab.find(".nbl-button[data-action]:enabled").evaluate_all("all => all.map((one) => one.dataset.action)")
        assert on == [allowed]


def test_clock_ticks_between_updates_until_the_run_is_over_and_stays_visible_without_buttons(tab):
    tab.deliver(reset(run=run(seconds=59.0), curves=[curve("loss", 0, waves(100))], logs=[log(0, "one")], lanes=LANES))
    tab.page.wait_for_function("document.querySelector('.nbl-clock').textContent === '1 min 01 s'")
    assert tab.page.evaluate("running.interval.size") == 1
    tab.deliver({"type": "update", "run": run(state="done", is_over=True, seconds=75.2)})
    assert tab.find(".nbl-button[data-action]:enabled").count() == 0
    assert tab.page.evaluate("running.interval.size") == 0
    assert tab.text(".nbl-identity").split("\n") == ["done", "train", "1 min 15 s"]
    assert (lines(tab), tab.texts(".nbl-plot-name")) == (["one"], ["loss"])


OPERATED = {"button", "checkbox", "combobox", "link", "searchbox", "slider", "spinbutton", "tab", "textbox", "image"}


def test_screen_reader_gets_a_name_for_every_control_and_plot_of_every_tab(tab):
    tab.deliver(reset(curves=[curve("loss", values=[3.0, 2.0, 0.5])], lanes=LANES, logs=[log(0, "hello")]))
    session = tab.page.context.new_cdp_session(tab.page)
    spoken = set()
    for each in tab.find(".nbl-tabs").first.get_by_role("tab").all():
        each.click()
        nodes = session.send("Accessibility.getFullAXTree")["nodes"]  # Chromium's, which a screen reader reads aloud.
        seen = [node for node in nodes if not node["ignored"]]
        spoken |= {(node["role"]["value"].lower(), node.get("name", {}).get("value", "").strip()) for node in seen}
    assert [role for role, name in spoken if role in OPERATED and not name] == []
    assert {"searchbox", "slider", "spinbutton", "combobox", "image"} <= {role for role, _ in spoken}
    assert ("image", "loss, last value 0.5. Arrow keys read values, plus and minus zoom, Escape shows all.") in spoken
