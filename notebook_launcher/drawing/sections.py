"""Sections of a run's page: ranks, metrics, phases, errors, settings and output."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from notebook_launcher.drawing.averages import mean_of
from notebook_launcher.drawing.legend import PHASES
from notebook_launcher.drawing.sparks import spark_line
from notebook_launcher.drawing.tables import FEW_ROWS, MAX_ROWS, Column, folded, table_html
from notebook_launcher.wording.counts import plural, rank_list
from notebook_launcher.wording.text import clean, escape, one_line
from notebook_launcher.wording.units import format_bytes, format_count, format_number, format_seconds, format_share

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from notebook_launcher.history.curves import Curves
    from notebook_launcher.history.schema import RankFailure, RankPhases, RankSnapshot, RunSnapshot

__all__ = [
    "alike",
    "because",
    "failures_html",
    "failures_to_show",
    "logs_html",
    "metric_columns",
    "metric_rows",
    "metrics_html",
    "plain_settings",
    "rank_columns",
    "ranks_html",
    "settings_html",
    "shares_html",
]

MAX_LOGS = 16
MAX_LOG = 20_000
"""Last characters of a rank's output that are kept."""
PRE = "margin:4px 0 8px;padding:6px 10px;overflow:auto;max-height:360px;font-size:12px;line-height:1.4;white-space:pre"


def rank_columns(ranks: Sequence[RankSnapshot]) -> list[Column]:
    """Return the columns of the table of ranks; failed ranks come first."""
    ranks = sorted(ranks, key=lambda rank: (rank.state != "failed", rank.rank))
    return [
        Column("rank", [str(rank.rank) for rank in ranks], kind="number"),
        Column("state", [rank.state for rank in ranks], kind="state"),
        Column("result", [_result(rank) for rank in ranks], can_shrink=True),
        Column("progress", [_progress(rank) for rank in ranks], kind="number"),
        Column("step", [format_count(rank.step) for rank in ranks], kind="number"),
        Column("samples/s, all ranks", [format_number(rank.samples_per_second, 3) for rank in ranks], kind="number"),
        Column("time", [format_seconds(rank.seconds) for rank in ranks], kind="number"),
        Column("peak memory", [format_bytes(rank.peak_memory) for rank in ranks], kind="number"),
        Column("memory now", [format_bytes(rank.memory) for rank in ranks], kind="number"),
        Column("GPU memory", [format_bytes(rank.gpu_memory) for rank in ranks], kind="number"),
        Column("last line", [one_line(rank.last_line, 60) for rank in ranks], can_shrink=True),
    ]


def ranks_html(ranks: Sequence[RankSnapshot]) -> str:
    """Return a table with a row for each rank."""
    return table_html(rank_columns(ranks), caption="Ranks", more="more ranks") if ranks else ""


def _result(rank: RankSnapshot) -> str:
    # A rank that was stopped on request has no reason worth a word; one that ended because of another rank has.
    reason = rank.reason if rank.state != "stopped" or rank.reason.startswith("caused by ") else ""
    return one_line(reason or rank.returned, 60)


def _progress(rank: RankSnapshot) -> str:
    if rank.done is None:
        return ""
    return f"{rank.done:,}" if rank.total is None else f"{rank.done:,} / {rank.total:,}"


def metric_rows(curves: Curves) -> list[tuple[str, str, str, str, str]]:
    """Return (name, curve, last, lowest, highest) of each metric, the mean over its ranks."""
    rows = []
    for name in curves.names[:MAX_ROWS]:
        points = mean_of(name, curves[name].values(), 0).points
        every = [value for curve in curves[name].values() for _, value in curve.points() if math.isfinite(value)]
        last = format_number(points[-1][1]) if points else ""
        low, high = format_number(min(every, default=None)), format_number(max(every, default=None))
        rows.append((one_line(name, 80), spark_line(points), last, low, high))
    return rows


def metric_columns(rows: Sequence[tuple[str, str, str, str, str]]) -> list[Column]:
    """Return the rows of `metric_rows` as columns."""
    names, lines, *numbers = zip(*rows, strict=True)
    named = zip(("last", "lowest", "highest"), numbers, strict=True)
    return [
        Column("metric", names, can_shrink=True),
        Column("curve", lines, kind="curve"),
        *(Column(name, cells, kind="number") for name, cells in named),
    ]


def metrics_html(curves: Curves) -> str:
    """Return a table with a row for each metric."""
    rows = metric_rows(curves)
    if not rows:
        return ""
    left_out = len(curves) - len(rows)
    return table_html(metric_columns(rows), caption="Metrics", more="more metrics") + (
        f"<div>{left_out:,} more metrics are not shown.</div>" if left_out else ""
    )


