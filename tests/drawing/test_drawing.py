"""Runs as static HTML, SVG and text: well-formed, escaped, bounded, legible, whatever the run was."""

from __future__ import annotations

import base64
import re

import pytest

from notebook_launcher.drawing.run_picture import (
    MAX_LOG,
    picture_html,
    static_html,
    static_svg,
    static_text,
)
from notebook_launcher.drawing.tables import Column, table_html, table_text
from notebook_launcher.drawing.timeline import timeline_svg
from notebook_launcher.history.curves import Curves
from notebook_launcher.history.schema import (
    PhaseSpan,
    RankFailure,
    RankPhases,
    RankSnapshot,
    RunChange,
    RunSnapshot,
)
from notebook_launcher.wording import plural
from tests.support.drawn_runs import EVIL, Balanced, curves_of, phases_of, run_of, words_of

STATES = ("starting", "running", "waiting", "paused", "stopping", "done", "failed", "stopped", "lost")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("num_ranks", [0, 1, 64])
def test_every_state_has_a_page_a_picture_and_a_text(state: str, num_ranks: int) -> None:
    run = run_of(num_ranks, state=state, phases=phases_of(num_ranks))
    page = Balanced(static_html(run, Curves()))
    assert state in page.text
    assert "12 s" in page.text
    assert f"train on {plural(num_ranks, 'rank')}: {state}, 12 s" in words_of(static_svg(run, Curves()))
    assert static_text(run).startswith(f"train on {plural(num_ranks, 'rank')}: {state}, 12 s\n")


def test_page_and_a_text_name_who_waits_for_whom() -> None:
    told = "rank 0 has waited 12 s in all_reduce (Cell In[3], line 4); rank 1 is at line 7: x <b>"
    run = run_of(2, state="waiting", waiting=told)
    assert told in Balanced(static_html(run, Curves())).text
    assert static_text(run).splitlines()[1] == told


def test_page_shows_all_parts_of_a_snapshot() -> None:
    curves = curves_of({"loss": {0: [3, 2, 1], 1: [3, 2, 1]}})
    run = run_of(restarts=2, stopped_by="interrupt", timed_out=True, phases=phases_of(2))
    text = Balanced(static_html(run, curves, logs={0: "epoch 1\n", 1: ""})).text
    for words in ("restarted 2 times", "stopped on request", "timed out", "250 MB", "█▄▁", "epoch 1", "seed 7"):
        assert words in text
    assert "Output of rank 1" not in text
    for words in ("restarted 2 times", "250 MB", "█▄▁", "sync 26.7 %"):
        assert words in static_text(run, curves)


def failed_run() -> RunSnapshot:
    failures = (
        RankFailure(rank=1, summary=EVIL, traceback=f"Traceback\n{EVIL}\n", last_lines=(EVIL, "last")),
        RankFailure(rank=0, summary="connection reset", victim=True),
    )
    ranks = (RankSnapshot(rank=0, state="stopped"), RankSnapshot(rank=1, state="failed", reason=EVIL, last_line=EVIL))
    return run_of(
        name=EVIL,
        state="failed",
        error=EVIL,
        summary=EVIL,
        config={EVIL: EVIL, "odd": object, "env": {EVIL: EVIL}},
        failures=failures,
        ranks=ranks,
    )


def test_text_of_users_is_never_markup() -> None:
    curves = curves_of({EVIL: {0: [1, 2], 1: [2, 3]}})
    page = static_html(failed_run(), curves, logs={0: EVIL}, picture=True)
    assert "<script" not in page
    text = Balanced(page).text
    assert "<script>alert('x')</script>" in text
    assert any(word.startswith("<script>") for word in words_of(static_svg(failed_run(), curves)))
    plain = static_text(failed_run(), curves)
    assert "\x1b" not in plain + page
    plain.encode()
    page.encode()


def test_errors_stand_first_and_name_the_rank_to_blame() -> None:
    text = Balanced(static_html(failed_run(), Curves())).text
    assert text.index("rank 1: ") < text.index("rank 0 (caused by rank 1): connection reset")
    assert text.index("Traceback") < text.index("Ranks")
    assert "last" in text
    plain = static_text(failed_run())
    assert "    Traceback" in plain
    assert "rank 0 (caused by rank 1): connection reset" in plain


def test_error_without_a_rank_is_shown() -> None:
    run = run_of(state="failed", error="ResourceError: no process left")
    assert "ResourceError: no process left" in Balanced(static_html(run, Curves())).text
    assert "error: ResourceError: no process left" in static_text(run)


def test_values_of_environment_variables_stay_private() -> None:
    page = static_html(run_of(), Curves())
    assert "TOKEN" in page
    assert "hidden-value" not in page


