"""A run in plain values and in a page of text: for programs, and for agents that read neither pictures nor tables."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import TYPE_CHECKING, Any

from notebook_launcher.drawing.run_picture import because, failures_to_show, headline
from notebook_launcher.history.curves import Curves
from notebook_launcher.history.summaries import merge_progress, progress_line, slowest_rank
from notebook_launcher.wording import MAX_ERROR, bounded, clean, format_number, one_line, plural, rank_list

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from notebook_launcher.history.curves import Curve
    from notebook_launcher.history.schema import RankFailure, RankSnapshot, RunReader, RunSnapshot

MAX_RANKS, MAX_METRICS = 64, 64
"""Ranks and metrics that a report has one by one; the ranks that failed or wait come first."""
SHOWN_RANKS, SHOWN_METRICS = 8, 12
"""Ranks and metrics in its text."""
FRAME = re.compile(
    r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+)(?:, in (?P<function>\S+))?(?:\n +(?P<code>\S.*))?', re.MULTILINE
)
LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3|^<frozen ")
LEFT_OUT = frozenset({"pid", "description", "memory", "peak_memory", "gpu_memory", "gpu_utilization", "rate"})
"""Fields of a rank's snapshot that a report does without."""


class RunReport(dict[str, Any]):
    """What is known of a run at one moment, as `run.report()` returns it: a dict of plain values.

    `print(report)` shows at most 2,000 characters. Keys are there in every state of the run; None, an empty text or an
    empty list stands for what there is not.

    * `id`, `name`, `state`, `is_over`, `seconds`, `num_processes`, `restarts`, `timed_out`, `stopped_by`
    * `headline`, `progress_line`: the same and the progress as one line each
    * `error`: the run's error in one line
    * `first_error`: `rank`, `error`; `file`, `line`, `function` and `code` of the user's line; `traceback`, and the
      `last_lines` that the rank wrote
    * `other_errors`: one line for each group of ranks that failed in the same way
    * `waiting`: who waits in which collective, and where the other ranks are
    * `progress`: `rank`, `done`, `total`, `share`, `rate` and `seconds_left` of the rank that is furthest behind
    * `metrics`: by name `last`, `step`, `lowest`, `lowest_step`, `highest`, `highest_step`, `not_finite` (a number of
      values), and `first_not_finite` (the step)
    * `slow_rank`: the rank that the others wait for
    * `ranks`: for each rank, of 64 at most, `rank`, `state` and what else is known
    * `num_left_out`: the number of `ranks` and `metrics` that the report does without
    * `next`: what may be typed now, most useful first
    """

    def to_json(self, *, indent: int | None = None) -> str:
        """Return all of it as JSON, in which NaN and infinities are `"NaN"`, `"Infinity"` and `"-Infinity"`."""
        return json.dumps(_jsonable(self), indent=indent, ensure_ascii=False, allow_nan=False)

    def __str__(self) -> str:
        return bounded("\n".join(_lines(self)), "run.report().to_json() has all")

    __repr__ = __str__


def report_on(run: RunReader, handle: str = "run") -> RunReport:
    """Return the report of a run; `handle`: an expression for the run, by which the next commands begin."""
    snapshot, curves = run.snapshot(), Curves()
    curves.fold(run.metrics_since(0)[0])
    failures = failures_to_show(snapshot)
    first = next((failure for failure in failures if not failure.victim), failures[0] if failures else None)
    ranks = sorted(
        snapshot.ranks,
        key=lambda rank: (rank.state != "failed", rank.reason.startswith("caused by"), rank.waited is None, rank.rank),
    )
    return RunReport(
        id=snapshot.id,
        name=snapshot.name,
        state=snapshot.state,
        is_over=snapshot.is_over,
        headline=headline(snapshot),
        progress_line="" if snapshot.is_over else progress_line(snapshot.name, snapshot.ranks),
        seconds=round(snapshot.seconds, 3),
        num_processes=snapshot.num_processes,
        restarts=snapshot.restarts,
        timed_out=snapshot.timed_out,
        stopped_by=snapshot.stopped_by,
        error=one_line(snapshot.error, 300),
        first_error=None if first is None else _first_error(first),
        other_errors=_other_errors(failures, first),
        waiting=one_line(snapshot.waiting, 1000),
        progress=_progress(snapshot),
        metrics={name: _of_metric(curves[name]) for name in curves.names[:MAX_METRICS]},
        slow_rank=None if snapshot.is_over and not snapshot.phases else slowest_rank(snapshot),
        ranks=[_of_rank(rank) for rank in ranks[:MAX_RANKS]],
        num_left_out={
            "ranks": max(0, len(ranks) - MAX_RANKS),
            "metrics": max(0, len(curves) - MAX_METRICS),
        },
        next=list(_next(snapshot, first, handle)),
    )


