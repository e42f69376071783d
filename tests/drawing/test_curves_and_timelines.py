"""Curves and timelines as SVG: well-formed, bounded, legible."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_launcher.drawing.legend import PHASES
from notebook_launcher.drawing.plots import curves_svg
from notebook_launcher.drawing.run_picture import static_text
from notebook_launcher.drawing.timeline import timeline_svg
from notebook_launcher.history.curves import Curves
from notebook_launcher.history.schema import MetricPoint, PhaseSpan, RankPhases
from tests.support.drawn_runs import CROSS, EVIL, INF, NAN, curves_of, parse_svg, phases_of, run_of, words_of


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


def test_long_run_of_many_ranks_takes_a_bounded_picture() -> None:
    curves = curves_of(
        {
            f"metric {number}": {rank: (math.sin(step * rank) for step in range(3000)) for rank in range(6)}
            for number in range(24)
        }
    )
    assert len(curves_svg(curves, average=True, smoothing=0.9)) < 600_000


@given(
    values=st.lists(st.lists(st.floats(), max_size=20), min_size=1, max_size=3),
    step=st.integers(-(10**30), 10**30),
    log=st.booleans(),
    average=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.9]),
)
@settings(deadline=None, max_examples=40)
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


@pytest.mark.parametrize("num_ranks", [16, 100])
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