def test_equal_failures_are_shown_once_with_the_ranks() -> None:
    failures = tuple(
        RankFailure(rank=rank, summary="ValueError: boom", traceback="Traceback\n  boom", last_lines=(f"last {rank}",))
        for rank in range(3)
    )
    other = RankFailure(rank=3, summary="KeyError: 3", traceback="Traceback\n  boom")
    page = static_html(run_of(4, state="failed", failures=(*failures, other)), Curves())
    assert page.count("Traceback") == 2
    text = Balanced(page).text
    for words in (
        "ranks 0-2: ValueError: boom",
        "Last lines of the output of rank 1:",
        "last 2",
        "rank 3: KeyError: 3",
    ):
        assert words in text
    plain = static_text(run_of(4, state="failed", failures=(*failures, other)))
    assert plain.count("Traceback") == 2
    assert "ranks 0-2: ValueError: boom" in plain


def test_sentences_below_the_timeline_are_whole() -> None:
    seconds = {"forward": 1.0, "sync": 3.4567}
    spans = (PhaseSpan(phase="step", start=0.0, seconds=1.0),)
    phases = {
        rank: RankPhases(windows=9, micro_batches=9, seconds=seconds, counts={"sync": 9, "forward": 9}, spans=spans)
        for rank in range(2)
    }
    words = words_of(timeline_svg(phases, width=600.0))
    assert "Every micro-batch is synchronised." in words
    assert not any("…" in word for word in words)


def test_pages_are_bounded() -> None:
    run = run_of(
        1000,
        phases=phases_of(100),
        failures=tuple(
            RankFailure(rank=rank, summary=f"{rank}" + "x" * 9999, traceback="y" * 10**6) for rank in range(100)
        ),
    )
    curves = curves_of({f"metric {number} {'z' * 1000}": {0: [1, 2]} for number in range(500)})
    logs = dict.fromkeys(range(64), "w" * 10**6)
    page = static_html(run, curves, logs=logs)
    Balanced(page)
    assert len(page) < 2_500_000
    assert len(static_svg(run, curves)) < 500_000
    assert len(static_text(run, curves)) < 100_000
    text = Balanced(page).text
    for words in (
        "984 more ranks",
        "800 more are not shown",
        "300 more metrics are not shown",
        "84 more ranks failed",
        "The output of 48 more ranks is not shown",
        f"{10**6 - MAX_LOG:,} earlier characters are not shown",
    ):
        assert words in text


def test_picture_can_be_in_the_page() -> None:
    curves = curves_of({"loss": {0: [1, 2]}})
    page = static_html(run_of(), curves, picture=True)
    assert "<img" not in static_html(run_of(), curves)
    Balanced(page)
    (data,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert "loss" in words_of(base64.b64decode(data).decode())
    assert picture_html("<svg/>", EVIL).count('"') == 6


def test_tables_leave_out_what_is_empty() -> None:
    columns = [
        Column("rank", ["0", "1"], "number"),
        Column("error", ["", ""]),
        Column("state", ["done", "lost"], "state"),
    ]
    text = Balanced(table_html(columns)).text
    assert "error" not in text
    assert "✓ done" in text
    assert table_text(columns) == ["rank  state", "   0  done ", "   1  lost "]
    assert table_text([]) == []


def test_text_table_fits_its_width_by_shortening_free_text_first() -> None:
    columns = [
        Column("id", ["20261121-000001", "20261121-000002"]),
        Column("name", ["a long name of a run", "b"], can_shrink=True),
        Column("disk", ["1 kB", "12 MB"], kind="number"),
        Column("notes", ["many words about what this run was for", ""], can_shrink=True),
    ]
    whole = max(map(len, table_text(columns)))
    assert table_text(columns, whole) == [line.rstrip() for line in table_text(columns)]
    assert table_text(columns, 66)[1] == "20261121-000001  a long name of a run   1 kB  many words about wh…"
    for width in range(10, whole):
        assert max(map(len, table_text(columns, width, dispensable=("disk", "notes")))) <= width
    assert table_text(columns, 45, dispensable=("disk", "notes"))[0].split() == ["id", "name", "notes"]
    assert table_text(columns, 32, dispensable=("disk", "notes"))[0].split() == ["id", "name"]


def test_changed_settings_are_marked_on_the_curves() -> None:
    curves = curves_of({"loss": {0: range(20)}, "accuracy": {0: range(20)}})
    changes = tuple(
        RunChange(name=name, before=1.0, after=0.5, update=5, step=step, time=1.0)
        for name, step in (("lr", 5), ("temperature", 5), ("lr", 500), ("lr", None))
    )
    picture = static_svg(run_of(changes=changes), curves)
    changed = "lr 1 → 0.5, temperature 1 → 0.5"
    assert words_of(picture).count(changed) == 2
    assert picture.count(f"<title>{changed}</title>") == 2
    assert picture.count('stroke-dasharray="2 3"') == 2
    assert 'stroke-dasharray="2 3"' not in static_svg(run_of(), curves)
