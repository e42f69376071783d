"""Parts of pictures and tables: text, scales, colours, averages."""

from __future__ import annotations

import dataclasses
import itertools
import math
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_launcher.colours import INK, MARKERS, SERIES, line_style
from notebook_launcher.drawing.lines import mean_of, smooth
from notebook_launcher.drawing.scales import linear_ticks, log_ticks, make_scale, shorten, text_width, tick_labels
from notebook_launcher.drawing.tables import spark_line
from notebook_launcher.history.curves import Curve
from notebook_launcher.wording import clean, escape, one_line, plural
from tests.support.drawn_runs import CROSS, EVIL, INF, NAN

if TYPE_CHECKING:
    from collections.abc import Iterable


# Text.


def test_nothing_unescaped_or_invisible_comes_through() -> None:
    shown = escape(EVIL)
    assert "<" not in shown
    assert '"' not in shown
    assert "red" in shown
    assert "[31m" not in shown
    ET.fromstring(f'<p title="{shown}">{shown}</p>')
    shown.encode()


@pytest.mark.parametrize(
    ("raw", "cleaned"),
    [
        ("a\r\nb\tc", "a\nb\tc"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b[2K\x1b[1;32mok\x1b[m", "ok"),
        ("a\x00b\u202ec\udc80d\ufffee", "a\ufffdb\ufffdc\ufffdd\ufffde"),
    ],
)
def test_control_characters_are_replaced(raw: str, cleaned: str) -> None:
    assert clean(raw) == cleaned


def test_long_text_is_cut_with_a_note() -> None:
    assert clean("x" * 100, 10) == "x" * 10 + "\n... 90 more characters"
    assert one_line("a\n b " * 1000, 20) == "a b a b a b a b a b…"
    assert len(escape("x" * 10_000_000)) < 60_000


def test_text_is_shortened_to_its_room() -> None:
    assert shorten("loss", 100, 11) == "loss"
    cut = shorten("a/very/long/metric/name" * 10, 100, 11)
    assert cut.endswith("…")
    assert text_width(cut, 11) <= 100
    assert text_width("日本", 10) == 22
    assert text_width("e\u0301", 10) == text_width("e", 10)


def test_words_follow_the_number() -> None:
    assert (plural(1, "rank"), plural(1234, "rank")) == ("1 rank", "1,234 ranks")


# Scales.


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (-3, 9, [-2, 0, 2, 4, 6, 8]),
        (0, 0, [0]),
        (0, 100_000, [0, 2e4, 4e4, 6e4, 8e4, 1e5]),
    ],
)
def test_linear_axis_has_ticks_at_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert linear_ticks(low, high, 5) == ticks


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(1, 1000, [1, 10, 100, 1000]), (1, 1e12, [1, 1e3, 1e6, 1e9, 1e12]), (0.9, 12, [1, 2, 5, 10])],
)
def test_logarithmic_axis_has_ticks_at_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert log_ticks(low, high, 5) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("ticks", "labels"),
    [
        ([0, 0.25, 0.5], ["0", "0.25", "0.50"]),
        ([0, 20_000, 40_000], ["0", "20k", "40k"]),
        ([0, 1e-5, 2e-5], ["0", "1e-5", "2e-5"]),
        ([1e-3, 1, 1e3, 1e6], ["0.001", "1", "1000", "1e6"]),
        ([1000, 1000.5], ["1000.0", "1000.5"]),
        ([2e15, 4e15], ["2e15", "4e15"]),
        ([0, 5e-9, 1e-8, 1.5e-8], ["0", "5.0e-9", "1.0e-8", "1.5e-8"]),
        ([0], ["0"]),
        ([], []),
    ],
)
def test_labels_of_an_axis_share_one_notation(ticks: list[float], labels: list[str]) -> None:
    assert tick_labels(ticks) == labels


