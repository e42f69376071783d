"""Parts of pictures and tables: text, scales, colours, the legend."""

from __future__ import annotations

import dataclasses
import math
import xml.etree.ElementTree as ET
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_launcher.colours import MARKERS, SERIES, line_style
from notebook_launcher.drawing.legend import PHASES, RANK_STATES, RUN_STATES
from notebook_launcher.drawing.scales import linear_ticks, log_ticks, make_scale, shorten, text_width, tick_labels
from notebook_launcher.drawing.tables import spark_line
from notebook_launcher.history.schema import RankState, RunState
from notebook_launcher.training.recording.phases import Phase
from notebook_launcher.wording import clean, escape, one_line
from tests.support.drawn_runs import CROSS, EVIL, INF, NAN

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
@settings(deadline=None, max_examples=100)
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


def test_lines_differ_without_colour() -> None:
    looks = [dataclasses.replace(line_style(at), colour="") for at in range(30)]
    assert len(set(looks)) == 30
    assert len(set(MARKERS)) == len(SERIES)


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


# Legend.


def test_every_phase_that_training_measures_has_a_look():
    assert tuple(PHASES) == get_args(Phase)


@pytest.mark.parametrize(("looks", "states"), [(RUN_STATES, RunState), (RANK_STATES, RankState)])
def test_every_state_has_a_look_of_its_own(looks, states):
    assert set(looks) == set(get_args(states))
    assert len({(look.word, look.shape) for look in looks.values()}) == len(looks)