def shares_html(phases: Mapping[int, RankPhases]) -> str:
    """Return a table with the share of each phase in the ranks' time."""
    measured = {rank: known for rank, known in sorted(phases.items()) if any(known.seconds.values())}
    if not measured:
        return ""
    columns = [Column("rank", [str(rank) for rank in measured], kind="number")]
    for name, look in PHASES.items():
        cells = [format_share(known.shares.get(name, 0.0)) for known in measured.values()]
        columns.append(Column(look.word, cells, kind="number"))
    columns.append(Column("windows", [f"{known.windows:,}" for known in measured.values()], kind="number"))
    columns.append(Column("micro-batches", [f"{known.micro_batches:,}" for known in measured.values()], kind="number"))
    return table_html(columns, caption="Where the time went", more="more ranks")


def failures_to_show(snapshot: RunSnapshot) -> list[RankFailure]:
    """Return the failures, without ranks that ended because the user stopped the run."""
    stopped = {rank.rank for rank in snapshot.ranks if rank.state == "stopped"}
    return [failure for failure in snapshot.failures if failure.victim or failure.rank not in stopped]


def because(failure: RankFailure, failures: Sequence[RankFailure]) -> str:
    """Return ` (caused by rank 1)` for a rank that failed because rank 1 did; empty for the culprit."""
    if not failure.victim:
        return ""
    culprit = next((other.rank for other in failures if not other.victim), None)
    return " (caused by another rank)" if culprit is None else f" (caused by rank {culprit})"


def alike(failures: Sequence[RankFailure]) -> list[list[RankFailure]]:
    """Return the failures in order; those that differ in the rank and its output alone are one group."""
    groups: dict[tuple[bool, str, str], list[RankFailure]] = {}
    for failure in failures:
        groups.setdefault((failure.victim, failure.summary, failure.traceback), []).append(failure)
    return list(groups.values())


def failures_html(failures: Sequence[RankFailure]) -> str:
    """Return the errors of the ranks with their tracebacks, equal ones once; the culprit's is first and unfolded."""
    parts, groups = [], alike(failures)
    for place, group in enumerate(groups[:FEW_ROWS]):
        failure = group[0]
        body = f'<pre style="{PRE}">{escape(failure.traceback)}</pre>' if failure.traceback else ""
        for ranks, last_lines in _outputs(group).items():
            lines = escape("\n".join(last_lines))
            whose = "its output" if len(group) == 1 else f"the output of {ranks}"
            body += f'<div>Last lines of {whose}:</div><pre style="{PRE}">{lines}</pre>'
        who = rank_list(member.rank for member in group)
        summary = f"{who}{because(failure, failures)}: {one_line(failure.summary)}"
        parts.append(folded(summary, body, opened=not place) if body else f"<div>{escape(summary)}</div>")
    if num_more := sum(len(group) for group in groups[FEW_ROWS:]):
        parts.append(f"<div>{plural(num_more, 'more rank')} failed.</div>")
    return "".join(parts)


def _outputs(group: Sequence[RankFailure]) -> dict[str, tuple[str, ...]]:
    """Return the last lines that the ranks of a group wrote, by rank; equal ones once."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for failure in group[:FEW_ROWS]:
        if failure.last_lines:
            ranks.setdefault(failure.last_lines, []).append(failure.rank)
    return {rank_list(numbers): lines for lines, numbers in ranks.items()}


def plain_settings(snapshot: RunSnapshot) -> dict[str, str]:
    """Return the settings of a run as text, by name: the function's arguments, and the options.

    Environment variables are shown by name only: their values may be secrets, and notebooks are shared.
    """
    arguments = {f"arguments.{one_line(name, 80)}": one_line(words) for name, words in snapshot.arguments.items()}
    settings = {name: _plain(value) for name, value in snapshot.config.items() if name != "env"}
    env = snapshot.config.get("env")
    names = sorted(env) if isinstance(env, dict) else []
    return {**arguments, **settings, **{f"env[{one_line(name, 80)!r}]": "set" for name in names}}


def _plain(value: Any) -> str:
    try:
        return one_line(json.dumps(value, ensure_ascii=False, default=str))
    except (TypeError, ValueError):
        return one_line(value)


def settings_html(snapshot: RunSnapshot) -> str:
    """Return all settings, folded."""
    settings = plain_settings(snapshot)
    if not settings:
        return ""
    columns = [Column("setting", list(settings)), Column("value", list(settings.values()))]
    return folded(f"Settings ({len(settings)})", table_html(columns))


def logs_html(logs: Mapping[int, str]) -> str:
    """Return the end of each rank's output, folded."""
    written = {rank: log for rank, log in sorted(logs.items()) if log.strip()}
    parts = [folded(f"Output of rank {rank}", _log_html(log)) for rank, log in list(written.items())[:MAX_LOGS]]
    if len(written) > MAX_LOGS:
        parts.append(f"<div>The output of {len(written) - MAX_LOGS} more ranks is not shown.</div>")
    return "".join(parts)


def _log_html(log: str) -> str:
    left_out = len(log) - MAX_LOG
    note = f"<div>{left_out:,} earlier characters are not shown.</div>" if left_out > 0 else ""
    return f'{note}<pre style="{PRE}">{escape(clean(log[-MAX_LOG:]))}</pre>'
