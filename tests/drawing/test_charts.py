"""Metrics that share a plot, and the places of their points on each axis."""

from __future__ import annotations

import pytest

from notebook_launcher.drawing.charts import charts_of, place_of, split_name
from notebook_launcher.drawing.plots import PlotOptions, curves_svg
from notebook_launcher.drawing.run_picture import static_svg
from notebook_launcher.drawing.scales import Scale, place_ticks
from notebook_launcher.history.curves import Curves
from notebook_launcher.history.schema import MetricPoint, RankUsage
from tests.support.drawn_runs import run_of, words_of


def curves_with_times(**metrics: list[float]) -> Curves:
    """Return curves of rank 0: each metric at the steps 0, 10, 20 ... and after 0, 2, 4 ... seconds."""
    curves = Curves()
    for name, values in metrics.items():
        metric = name.replace("__", "/")
        points = enumerate(values)
        curves.fold(MetricPoint(rank=0, step=10 * at, time=2.0 * at, values={metric: value}) for at, value in points)
    return curves


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train/loss", ("loss", "train")),
        ("loss/val", ("loss", "val")),
        ("Eval_loss", ("loss", "Eval")),
        ("training", ("training", "")),
        ("trainer/lr", ("trainer/lr", "")),
    ],
)
def test_name_is_split_into_its_quantity_and_its_part(name: str, split: tuple[str, str]) -> None:
    assert split_name(name) == split


def test_parts_of_one_quantity_share_a_chart() -> None:
    names = ["train/loss", "lr", "val/loss", "val/accuracy"]
    assert [chart.title for chart in charts_of(names, grouped=True)] == ["loss", "lr", "val/accuracy"]
    assert [chart.title for chart in charts_of(names, grouped=False)] == names


def test_group_names_its_lines_in_its_plot() -> None:
    curves = curves_with_times(train__loss=[3, 2, 1], val__loss=[3.5, 3, 2], lr=[0.1, 0.1, 0.1])
    words = words_of(curves_svg(curves))
    assert {"loss", "train", "val", "lr"} <= set(words)
    assert words.count("rank 0") == 1
    assert {"train/loss", "val/loss"} <= set(words_of(curves_svg(curves, grouped=False)))


def test_axis_counts_steps_seconds_or_epochs() -> None:
    curves = curves_with_times(loss=[4, 3, 2, 1], epoch=[0, 0, 1, 2])
    assert {"step", "30"} <= set(words_of(curves_svg(curves)))
    assert {"time", "2 s", "6 s"} <= set(words_of(curves_svg(curves, axis="time")))
    place = place_of("epoch", curves)
    # The epoch grows from 0 at 0 s to 1 at 4 s and to 2 at 6 s.
    assert [place(time) for time in (0.0, 2.0, 4.0, 5.0, 6.0, 100.0)] == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0]
    assert "epoch" in words_of(curves_svg(curves, ["loss"], axis="epoch"))


@pytest.mark.parametrize(
    ("high", "labels"),
    [
        (10.0, ["0 s", "5 s", "10 s"]),
        (200.0, ["0 s", "2 min"]),
        (7300.0, ["0 s", "2 h"]),
        (3e6, ["0 s", "432 h"]),
    ],
)
def test_ticks_of_a_time_axis_are_round(high: float, labels: list[str]) -> None:
    assert [label for _, label in place_ticks("time", Scale(low=0.0, high=high, start=0.0, end=120.0))] == labels


def test_memory_and_load_are_drawn_by_time() -> None:
    usage = {
        rank: RankUsage(
            times=(1.0, 2.0, 3.0),
            memory=(10**9, 2 * 10**9, 2 * 10**9),
            load=(None, 0.5, 1.0),
            gpu_memory=(None,) * 3,
            gpu_utilization=(None,) * 3,
        )
        for rank in range(2)
    }
    words = words_of(static_svg(run_of(usage=usage), Curves()))
    assert {"memory, GB", "load, processors", "time", "3 s"} <= set(words)
    assert not any("GPU" in word or "No metrics" in word for word in words)
    by_epoch = static_svg(run_of(usage=usage), curves_with_times(loss=[2, 1], epoch=[0, 1]), PlotOptions(axis="epoch"))
    assert {"epoch", "time"} <= set(words_of(by_epoch))
