"""A whole run as a static HTML fragment, an SVG and a text, which a saved notebook keeps.

Programs that sanitise HTML remove `<svg>`, so the picture is an output of its own. In a notebook that is not trusted,
because it comes from another machine, JupyterLab 4.6 does not show `image/svg+xml` either, but it keeps an `<img>` that
holds the picture: `picture_html`.
"""

from __future__ import annotations

import base64
import dataclasses
import time
from typing import TYPE_CHECKING

from notebook_launcher.colours import BAD
from notebook_launcher.drawing import sections, tables
from notebook_launcher.drawing.charts import place_of
from notebook_launcher.drawing.legend import PHASES
from notebook_launcher.drawing.metric_plots import curves_picture
from notebook_launcher.drawing.plots import PlotOptions
from notebook_launcher.drawing.reported import reported_html
from notebook_launcher.drawing.svg import SIZE, SvgPicture, document, stack, text
from notebook_launcher.drawing.timeline import mean_shares, sync_text, timeline_picture
from notebook_launcher.history.usage import usage_curves
from notebook_launcher.wording.counts import plural, rank_list
from notebook_launcher.wording.text import clean, escape, one_line
from notebook_launcher.wording.units import describe_values, format_seconds, format_share

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from notebook_launcher.drawing.charts import AxisKind
    from notebook_launcher.history.curves import Curves
    from notebook_launcher.history.schema import RunPicture, RunSnapshot

__all__ = [
    "LEAST_SPAN",
    "call_text",
    "change_marks",
    "headline",
    "picture_html",
    "static_html",
    "static_svg",
    "static_text",
]

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
    parts = [_summary_html(snapshot), sections.failures_html(sections.failures_to_show(snapshot))]
    if picture:
        svg = document(stack(_drawings(snapshot, curves, PlotOptions())), headline(snapshot))
        parts.append(picture_html(svg, f"Curves and timeline of {headline(snapshot)}"))
    parts += [
        sections.ranks_html(snapshot.ranks),
        sections.metrics_html(curves),
        reported_html(pictures),
        sections.shares_html(snapshot.phases),
        tables.note_html(sync_text(snapshot.phases)),
        sections.settings_html(snapshot),
        sections.logs_html(logs or {}),
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
    failures = sections.failures_to_show(snapshot)
    for place, group in enumerate(sections.alike(failures)[:MAX_FAILURES]):
        failure, who = group[0], rank_list(member.rank for member in group)
        lines.append(f"{who}{sections.because(failure, failures)}: {one_line(failure.summary)}")
        if failure.traceback and not failure.victim and place < MAX_TRACEBACKS:
            lines += [f"    {line}" for line in clean(failure.traceback, 5000).splitlines()]
    lines += (
        ["", *tables.table_text(sections.rank_columns(snapshot.ranks), width, dispensable=DISPENSABLE)]
        if snapshot.ranks
        else []
    )
    if curves is not None and len(curves):
        lines += ["", *_text_metrics(curves, width)]
    if shares := mean_shares(snapshot.phases):
        words = (f"{PHASES[name].word} {format_share(share)}" for name, share in shares.items())
        lines += ["", f"time: {', '.join(words)}"]
        lines += [note] if (note := sync_text(snapshot.phases)) else []
    return "\n".join(line.rstrip() for line in lines)


def _text_metrics(curves: Curves, width: int | None) -> list[str]:
    columns = sections.metric_columns(sections.metric_rows(curves))
    return tables.table_text(columns, width, dispensable=DISPENSABLE)


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
