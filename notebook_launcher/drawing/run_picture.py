"""A whole run as a static HTML fragment, an SVG and a text, which a saved notebook keeps.

Programs that sanitise HTML remove `<svg>`, so the picture is an output of its own. In a notebook that is not trusted,
because it comes from another machine, JupyterLab 4.6 does not show `image/svg+xml` either, but it keeps an `<img>` that
holds the picture: `picture_html`.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher.colours import BAD
from notebook_launcher.drawing import tables
from notebook_launcher.drawing.charts import place_of
from notebook_launcher.drawing.legend import PHASES
from notebook_launcher.drawing.lines import mean_of
from notebook_launcher.drawing.plots import PlotOptions, curves_picture
from notebook_launcher.drawing.reported import reported_html
from notebook_launcher.drawing.scales import SIZE, SvgPicture, document, stack, text
from notebook_launcher.drawing.tables import FEW_ROWS, MAX_ROWS, Column, folded, spark_line, table_html
from notebook_launcher.drawing.timeline import mean_shares, sync_text, timeline_picture
from notebook_launcher.history.summaries import usage_curves
from notebook_launcher.wording import (
    clean,
    describe_values,
    escape,
    format_bytes,
    format_count,
    format_number,
    format_seconds,
    format_share,
    one_line,
    plural,
    rank_list,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from notebook_launcher.drawing.charts import AxisKind
    from notebook_launcher.history.curves import Curves
    from notebook_launcher.history.schema import RankFailure, RankPhases, RankSnapshot, RunPicture, RunSnapshot


DISPENSABLE = ("curve", "time", "progress", "memory now", "lowest", "highest", "last line")
"""Columns that a narrow terminal leaves out, the first of them first."""
MAX_FAILURES = 32
MAX_TRACEBACKS = 2
"""Tracebacks in a text; ranks tend to fail in the same way."""
LEAST_SPAN = 0.05
"""Of 1 GB, a change by a few kB would fill the whole axis."""


def headline(snapshot: RunSnapshot) -> str:
    """Return `train on 2 ranks: done, 12 s`, with other facts such as restarts."""
    words = f"{one_line(snapshot.name, 80)} on {plural(snapshot.num_processes, 'rank')}: {_state(snapshot)}"
    return ", ".join([words, *_facts(snapshot)])


def _state(snapshot: RunSnapshot) -> str:
    return "stopped on request" if snapshot.state == "stopped" and snapshot.stopped_by else snapshot.state


def _facts(snapshot: RunSnapshot) -> list[str]:
    facts = [format_seconds(snapshot.seconds)]
    facts += ["timed out"] if snapshot.timed_out else []
    facts += [f"restarted {plural(snapshot.restarts, 'time')}"] if snapshot.restarts else []
    facts += ["stopped on request"] if snapshot.stopped_by and snapshot.state != "stopped" else []
    return facts


def call_text(snapshot: RunSnapshot) -> str:
    """Return the arguments in one line, `lr=0.1, epochs=3`; empty if there are none."""
    return one_line(", ".join(f"{name}={words}" for name, words in snapshot.arguments.items()), 300)


def static_html(
    snapshot: RunSnapshot,
    curves: Curves,
    *,
    logs: Mapping[int, str] | None = None,
    picture: bool = False,
    pictures: Sequence[RunPicture] = (),
) -> str:
    """Return the run as an HTML fragment without scripts, style sheets and references to other files.

    Args:
        snapshot: State of the run.
        curves: Metrics of the run; the table shows their means over the ranks.
        logs: Output of ranks, by rank; the last 20,000 characters of each are kept.
        picture: True to add the curves and the timeline, as an image that holds its own data.
        pictures: Pictures that ranks reported; the newest of each name are shown, at most 8.
    """
    parts = [_summary_html(snapshot), failures_html(failures_to_show(snapshot))]
    if picture:
        svg = document(stack(_drawings(snapshot, curves, PlotOptions())), headline(snapshot))
        parts.append(picture_html(svg, f"Curves and timeline of {headline(snapshot)}"))
    parts += [
        table_html(rank_columns(snapshot.ranks), caption="Ranks", more="more ranks") if snapshot.ranks else "",
        metrics_html(curves),
        reported_html(pictures),
        shares_html(snapshot.phases),
        tables.note_html(sync_text(snapshot.phases)),
        settings_html(snapshot),
        logs_html(logs or {}),
    ]
    return tables.joined(parts)


def _summary_html(snapshot: RunSnapshot) -> str:
    facts = [plural(snapshot.num_processes, "rank"), *_facts(snapshot)]
    name = f'<span style="font-size:15px;font-weight:600">{escape(one_line(snapshot.name, 80))}</span>'
    is_shown = snapshot.seed is None or f"seed {snapshot.seed}" in snapshot.summary
    seed = "" if is_shown else f"seed {snapshot.seed}, "
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(max(snapshot.started, 0.0), 1e11)))
    error = (
        f'<div style="margin:8px 0;padding:2px 10px;border-left:3px solid {BAD}">{escape(snapshot.error)}</div>'
        if _is_bare_error(snapshot)
        else ""
    )
    state = tables.state_html(snapshot.state, _state(snapshot))
    return (
        f"<div>{name} &nbsp;{state} &nbsp;{escape(', '.join(facts))}</div>"
        + tables.note_html(one_line(snapshot.waiting, 1000))
        + tables.note_html(call_text(snapshot))
        + tables.note_html(one_line(snapshot.summary, 300))
        + tables.note_html(f"{one_line(snapshot.id)}, {seed}started {started}")
        + error
    )


def _is_bare_error(snapshot: RunSnapshot) -> bool:
    """Return True if the run failed although no rank did; a stop on request is not a failure."""
    return bool(snapshot.error) and not snapshot.failures and snapshot.state != "stopped"


def picture_html(svg: str, description: str) -> str:
    """Return an `<img>` that holds an SVG, for pages from which SVG itself is removed."""
    data = base64.b64encode(svg.encode()).decode()
    style = "max-width:100%;margin-top:14px"
    return f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(description)}" style="{style}">'


def static_svg(snapshot: RunSnapshot, curves: Curves, options: PlotOptions | None = None) -> str:
    """Return the run's curves, the timeline of its ranks, and their memory and load as one `<svg>`.

    Args:
        snapshot: State of the run.
        curves: Metrics of the run.
        options: Options of the curves; None: the usual ones.
    """
    options = options or PlotOptions()
    title = headline(snapshot)
    heading = SvgPicture(options.width, 16, text(0, 12, title, bold=True, size=SIZE + 1, width=options.width))
    return document(stack([heading, *_drawings(snapshot, curves, options)]), title)


def _drawings(snapshot: RunSnapshot, curves: Curves, options: PlotOptions) -> list[SvgPicture]:
    timeline = [timeline_picture(snapshot.phases, width=options.width)] if snapshot.phases else []
    marked = dataclasses.replace(options, marks=tuple(change_marks(snapshot, curves, options.axis)))
    used = usage_curves(snapshot.usage)
    usage = (
        [curves_picture(used, None, PlotOptions(width=options.width, axis="time", least_span=LEAST_SPAN))]
        if len(used)
        else []
    )
    # A run that reported no metric is drawn without a word about them if there is something else to see.
    metrics = (
        [curves_picture(curves, None, marked, average=bool(options.average))]
        if len(curves) or not (timeline or usage)
        else []
    )
    return [*metrics, *timeline, *usage]


def static_text(snapshot: RunSnapshot, curves: Curves | None = None, width: int | None = None) -> str:
    """Return the run as plain text: for terminals, and for front ends that show no HTML.

    Args:
        snapshot: State of the run.
        curves: Metrics of the run, drawn in one line each. None: no metrics.
        width: Characters of a line of the tables; None: any number.
    """
    stated = filter(None, [one_line(snapshot.waiting, 1000), call_text(snapshot)])
    lines = [headline(snapshot), *stated, one_line(snapshot.summary, 300)]
    lines += [f"error: {one_line(snapshot.error)}"] if _is_bare_error(snapshot) else []
    failures = failures_to_show(snapshot)
    for place, group in enumerate(alike(failures)[:MAX_FAILURES]):
        failure, who = group[0], rank_list(member.rank for member in group)
        lines.append(f"{who}{because(failure, failures)}: {one_line(failure.summary)}")
        if failure.traceback and not failure.victim and place < MAX_TRACEBACKS:
            lines += [f"    {line}" for line in clean(failure.traceback, 5000).splitlines()]
    lines += (
        ["", *tables.table_text(rank_columns(snapshot.ranks), width, dispensable=DISPENSABLE)] if snapshot.ranks else []
    )
    if curves is not None and len(curves):
        lines += ["", *tables.table_text(metric_columns(curves), width, dispensable=DISPENSABLE)]
    if shares := mean_shares(snapshot.phases):
        words = (f"{PHASES[name].word} {format_share(share)}" for name, share in shares.items())
        lines += ["", f"time: {', '.join(words)}"]
        lines += [note] if (note := sync_text(snapshot.phases)) else []
    return "\n".join(line.rstrip() for line in lines)


def change_marks(snapshot: RunSnapshot, curves: Curves, axis: AxisKind) -> Iterator[tuple[float, str]]:
    """Yield a mark for each moment at which settings were changed: the place, and the values before and after."""
    place = place_of(axis, curves)
    changed: dict[float, list[str]] = {}
    for change in snapshot.changes:
        where = change.step if axis == "step" else place(change.time)
        if where is not None:
            words = describe_values(change.name, change.before, change.after)
            changed.setdefault(where, []).append(words)
    for where, parts in changed.items():
        yield where, ", ".join(parts)


# --------------------------------------------------------------------------------------------------------------------
# Sections of a run's page: ranks, metrics, phases, errors, settings and output.


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


def _result(rank: RankSnapshot) -> str:
    # A rank that was stopped on request has no reason worth a word; one that ended because of another rank has.
    reason = rank.reason if rank.state != "stopped" or rank.reason.startswith("caused by ") else ""
    return one_line(reason or rank.returned, 60)


def _progress(rank: RankSnapshot) -> str:
    if rank.done is None:
        return ""
    return f"{rank.done:,}" if rank.total is None else f"{rank.done:,} / {rank.total:,}"


def metric_columns(curves: Curves) -> list[Column]:
    """Return a row for each metric: its curve, and its last, lowest and highest value, the mean over its ranks."""
    rows = []
    for name in curves.names[:MAX_ROWS]:
        points = mean_of(name, curves[name].values(), 0).points
        every = [value for curve in curves[name].values() for _, value in curve.points() if math.isfinite(value)]
        values = points[-1][1] if points else None, min(every, default=None), max(every, default=None)
        rows.append((one_line(name, 80), spark_line(points), *map(format_number, values)))
    names, lines, *numbers = zip(*rows, strict=True) if rows else [()] * 5
    return [
        Column("metric", names, can_shrink=True),
        Column("curve", lines, kind="curve"),
        *(Column(*named, kind="number") for named in zip(("last", "lowest", "highest"), numbers, strict=True)),
    ]


def metrics_html(curves: Curves) -> str:
    """Return a table with a row for each metric."""
    left_out = len(curves) - MAX_ROWS
    note = f"<div>{left_out:,} more metrics are not shown.</div>" if left_out > 0 else ""
    return table_html(metric_columns(curves), caption="Metrics", more="more metrics") + note if len(curves) else ""


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
        for ranks, last_lines in outputs_of(group).items():
            lines = escape("\n".join(last_lines))
            whose = "its output" if len(group) == 1 else f"the output of {ranks}"
            body += f'<div>Last lines of {whose}:</div><pre style="{PRE}">{lines}</pre>'
        who = rank_list(member.rank for member in group)
        summary = f"{who}{because(failure, failures)}: {one_line(failure.summary)}"
        parts.append(folded(summary, body, opened=not place) if body else f"<div>{escape(summary)}</div>")
    if num_more := sum(len(group) for group in groups[FEW_ROWS:]):
        parts.append(f"<div>{plural(num_more, 'more rank')} failed.</div>")
    return "".join(parts)


def outputs_of(group: Sequence[RankFailure]) -> dict[str, tuple[str, ...]]:
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