@given(
    values=st.lists(st.floats(), min_size=1, max_size=8),
    log=st.booleans(),
    margin=st.sampled_from([0.0, 0.05]),
    count=st.integers(1, 8),
)
@settings(deadline=None, max_examples=300)
def test_any_values_have_a_scale_with_few_distinct_ticks_on_it(
    values: list[float], *, log: bool, margin: float, count: int
) -> None:
    scale = make_scale(values, 100.0, 0.0, log=log, margin=margin)
    drawable = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    if scale is None:
        assert not drawable
        return
    assert drawable
    assert all(-1e-6 <= scale(value) <= 100 + 1e-6 for value in drawable)
    ticks = scale.ticks(count)
    assert len(ticks) <= 21
    assert all(-1e-6 <= scale(tick) <= 100 + 1e-6 for tick in ticks)
    assert all(len(label) < 24 for label in tick_labels(ticks))


# Colours.


def _linear(colour: str) -> list[float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    low, high = sorted(
        sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), _linear(x), strict=True)) for x in (one, other)
    )
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("background", ["#ffffff", "#111111"])
def test_colours_stand_out_on_light_and_dark(background: str) -> None:
    assert min(contrast(colour, background) for colour in SERIES) >= 3
    assert contrast(INK, background) >= 4.2


# Machado, Oliveira and Fernandes 2009, severity 1.0.
VISIONS = {
    "all colours": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def _lab(colour: str, vision: str) -> tuple[float, float, float]:
    seen = [min(1, max(0, sum(a * b for a, b in zip(row, _linear(colour), strict=True)))) for row in VISIONS[vision]]
    weights = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8729))
    xyz = [sum(w * s for w, s in zip(row, seen, strict=True)) for row in weights]
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("vision", VISIONS)
def test_palette_is_distinguishable_with_colour_blindness(vision: str) -> None:
    pairs = itertools.combinations([_lab(colour, vision) for colour in SERIES], 2)
    assert min(math.dist(colour, other) for colour, other in pairs) > 20


def test_lines_differ_without_colour() -> None:
    looks = [dataclasses.replace(line_style(at), colour="") for at in range(30)]
    assert len(set(looks)) == 30
    assert len(set(MARKERS)) == len(SERIES)


# Averages.


def curve_of(points: Iterable[tuple[int, float]]) -> Curve:
    curve = Curve()
    curve.extend([(step, value, 0.0) for step, value in points])
    return curve


def test_ranks_are_averaged_step_by_step() -> None:
    mean = mean_of("mean", [curve_of([(1, 1.0), (3, 2.0)]), curve_of([(1, 3.0), (3, NAN)])], 0)
    assert mean.points[0] == (1, 2.0)
    assert math.isnan(mean.points[1][1])
    assert list(mean.band) == [(1, 1.0, 3.0), (3, 2.0, 2.0)]


def test_ranks_at_different_steps_are_averaged_where_both_are() -> None:
    even = curve_of((step, float(step)) for step in range(0, 101, 2))
    odd = curve_of((step, float(step)) for step in range(1, 100, 2))
    mean = mean_of("mean", [even, odd], 0)
    assert len(mean.points) == 51
    assert all(value == pytest.approx(step, abs=1) for step, value in mean.points)


def test_one_curve_alone_has_no_band() -> None:
    assert mean_of("mean", [curve_of([(0, 1.0)])], 0).band == []
    assert mean_of("mean", [], 0).points == ()


def test_smoothing_averages_exponentially() -> None:
    constant = smooth([(0, 2.0), (1, 2.0), (2, NAN), (3, 2.0)], 0.9)
    assert [value for _, value in constant if math.isfinite(value)] == pytest.approx([2.0, 2.0, 2.0])
    assert math.isnan(constant[2][1])
    assert smooth([(0, 0.0), (1, 1.0)], 0.5)[1][1] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([1, 2, 3, 4], "▁▃▆█"),
        ([5, 5], "▄▄"),
        ([1, NAN, 2], f"▁{CROSS}█"),
        ([], ""),
        ([INF], CROSS),
        ([-1e308, 1e308], "▁█"),
    ],
)
def test_spark_line_draws_heights_and_marks_what_is_not_finite(values: list[float], line: str) -> None:
    assert spark_line(list(enumerate(values))) == line


def test_spark_line_is_short() -> None:
    assert len(spark_line([(step, math.sin(step)) for step in range(1000)])) == 24
