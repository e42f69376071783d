"""Numbers with their units, plurals, and lists of ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest

from notebook_launcher import wording

NAN, INF = math.nan, math.inf

TEXTS: dict[str, list[tuple[Any, str]]] = {
    "format_left": [
        (0, "about 5 s left"), (94.9, "about 95 s left"), (99 * 60, "about 99 min left"),
        (200 * 60, "about 3 h 20 min left"),
    ],
    "format_seconds": [
        (None, ""), (NAN, ""), (INF, ""), (0, "0 s"), (2e-9, "<1 µs"), (0.00049, "490 µs"), (0.0352, "35.2 ms"),
        (0.9996, "1 s"), (9.996, "10 s"), (59.94, "59.9 s"), (59.96, "1 min 00 s"), (200, "3 min 20 s"),
        (3599.7, "1 h 00 min"), (1e5, "27 h 47 min"), (1e8, "27,777 h 47 min"), (-0.005, "-5 ms"),
    ],
    "format_bytes": [
        (None, ""), (NAN, ""), (0, "0 bytes"), (1, "1 byte"), (999, "999 bytes"), (1024, "1.02 kB"), (999_500, "1 MB"),
        (3_125_000_000, "3.13 GB"), (3e15, "3,000 TB"), (-1500, "-1.5 kB"),
    ],
    "format_share": [
        (None, ""), (NAN, ""), (0, "0 %"), (0.0004, "<0.1 %"), (0.0625, "6.3 %"), (0.9994, "99.9 %"),
        (0.99996, ">99.9 %"), (1, "100 %"), (2.5, "250 %"),
    ],
    "format_rate": [
        (None, ""), (NAN, ""), (0, ""), (1, "1 it/s"), (0.9996, "1 s/it"), (0.25, "4 s/it"), (0.001, "16 min 40 s/it"),
        (2000.4, "2,000 it/s"),
    ],
    "format_count": [(None, ""), (NAN, ""), (0, "0"), (7, "7"), (12_345, "12,345"), (1_234_567, "1,234,567")],
    "format_number": [
        (None, ""), (NAN, "NaN"), (INF, "∞"), (-INF, "-∞"), (0, "0"), (-0.0, "0"), (3.0, "3"), (-12.345, "-12.35"),
        (0.00123456, "0.001235"), (0.00099996, "1e-3"), (1.23456e-7, "1.235e-7"), (12_345, "12,345"),
        (999_999.6, "1,000,000"), (1_234_500_000, "1.235e9"), (1e308, "1e308"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_number_is_written_with_its_unit(name):
    assert [(value, getattr(wording, name)(value)) for value, _ in TEXTS[name]] == TEXTS[name]


def test_number_has_as_many_digits_as_asked():
    texts = [wording.format_number(value, 3) for value in (0.12345, 1.2345, 12.345, 123.45, 1234.5, 1.2345e9)]
    assert texts == ["0.123", "1.23", "12.3", "123", "1,235", "1.23e9"]


def test_settings_are_written_as_people_read_them():
    assert [wording.format_setting(value) for value in (None, True, False, 1, 0.5)] == ["none", "on", "off", "1", "0.5"]
    assert wording.describe_values("max_grad_norm", None, 1.0) == "max_grad_norm none → 1"


def test_growing_duration_has_whole_seconds_from_10_on():
    texts = [wording.format_elapsed(seconds) for seconds in (0.3821, 9.99, 12.9, 63.5)]
    assert texts == ["382 ms", "9.99 s", "12 s", "1 min 03 s"]


def test_metrics_beyond_the_limit_are_counted():
    metrics = {"loss": 0.12341, "a long name" * 9: 2.0, "c": 3.0}
    assert wording.format_metrics(metrics, 2) == f"loss 0.1234, {('a long name' * 9)[:39]}… 2, 1 more"
    assert wording.format_metrics({"loss": 1.0}) == "loss 1"
    assert wording.format_metrics({}) == ""


def test_plural_counts_a_noun():
    shown = [wording.plural(count, "rank") for count in (0, 1, 2, 1234)]
    assert shown == ["0 ranks", "1 rank", "2 ranks", "1,234 ranks"]


def test_verb_agrees_with_the_number_of_its_subjects():
    assert [wording.plural_verb("has returned", count) for count in (1, 2)] == ["has returned", "have returned"]
    assert [wording.plural_verb("is", count) for count in (0, 1)] == ["are", "is"]
    assert wording.plural_verb("waited", 2) == "waited"


def test_ranks_in_a_row_are_a_span():
    shown = [wording.rank_list(ranks) for ranks in ([2], (2, 0), [7, 0, 1, 2, 3, 3])]
    assert shown == ["rank 2", "ranks 0, 2", "ranks 0-3, 7"]