def _progress(snapshot: RunSnapshot) -> dict[str, Any] | None:
    merged = merge_progress(snapshot.ranks)
    if merged is None:
        return None
    left = None if snapshot.is_over else merged.seconds_left
    return {**merged._asdict(), "share": merged.share, "seconds_left": left}


def _first_error(failure: RankFailure) -> dict[str, Any]:
    frames = list(FRAME.finditer(failure.traceback))
    own = [frame for frame in frames if not LIBRARY.search(frame["file"])]
    place: Mapping[str, str | None] = (own or frames)[-1].groupdict() if frames else {}
    line = place.get("line")
    return {
        "rank": failure.rank,
        "error": one_line(failure.summary, 500),
        "file": place.get("file"),
        "line": None if line is None else int(line),
        "function": place.get("function"),
        "code": place.get("code"),
        "traceback": bounded(clean(failure.traceback), "run.exception().failures[0].traceback has all", MAX_ERROR),
        "last_lines": [one_line(text, 200) for text in failure.last_lines[-5:]],
    }


def _other_errors(failures: Sequence[RankFailure], first: RankFailure | None) -> list[str]:
    groups: dict[str, list[int]] = {}
    for failure in failures:
        if failure is not first:
            words = f"{one_line(failure.summary, 200)}{because(failure, failures)}"
            groups.setdefault(words, []).append(failure.rank)
    return [f"{rank_list(ranks)}: {words}" for words, ranks in groups.items()][:16]


def _of_metric(curves: Mapping[int, Curve]) -> dict[str, Any]:
    """Return what became of one metric, over all ranks; `last` is the mean of the ranks' last values."""
    last = {rank: curve.points()[-1] for rank, curve in curves.items()}
    every = [point for curve in curves.values() for point in curve.points()]
    finite = [point for point in every if math.isfinite(point[1])]
    odd = [point for point in every if not math.isfinite(point[1])]
    lowest = min(finite, key=lambda point: point[1], default=(None, None))
    highest = max(finite, key=lambda point: point[1], default=(None, None))
    return {
        "last": sum(value for _, value in last.values()) / len(last),
        "step": max(step for step, _ in last.values()),
        "lowest": lowest[1],
        "lowest_step": lowest[0],
        "highest": highest[1],
        "highest_step": highest[0],
        "not_finite": len(odd),
        "first_not_finite": min((step for step, _ in odd), default=None),
    }


def _of_rank(rank: RankSnapshot) -> dict[str, Any]:
    told = {field.name: getattr(rank, field.name) for field in dataclasses.fields(rank) if field.name not in LEFT_OUT}
    told = {name: value for name, value in told.items() if value not in (None, "", {})}
    texts = ("reason", "where", "last_line", "returned")
    few = {"metrics": dict(list(rank.metrics.items())[:MAX_METRICS])} if rank.metrics else {}
    return told | {name: one_line(told[name]) for name in texts if name in told} | few


