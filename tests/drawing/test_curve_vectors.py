"""Thinning, smoothing, averaging and ticks of curves, in Python and on the monitor's page.

Ticks are compared directly, all else with the vectors in `curve_vectors.json`.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher.drawing.averages import mean_of, smooth
from notebook_launcher.drawing.scales import linear_ticks, log_ticks, tick_labels
from notebook_launcher.history.curves import MAX_POINTS, Curve, extremes
from tests.support.lab import browser, needs_browser
from tests.support.monitor_page import SCRIPT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page

VECTORS: dict[str, list[dict[str, Any]]] = json.loads(
    Path(__file__).with_name("curve_vectors.json").read_text(encoding="utf-8")
)
NAMES = "Curve, extremesOf, movingAverage, averageOf, linearTicks, logTicks, tickLabels"
"""Functions of the page's script under test."""


@pytest.fixture(scope="module")
def window() -> Iterator[Page]:
    with browser() as opened:
        yield opened.new_page()


def on_page(window: Page, body: str, argument: Any) -> Any:
    """Call a JavaScript function with the page's curve functions in scope."""
    call = f"""async ([script, argument]) => {{
        const url = URL.createObjectURL(new Blob([script], {{ type: "text/javascript" }}));
        const {{ {NAMES} }} = await import(url);
        return ({body})(argument);
    }}"""
    return window.evaluate(call, [f"{SCRIPT}\nexport {{ {NAMES} }};", argument])


def points(values: list[float | None], steps: list[int] | None = None) -> list[tuple[int, float]]:
    """Return the points of a curve as Python has them; null in a vector stands for a value that is not finite."""
    return [
        (step, math.nan if value is None else value)
        for step, value in zip(steps or range(len(values)), values, strict=True)
    ]


def as_json(values: list[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def alike(found: list[float | None], expected: list[float | None]) -> bool:
    """Return True if both have their gaps at the same places and numbers that are equal but for rounding."""
    pairs = zip(found, expected, strict=True)
    return all(a is b if a is None or b is None else math.isclose(a, b, rel_tol=1e-12) for a, b in pairs)


def timed(points: list[tuple[int, float]]) -> list[tuple[int, float, float]]:
    return [(step, value, 0.0) for step, value in points]


def grown(vector: dict[str, Any]) -> list[float | None]:
    """Return the values of a vector in `peaks`: the step modulo 7, with exceptions."""
    return [vector["exceptions"].get(str(step), step % 7) for step in range(vector["length"])]


@pytest.mark.parametrize("vector", VECTORS["extremes"], ids=repr)
def test_stretch_keeps_its_extremes_and_its_first_gap(vector):
    assert [step for step, _, _ in extremes(timed(points(vector["values"])))] == vector["kept"]


@pytest.mark.parametrize("vector", VECTORS["smoothing"], ids=repr)
def test_smoothed_curve_is_corrected_for_its_start_and_keeps_gaps(vector):
    smoothed = smooth(points(vector["values"]), vector["weight"])
    assert alike(as_json([value for _, value in smoothed]), vector["smoothed"])


@pytest.mark.parametrize("vector", VECTORS["averages"], ids=lambda vector: vector["case"])
def test_mean_of_ranks_has_a_band_from_the_lowest_to_the_highest(vector):
    curves = [Curve() for _ in vector["curves"]]
    for curve, record in zip(curves, vector["curves"], strict=True):
        curve.extend(timed(points(record["values"], record["steps"])))
    series = mean_of("mean", curves, 0)
    band = {step: (low, high) for step, low, high in series.band}
    assert [step for step, _ in series.points] == vector["steps"]
    assert alike(as_json([value for _, value in series.points]), vector["mean"])
    for at, side in enumerate(("low", "high")):
        assert alike([band[step][at] if step in band else None for step in vector["steps"]], vector[side])


@pytest.mark.parametrize("vector", VECTORS["peaks"], ids=repr)
def test_thinned_curve_keeps_every_peak_and_gap(vector):
    curve = Curve()
    curve.extend(timed(points(grown(vector))))
    kept = dict(curve.points())
    assert len(kept) <= MAX_POINTS + 4
    for step, value in vector["exceptions"].items():
        assert alike(as_json([kept[int(step)]]), [value])


@needs_browser
def test_page_keeps_the_same_extremes_of_a_stretch(window):
    body = "(vectors) => vectors.map(({ values }) => extremesOf(values, 0, values.length))"
    assert on_page(window, body, VECTORS["extremes"]) == [vector["kept"] for vector in VECTORS["extremes"]]


@needs_browser
def test_page_smooths_as_python_does(window):
    body = "(vectors) => vectors.map(({ values, weight }) => movingAverage(values, weight))"
    for found, vector in zip(on_page(window, body, VECTORS["smoothing"]), VECTORS["smoothing"], strict=True):
        assert alike(found, vector["smoothed"]), vector


@needs_browser
def test_page_averages_ranks_as_python_does(window):
    body = "(vectors) => vectors.map(({ curves }) => averageOf(curves))"
    for found, vector in zip(on_page(window, body, VECTORS["averages"]), VECTORS["averages"], strict=True):
        assert found["steps"] == vector["steps"], vector["case"]
        for part in ("mean", "low", "high"):
            assert alike(found[part], vector[part]), (part, vector["case"])


@needs_browser
def test_page_keeps_every_peak_and_gap_of_a_thinned_curve(window):
    body = """([limit, curves]) => curves.map((values) => {
        const curve = new Curve(limit);
        curve.extend({ steps: values.map((_, at) => at), values });
        return [curve.steps, curve.values];
    })"""
    drawn = on_page(window, body, [MAX_POINTS, [grown(vector) for vector in VECTORS["peaks"]]])
    for (steps, values), vector in zip(drawn, VECTORS["peaks"], strict=True):
        assert len(steps) <= MAX_POINTS
        kept = dict(zip(steps, values, strict=True))
        assert {step: kept[int(step)] for step in vector["exceptions"]} == vector["exceptions"]


@needs_browser
@pytest.mark.parametrize(("name", "ticks"), [("linearTicks", linear_ticks), ("logTicks", log_ticks)])
def test_page_has_the_same_ticks_with_the_same_labels(window, name, ticks):
    source = random.Random(0)
    ranges = [(1.0, 1000.0), (0.1, 0.3), (1.0, 1.0), (1e-300, 1e300), (5e-324, 1e-320), (2.0, 2.5), (0.9, 12.0)]
    for _ in range(2000):
        low = 10 ** source.uniform(-12, 14)
        ranges.append((low, low * (1 + 10 ** source.uniform(-9, 6))))
    if name == "linearTicks":
        ranges += [(-high, low) for low, high in ranges]
    cases = [(low, high, 1 + number % 8) for number, (low, high) in enumerate(ranges)]
    body = f"(cases) => cases.map((c) => {name}(...c)).map((ticks) => [ticks, tickLabels(ticks)])"
    for (found, labels), case in zip(on_page(window, body, cases), cases, strict=True):
        expected = ticks(*case)
        assert len(found) == len(expected), case
        assert all(math.isclose(a, b, rel_tol=1e-14) for a, b in zip(found, expected, strict=True)), case
        assert labels == tick_labels(expected), case
