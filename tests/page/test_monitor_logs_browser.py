"""Logs, failures and notices of the monitor's page in a real browser."""

from __future__ import annotations

import dataclasses

from notebook_launcher.history.schema import RankFailure
from tests.support.monitor_page import errors, lines, log, rank, reset, run

PART = "Logs"


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
    tab.page.get_by_role("tab", name="all", exact=True).focus()
    walked = []
    for key in ("ArrowRight", "End", "ArrowRight", "ArrowLeft", "Home"):
        tab.page.keyboard.press(key)
        walked.append(tab.page.evaluate("document.activeElement.textContent"))
    assert walked == ["rank 0", "rank 1", "all", "rank 1", "all"]
    assert tab.find("[role=tab][tabindex='0']").all_inner_texts() == ["Logs", "all"]


def test_culprit_is_shown_with_its_traceback_and_victims_are_folded(tab):
    trace = "Traceback:\n  here"
    boom = [RankFailure(rank=rank, summary="ValueError: boom", traceback=trace) for rank in (1, 0, 2, 5)]
    tab.deliver(reset(run=run(state="failed", is_over=True, error="ValueError: boom"), errors=errors(boom[0])))
    assert tab.texts(".nbl-error-head") == ["rank 1\nValueError: boom"]
    assert tab.text(".nbl-unseen") == "train: failed"
    spoken = [dataclasses.replace(boom[at], last_lines=(f"last {at // 2}",)) for at in (0, 1, 2)]
    victim = RankFailure(rank=3, summary="RuntimeError: gone", traceback=trace, victim=True)
    tab.deliver({"type": "update", "errors": errors(victim, *spoken, RankFailure(rank=7, summary="KeyError: 3"))})
    assert tab.texts(".nbl-errors > div .nbl-error-head") == ["ranks 0-2\nValueError: boom", "rank 7\nKeyError: 3"]
    titles = ["Traceback", "Last lines of output of ranks 0, 1", "Last lines of output of rank 2"]
    assert tab.texts(".nbl-errors > div .nbl-error summary") == titles
    assert tab.find("text=Traceback:").first.is_visible()
    assert not tab.find("text=RuntimeError: gone").is_visible()
    tab.page.get_by_text("1 rank failed as a consequence (caused by rank 1)").click()
    assert tab.find("text=RuntimeError: gone").is_visible()


def test_error_of_a_run_without_a_failed_rank_is_shown_unless_it_was_stopped_on_request(tab):
    message = reset(
        run=run(state="stopped", is_over=True, error="RunStoppedError: the run was stopped"),
        ranks=[rank(0, state="stopped", reason="KeyboardInterrupt"), rank(1, state="stopped")],
    )
    tab.deliver(message)
    assert not tab.find(".nbl-errors").is_visible()
    assert tab.texts(".nbl-state-word") == ["stopped", "stopped", "stopped"]
    assert tab.find("[data-tone=bad]").count() == 0
    tab.deliver(reset(run=run(state="failed", is_over=True, error="TimeoutError: 60 s are over")))
    assert tab.text(".nbl-error-line") == "TimeoutError: 60 s are over"


def test_notices_are_shown_newest_first_and_the_oldest_are_dropped(tab):
    tab.deliver(reset(notices=["Stacks of 2 ranks\nrank 0: train"]))
    assert tab.find("text=rank 0: train").is_visible()
    tab.deliver({"type": "update", "notices": [f"notice {number}" for number in range(50)]})
    assert (tab.find(".nbl-notice").count(), tab.texts(".nbl-notice")[0]) == (20, "notice 49")