def _next(snapshot: RunSnapshot, first: RankFailure | None, run: str) -> Iterator[str]:
    """Yield what may be typed now, with a comment each."""
    rank = first.rank if first is not None else 0
    if snapshot.state == "lost" or (snapshot.is_over and run != "run"):
        yield f"{run}.logs({rank})[-2000:]  # the end of what rank {rank} wrote"
        yield f"{run}.metrics.to_pandas()  # all points"
    elif snapshot.is_over:
        if snapshot.state == "done":
            yield f"{run}.result()  # what the ranks returned"
        elif first is not None:
            yield f"print({run}.exception().failures[0].traceback)  # of rank {rank}"
        yield f"{run}.logs({rank})[-2000:]  # the end of what rank {rank} wrote"
    else:
        waits = snapshot.state == "waiting"
        if snapshot.state == "paused":
            yield f"{run}.resume()  # it is paused"
        if waits:
            yield f"{run}.stacks()  # the line at which each rank is"
        yield f"{run}.wait(20); {run}.report()  # how it is then"
        if not waits:
            yield f"{run}.stacks()  # the line at which each rank is"
        names = [setting.name for setting in snapshot.settings]
        if names and snapshot.state != "stopping":
            yield f"{run}.set({names[0]}=...)  # changes it on all ranks" + (
                f"; also {', '.join(names[1:4])}" if names[1:] else ""
            )
        yield f"{run}.logs({rank})[-2000:]  # the end of what rank {rank} wrote"
        yield f"{run}.stop()  # ends it within 3 s"


def _lines(report: RunReport) -> Iterator[str]:
    yield report["headline"]
    if first := report["first_error"]:
        yield f"first error: rank {first['rank']}: {first['error']}"
        if first["file"]:
            where = f", in {first['function']}" if first["function"] else ""
            yield f'  File "{first["file"]}", line {first["line"]}{where}'
            yield from [f"    {one_line(first['code'])}"] if first["code"] else []
        yield from report["other_errors"][:4]
    elif report["error"]:
        yield f"error: {report['error']}"
    if report["waiting"]:
        yield f"waiting: {report['waiting']}"
    if report["progress_line"]:
        yield f"progress: {report['progress_line']}"
    if report["slow_rank"] is not None:
        yield f"slow: the other ranks wait for rank {report['slow_rank']}"
    metrics = report["metrics"]
    yield from ["metrics:"] if metrics else []
    for name in list(metrics)[:SHOWN_METRICS]:
        yield f"  {one_line(name, 60)}: {_metric_words(metrics[name])}"
    yield from _more(len(metrics) + report["num_left_out"]["metrics"] - SHOWN_METRICS, "metric")
    yield from ["ranks:"] if report["ranks"] else []
    for rank in report["ranks"][:SHOWN_RANKS]:
        yield f"  {rank['rank']}: {_rank_words(rank)}"
    yield from _more(len(report["ranks"]) + report["num_left_out"]["ranks"] - SHOWN_RANKS, "rank")
    yield "next:"
    yield from (f"  {command}" for command in report["next"])


def _more(count: int, noun: str) -> Iterator[str]:
    if count > 0:
        yield f"  ... {plural(count, f'more {noun}')}: run.report()['{noun}s']"


def _metric_words(metric: Mapping[str, Any]) -> str:
    words = f"last {format_number(metric['last'])} at step {metric['step']:,}"
    if metric["lowest"] is not None:
        words += f", lowest {format_number(metric['lowest'])} at {metric['lowest_step']:,}"
        words += f", highest {format_number(metric['highest'])} at {metric['highest_step']:,}"
    if metric["not_finite"]:
        words += (
            f", {plural(metric['not_finite'], 'value')} NOT FINITE, the first at step {metric['first_not_finite']:,}"
        )
    return words


def _rank_words(rank: Mapping[str, Any]) -> str:
    words = [rank["state"]]
    words += [f"step {rank['step']:,}"] if "step" in rank else []
    words += [rank["where"]] if "where" in rank else []
    words += [one_line(rank["reason"], 80)] if "reason" in rank else []
    words += [f"returned {one_line(rank['returned'], 60)}"] if "returned" in rank else []
    words += [f"wrote {one_line(rank['last_line'], 60)!r}"] if "last_line" in rank else []
    return ", ".join(words)


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(name): _jsonable(each) for name, each in value.items()}
    return [_jsonable(each) for each in value] if isinstance(value, (list, tuple)) else value
