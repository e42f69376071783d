"""Views of one monitor, its saved picture, and the loss of its kernel, in a real browser."""

from __future__ import annotations

import pytest

from tests.support.monitor_page import LISTENERS, curve, lines, log, open_tab, rank, reset, run, waves

RECORD = """() => {
    model.traits.key = "k1";
    cleanups.push(widget.initialize({ model }));
    const record = '<div id="record" data-nbl-explore="k1"><p>tables</p></div>';
    document.body.insertAdjacentHTML("beforeend", `<div id="place">${record}<p data-nbl-cover="k1">drawing</p></div>`);
}"""

KERNEL = """() => {
    const calls = new Set();
    const statusChanged = { connect: (call) => calls.add(call), disconnect: (call) => calls.delete(call) };
    const tell = (status) => { kernel.status = status; for (const call of calls) call(kernel, status); };
    window.kernel = { status: "busy", statusChanged, tell, calls };
    model.widget_manager = { kernel };
    cleanups.splice(0).forEach((cleanup) => cleanup());
    mount();
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
    tab.open("Logs")
    assert tab.texts("#record .nbl-line-text") == ["one"]


def test_view_is_closed_when_its_picture_leaves_the_page(tab):
    tab.page.evaluate(RECORD)
    tab.deliver(reset())
    tab.page.evaluate("document.querySelector('#place').remove()")
    tab.settle()
    assert tab.page.evaluate(LISTENERS) == 3  # Those of the first view alone.


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


def test_live_run_is_lost_when_its_kernel_restarts(tab):
    tab.page.evaluate(KERNEL)
    tab.deliver(reset(ranks=[rank(0), rank(1, state="returned")]))
    tab.page.evaluate("kernel.tell('autorestarting')")
    tab.deliver({"type": "update", "run": run()})  # It was on its way.
    tab.page.evaluate("kernel.tell('idle')")
    tab.page.evaluate("model.fire('comm_live_update')")
    tab.settle()
    assert tab.text(".nbl-header .nbl-state-word") == "lost"
    assert tab.texts("tbody .nbl-state-word") == ["lost", "done"]
    assert tab.text(".nbl-hint") == "The kernel ended."
    assert tab.text(".nbl-unseen") == "train: lost"
    assert (tab.find(".nbl-button[data-action]:enabled").count(), tab.text(".nbl-pace")) == (0, "")
    tab.page.evaluate("cleanups.splice(0).forEach((cleanup) => cleanup())")
    assert tab.page.evaluate("kernel.calls.size") == 0


def test_detached_run_continues_when_its_kernel_restarts(tab):
    tab.page.evaluate(KERNEL)
    tab.deliver(reset(run=run(outlives=True, lost_hint='the run continues: attach("train-3f9c")')))
    tab.page.evaluate("kernel.tell('restarting')")
    tab.settle()
    assert tab.text(".nbl-header .nbl-state-word") == "continues elsewhere"
    assert 'the run continues: attach("train-3f9c")' in tab.text(".nbl-hint")


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


def test_two_views_of_one_model_have_independent_states(tab):
    tab.page.evaluate("mount()")
    assert tab.sent() == ["hello", "hello"]
    tab.deliver(reset(logs=[log(0, "zero"), log(1, "one")], curves=[curve("loss", 0, waves(50))]))
    tab.open("Logs")
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
    tab.open("Logs")
    tab.deliver(message)
    tab.page.get_by_role("tab", name="rank 1").click()
    tab.deliver(message)
    assert (lines(tab), tab.texts(".nbl-plot-name"), tab.texts(".nbl-notice")) == (["one"], ["loss"], ["a notice"])
