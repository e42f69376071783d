"""Runs as static HTML, SVG and text: well-formed, escaped, bounded, legible, whatever the run was."""

from __future__ import annotations

import base64
import itertools
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_launcher.drawing.legend import PHASES
from notebook_launcher.drawing.metric_plots import curves_svg
from notebook_launcher.drawing.page import picture_html, static_html, static_svg, static_text
from notebook_launcher.drawing.sections import MAX_LOG, rank_columns
from notebook_launcher.drawing.tables import Column, table_html, table_text
from notebook_launcher.drawing.timeline import timeline_svg
from notebook_launcher.history.curves import Curves
from notebook_launcher.history.schema import (
    FailureRecord,
    MetricPoint,
    PhaseSpan,
    RankPhases,
    RankSnapshot,
    RankUsage,
    RunChange,
    RunSnapshot,
)
from notebook_launcher.units import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NAN, INF = math.nan, math.inf
CROSS = "\N{MULTIPLICATION SIGN}"
EVIL = "<script>alert('x')</script> \"q\" & \x1b[31mred\x1b[0m \x00\x07 \ud800 \u202e ]]> </svg>"
STATES = ("starting", "running", "waiting", "paused", "stopping", "done", "failed", "stopped", "lost")
ALLOWED = {"div", "span", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "pre", "img"}


def curves_of(values: Mapping[str, Mapping[int, Iterable[float]]]) -> Curves:
    """Curves by name and rank, at steps 0, 1, ..."""
    curves = Curves()
    for name, ranks in values.items():
        for rank, column in ranks.items():
            curves.fold(MetricPoint(rank=rank, step=step, time=0.0, values={name: v}) for step, v in enumerate(column))
    return curves


def phases_of(num_ranks: int, num_windows: int = 12) -> dict[int, RankPhases]:
    def told(rank: int) -> RankPhases:
        spans, now = [], 1.0 + rank / 1000
        for _, (place, phase) in itertools.product(range(num_windows), enumerate(PHASES)):
            spans.append(PhaseSpan(phase=phase, start=now, seconds=0.01 * (place + 1)))
            now += spans[-1].seconds
        seconds = {phase: 0.01 * (place + 1) * num_windows for place, phase in enumerate(PHASES)}
        counts = dict.fromkeys(PHASES, num_windows)
        return RankPhases(
            windows=num_windows, micro_batches=4 * num_windows, seconds=seconds, counts=counts, spans=tuple(spans)
        )

    return {rank: told(rank) for rank in range(num_ranks)}


def run_of(num_ranks: int = 2, **fields: Any) -> RunSnapshot:
    ranks = tuple(
        RankSnapshot(rank=rank, state="returned", seconds=1.5, peak_memory=250_000_000, returned=f"[{rank}]", step=9)
        for rank in range(num_ranks)
    )
    given: dict[str, Any] = {
        "id": "20261121-142501-train-3f9c",
        "name": "train",
        "state": "done",
        "started": 1_795_000_000.0,
        "seconds": 12.0,
        "num_processes": num_ranks,
        "summary": f"{num_ranks} CPU ranks, gloo",
        "seed": 7,
        "config": {"num_processes": num_ranks, "env": {"TOKEN": "hidden-value"}},
        "ranks": ranks,
    }
    return RunSnapshot(**{**given, **fields})


# Reading back what was drawn.


def parse_svg(svg: str) -> ET.Element:
    root = ET.fromstring(svg)
    assert root.tag.endswith("}svg")
    _check_svg(root, float(root.attrib["width"]), float(root.attrib["height"]))
    return root


def _check_svg(root: ET.Element, width: float, height: float) -> None:
    assert root.attrib["viewBox"] == f"0 0 {root.attrib['width']} {root.attrib['height']}"
    assert width < 4000
    assert height < 6000
    assert "NaN" not in "".join(element.attrib.get("d", "") for element in root.iter())
    for element in root.iter():
        assert not element.tag.endswith(("script", "style", "foreignObject", "image", "a"))
        for name, value in element.attrib.items():
            assert not name.lower().startswith("on")
            assert not name.endswith("href")
            assert "url(" not in value or re.fullmatch(r"url\(#nbl[0-9a-f]{8}\w+\)", value)


def words_of(svg: str) -> list[str]:
    """Return the texts in a picture, without tooltips."""
    return [element.text or element[0].tail or "" for element in parse_svg(svg).iter() if element.tag.endswith("}text")]


class Balanced(HTMLParser):
    """Fails at a tag that is not closed where it should be, and at what is not allowed in a static page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED, tag
        for name, value in attrs:
            assert name in {"style", "open", "src", "alt"}, name
            assert "url(" not in (value or "")
            assert name != "src" or (value or "").startswith("data:image/svg+xml;base64,")
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


# Curves.


def test_every_metric_has_a_plot_and_every_rank_a_name_in_the_legend() -> None:
    curves = curves_of({"loss": {0: [3, 2, 1], 1: [3, 2.5, 1]}, "lr": {0: [0.1, 0.2, 0.3]}})
    words = words_of(curves_svg(curves))
    assert {"rank 0", "rank 1", "loss", "lr", "step"} <= set(words)
    assert {"loss"} == set(words_of(curves_svg(curves, ["loss"]))) & {"loss", "lr"}


@pytest.mark.parametrize(
    ("values", "note", "num_marks"),
    [
        ([1, 2, NAN, 2, 1], f"{CROSS} NaN from step 2", 1),
        ([1, INF, 1], "▲ ∞ from step 1", 1),
        ([-INF, 1, 2], "▼ -∞ from step 0", 1),
        ([1, NAN, 2, INF], f"{CROSS} NaN, ▲ ∞ from step 1", 2),
        ([1, 2, 3], "", 0),
        ([1] + [NAN] * 1000 + [1], f"{CROSS} NaN from step 1", 44),
    ],
)
def test_value_that_is_not_finite_is_a_gap_with_a_mark(values: list[float], note: str, num_marks: int) -> None:
    svg = curves_svg(curves_of({"loss": {0: values}}), width=400)
    marks = [element for element in parse_svg(svg).iter() if element.attrib.get("class") == "nonfinite"]
    assert len(marks) == pytest.approx(num_marks, abs=num_marks // 20)
    assert not note or note in words_of(svg)
    (line,) = [e for e in parse_svg(svg).iter() if e.attrib.get("stroke-width") == "1.6" and "class" not in e.attrib]
    runs = [list(run) for finite, run in itertools.groupby(values, math.isfinite) if finite]
    assert line.attrib["d"].count("M") == len(runs)


def test_log_scale_leaves_out_what_is_not_positive() -> None:
    svg = curves_svg(curves_of({"loss": {0: [100, 10, 0, -1, 0.1]}}), log=True)
    assert "≤ 0 left out from step 2" in words_of(svg)
    assert {"0.1", "1", "10", "100"} <= set(words_of(svg))
    assert "no positive value" in words_of(curves_svg(curves_of({"x": {0: [-1, 0]}}), log=True))


@pytest.mark.parametrize(("values", "why"), [([NAN, INF], "no finite value"), ([], "no values")])
def test_metric_without_a_value_to_draw_has_a_note(values: list[float], why: str) -> None:
    assert why in words_of(curves_svg(curves_of({"loss": {0: values}}), ["loss"]))


def test_picture_of_a_run_without_metrics_has_a_note() -> None:
    assert words_of(curves_svg(Curves())) == ["No metrics were reported."]


def test_steps_that_start_again_break_the_line() -> None:
    curves = Curves()
    curves.fold(MetricPoint(rank=0, step=step % 5, time=0.0, values={"loss": 1.0 * step}) for step in range(15))
    (line,) = [e for e in parse_svg(curves_svg(curves)).iter() if e.attrib.get("stroke-width") == "1.6"]
    assert line.attrib["d"].count("M") == 3


def test_many_ranks_are_drawn_as_their_mean() -> None:
    curves = curves_of({"loss": {rank: [rank, rank + 1] for rank in range(64)}})
    words = words_of(curves_svg(curves))
    assert "mean of the ranks; the band spans from the lowest to the highest" in words
    assert "64 ranks" in words
    assert "rank 0" not in words


def test_mean_names_the_ranks_that_reported() -> None:
    curves = curves_of({"loss": {0: [1, 2], 1: [2, 3]}, "accuracy": {0: [0.5, 0.6]}})
    assert {"2 ranks", "rank 0 only"} <= set(words_of(curves_svg(curves, average=True)))


def test_more_metrics_than_fit_are_counted_and_named() -> None:
    curves = curves_of({f"metric {number}": {0: [1, 2, 3]} for number in range(200)})
    svg = curves_svg(curves)
    words = words_of(svg)
    assert "metric 23" in words
    assert "metric 24" not in words
    assert any(word.startswith("176 more not drawn: metric 24, ") for word in words)
    assert len(svg) < 200_000


@pytest.mark.parametrize("average", [False, True])
def test_long_run_of_many_ranks_takes_a_bounded_picture(*, average: bool) -> None:
    curves = curves_of(
        {
            f"metric {number}": {rank: (math.sin(step * rank) for step in range(3000)) for rank in range(6)}
            for number in range(24)
        }
    )
    assert len(curves_svg(curves, average=average, smoothing=0.9)) < 600_000


def test_curve_of_100_000_steps_is_a_small_picture() -> None:
    curves = curves_of({"loss": {0: (1 / (1 + step) for step in range(100_000))}})
    svg = curves_svg(curves)
    assert len(svg) < 20_000
    assert {"20k", "80k"} <= set(words_of(svg))


@given(
    values=st.lists(st.lists(st.floats(), max_size=20), min_size=1, max_size=3),
    step=st.integers(-(10**30), 10**30),
    log=st.booleans(),
    average=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.9]),
)
@settings(deadline=None, max_examples=80)
def test_any_values_give_a_picture(
    values: list[list[float]], step: int, *, log: bool, average: bool, smoothing: float
) -> None:
    curves = Curves()
    for rank, column in enumerate(values):
        curves.fold(MetricPoint(rank=rank, step=step * at, time=0.0, values={"x": v}) for at, v in enumerate(column))
    svg = curves_svg(curves, ["x"], log=log, average=average, smoothing=smoothing)
    parse_svg(svg)
    assert "inf" not in svg
    assert "nan" not in svg
    static_text(run_of(), curves)


# Timeline.


def test_timeline_names_ranks_phases_and_shares() -> None:
    words = words_of(timeline_svg(phases_of(2)))
    assert {"rank 0", "rank 1", *(look.word for look in PHASES.values())} <= set(words)
    assert words.count("6.7 %") == words.count("33.3 %") == 2
    assert any("Accumulation saved" in word for word in words)


def test_phases_are_distinguishable_without_colour() -> None:
    assert len({look.letter for look in PHASES.values()}) == len(PHASES)
    assert len({(look.pattern, look.height) for look in PHASES.values()}) == len(PHASES)
    words = words_of(timeline_svg(phases_of(2, num_windows=2)))
    assert {look.letter for look in PHASES.values() if look.height == 1} <= set(words)


@pytest.mark.parametrize("num_ranks", [1, 16, 64, 100])
def test_timeline_of_many_ranks_is_bounded(num_ranks: int) -> None:
    svg = timeline_svg(phases_of(num_ranks, num_windows=200))
    root = parse_svg(svg)
    assert float(root.attrib["height"]) < 720
    assert len(svg) < 200_000
    words = words_of(svg)
    assert ("lowest" in words) == (num_ranks > 16)
    assert any("36 more ranks not drawn" in word for word in words) == (num_ranks == 100)


@pytest.mark.parametrize("phases", [{}, {0: RankPhases()}, {0: RankPhases(seconds={"data": 0.0})}])
def test_empty_timeline_has_a_note(phases: dict[int, RankPhases]) -> None:
    assert words_of(timeline_svg(phases)) == ["No phases measured: only loops that use an Accelerator report them."]


def test_odd_spans_are_drawn() -> None:
    spans = (
        PhaseSpan(phase="data", start=0.0, seconds=0.0),
        PhaseSpan(phase=EVIL, start=0.0, seconds=1.0),
        PhaseSpan(phase="step", start=5.0, seconds=1e-9),
    )
    svg = timeline_svg({0: RankPhases(spans=spans), 1: RankPhases(spans=spans[:1])})
    parse_svg(svg)
    assert "script" not in svg


def test_patterns_of_two_pictures_have_different_names() -> None:
    pictures = [timeline_svg(phases_of(2, num_windows)) for num_windows in (3, 4)]
    names = [set(re.findall(r'id="(\w+)"', picture)) for picture in pictures]
    assert len(names[0]) == len(PHASES)
    assert names[0].isdisjoint(names[1])


# Pages.


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
        FailureRecord(rank=1, summary=EVIL, traceback=f"Traceback\n{EVIL}\n", last_lines=(EVIL, "last")),
        FailureRecord(rank=0, summary="connection reset", victim=True),
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
        FailureRecord(
            rank=rank, summary="ValueError: boom", traceback="Traceback\n  boom", last_lines=(f"last {rank}",)
        )
        for rank in range(3)
    )
    other = FailureRecord(rank=3, summary="KeyError: 3", traceback="Traceback\n  boom")
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


def test_axis_of_memory_does_not_magnify_noise() -> None:
    def labels(*gigabytes: float) -> set[float]:
        memory = tuple(int(each * 1e9) for each in gigabytes)
        none = (None,) * 3
        known = RankUsage(times=(1.0, 2.0, 3.0), memory=memory, load=none, gpu_memory=none, gpu_utilization=none)
        usage = {0: known}
        words = words_of(static_svg(run_of(usage=usage), Curves()))
        return {float(word) for word in words if re.fullmatch(r"0\.\d+", word)}

    noise = labels(0.28870, 0.28878, 0.28872)
    assert max(noise) - min(noise) > 0.005
    assert max(labels(0.2, 0.4, 0.3)) == 0.4


def test_long_text_of_a_table_wraps_and_short_text_does_not() -> None:
    page = table_html([Column("id", ["20261121-142501-train-3f9c5e"]), Column("time", ["3 min"])])
    cells = dict(re.findall(r'<td style="[^"]*white-space:(\w+)[^"]*">([^<]+)', page))
    assert cells == {"normal": "20261121-142501-train-3f9c5e", "nowrap": "3 min"}


def test_pages_are_bounded() -> None:
    run = run_of(
        1000,
        phases=phases_of(100),
        failures=tuple(
            FailureRecord(rank=rank, summary=f"{rank}" + "x" * 9999, traceback="y" * 10**6) for rank in range(100)
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


def test_table_of_ranks_names_the_ranks_whose_samples_it_counts() -> None:
    (column,) = [one for one in rank_columns([RankSnapshot(rank=0, samples_per_second=12.5)]) if "samples" in one.name]
    assert column.name == "samples/s, all ranks"


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
