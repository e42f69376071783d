"""Items of the monitor's messages, made from snapshots: JSON, in which a number that is not finite is null."""

from __future__ import annotations

import base64
import contextlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.drawing.run_picture import alike, because, call_text, failures_to_show, outputs_of
from notebook_launcher.history.summaries import measure_sync, merge_progress, slowest_rank
from notebook_launcher.wording import (
    format_bytes,
    format_count,
    format_number,
    format_rate,
    format_seconds,
    format_setting,
    format_share,
    one_line,
    plural,
    rank_list,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.history.schema import RankFailure, RankSnapshot, RunSnapshot
    from notebook_launcher.history.summaries import MergedProgress
    from notebook_launcher.kernel.inspection.profiles import Profile
    from notebook_launcher.kernel.inspection.stacks import Samples

NOBODY_CHANGES = "Needs an Accelerator that has made an update"
MAX_SETTINGS = 64
MAX_TEXT = 2000
MAX_DRAWING = 1_500_000
"""Characters of a drawing that is sent to the page: Jupyter's server drops what comes above 3 MB in 3 s."""
MAX_TRACES = 1_000_000
"""Bytes of the traces of a profile that are sent to the page; larger ones are in the run's folder."""
MAX_TRACEBACK, MAX_TRACEBACKS = 20_000, 500_000
"""Characters of a traceback, and of all of them: each message with a new error has all errors."""
_NUMBER, _ABOVE_0 = r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", r"(?=[\d.]*[1-9])(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"
_FACTOR = r"[x*]\s*(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"
FIELDS: dict[str, tuple[str, str, str]] = {
    "positive": (f"{_ABOVE_0}|{_FACTOR}", "A number above 0, a factor such as x0.5", "0.01 or x0.5"),
    "optional": (f"none|{_ABOVE_0}|{_FACTOR}", "A number above 0, a factor such as x0.5, or none", "1.0, x0.5 or none"),
    "count": (r"0*[1-9]\d*", "A whole number, 1 or more", ""),
    "number": (f"{_NUMBER}|{_FACTOR}", "A number, or a factor such as x0.5", "0.5 or x0.5"),
    "integer": (rf"[+-]?\d+|{_FACTOR}", "A whole number, or x2", "4 or x2"),
    "switch": ("on|off", "on or off", "on or off"),
}
"""By the kind of a setting: what the page sends of what was typed into its field (the kernel checks it again), as a
regular expression and in words, and an example; empty: its present value."""


def run_item(snapshot: RunSnapshot, *, can_act: bool, action_hint: str) -> dict[str, Any]:
    """Return the item RUN."""
    merged = merge_progress(snapshot.ranks)
    is_live = can_act and not snapshot.is_over
    # An Accelerator that has made an update reports its settings.
    can_change = is_live and snapshot.state in ("running", "waiting", "paused") and bool(snapshot.settings)
    return {
        "id": snapshot.id,
        "name": snapshot.name,
        "state": snapshot.state,
        "summary": snapshot.summary,
        "arguments": call_text(snapshot),
        "seconds": round(snapshot.seconds, 6),
        "num_processes": snapshot.num_processes,
        "is_over": snapshot.is_over,
        "error": _short(snapshot.error),
        "waiting": _short(snapshot.waiting),
        "effective_batch": effective_batch(snapshot),
        "progress": None if merged is None else _progress_item(merged),
        "actions": {
            "stop": is_live and snapshot.state != "stopping",
            "interrupt": is_live,
            "stacks": is_live,
            # Only an Accelerator saves, and an Accelerator that trains has reported windows.
            "save": is_live and snapshot.state in ("running", "waiting", "paused") and bool(snapshot.phases),
            "pause": can_change and snapshot.state != "paused",
            "resume": can_change and snapshot.state == "paused",
            "set": can_change,
            "sample": is_live and snapshot.state in ("running", "waiting"),
            "profile": can_change and snapshot.state == "running",
        },
        "change_hint": "" if can_change or not is_live else NOBODY_CHANGES,
        "action_hint": action_hint if is_live else "The kernel ended before the run did." * (snapshot.state == "lost"),
        "sync": measure_sync(snapshot.phases.values()).text,
    }


def _progress_item(merged: MergedProgress) -> dict[str, Any]:
    left = "" if merged.seconds_left is None else f"{format_seconds(math.ceil(merged.seconds_left))} {merged.left}"
    return {
        "done": merged.done,
        "total": merged.total,
        "text": " · ".join(filter(None, [_short(merged.description), done_words(merged.done, merged.total)])),
        "pace": " · ".join(filter(None, [format_rate(merged.rate), left])),
    }


def done_words(done: int | None, total: int | None) -> str:
    """Return `25 of 100 (25 %)`, or `25 done` where the total is unknown."""
    count = format_count(done or 0)
    return (
        f"{count} of {format_count(total)} ({format_share(min(1.0, (done or 0) / total))})"
        if total
        else f"{count} done"
    )


def rank_items(snapshot: RunSnapshot) -> list[dict[str, Any]]:
    """Return the items RANK."""
    # None waits for another while all are held.
    slowest = None if snapshot.state == "paused" else slowest_rank(snapshot)
    return [rank_item(rank, is_slowest=rank.rank == slowest) for rank in snapshot.ranks]


def rank_item(rank: RankSnapshot, *, is_slowest: bool) -> dict[str, Any]:
    """Return the item RANK, with numbers in the words that the page shows."""
    return {
        "words": {
            "step": format_count(rank.step),
            "samples_per_second": format_number(rank.samples_per_second, 3),
            "memory": format_bytes(rank.peak_memory if rank.memory is None else rank.memory),
            "gpu_memory": format_bytes(rank.gpu_memory),
            "gpu_utilization": format_share(rank.gpu_utilization),
            "done": done_words(rank.done, rank.total),
        },
        "rank": rank.rank,
        "state": rank.state,
        # "stopped" needs no reason if the user asked for it, but if another rank was the cause.
        "reason": "" if rank.state == "stopped" and not rank.reason.startswith("caused by ") else _short(rank.reason),
        "last_line": f"returned {_short(rank.returned)}" if rank.returned else _short(rank.last_line),
        "done": rank.done,
        "total": rank.total,
        "slowest": is_slowest,
    }


def errors_item(snapshot: RunSnapshot) -> dict[str, Any]:
    """Return the item ERRORS."""
    failures = failures_to_show(snapshot)
    groups = alike(failures)
    limit = min(MAX_TRACEBACK, MAX_TRACEBACKS // max(1, len(groups)))
    victims = [failure for failure in failures if failure.victim]
    cause = because(victims[0], failures) if victims else ""
    return {
        "culprits": [_error_item(group, limit) for group in groups if not group[0].victim],
        "victims": [_error_item(group, limit) for group in groups if group[0].victim],
        "victims_title": f"{plural(len(victims), 'rank')} failed as a consequence{cause}",
    }


def _error_item(group: Sequence[RankFailure], limit: int) -> dict[str, Any]:
    trace, who = group[0].traceback, rank_list(failure.rank for failure in group)
    return {
        "who": who,
        "summary": _short(group[0].summary),
        # The end has the exception and its place.
        "traceback": trace if len(trace) <= limit else "[...]\n" + trace[-limit:],
        "outputs": [
            ["Last lines of output" + f" of {ranks}" * (ranks != who), "\n".join(map(_short, lines))]
            for ranks, lines in outputs_of(group).items()
        ],
    }


def setting_items(snapshot: RunSnapshot) -> list[dict[str, Any]]:
    """Return the items SETTING."""
    return [
        setting_item(one_line(setting.name, 80), format_setting(setting.value), setting.kind)
        for setting in snapshot.settings[:MAX_SETTINGS]
    ]


def setting_item(name: str, text: str, kind: str) -> dict[str, Any]:
    """Return the item SETTING."""
    pattern, takes, example = FIELDS[kind]
    return {"name": name, "text": text, "kind": kind, "pattern": pattern, "takes": takes, "example": example or text}


def change_items(snapshot: RunSnapshot) -> list[dict[str, Any]]:
    """Return the items CHANGE."""
    return [
        {
            "name": (name := one_line(change.name, 80)),
            "words": f"{name} {format_setting(change.before)} → {format_setting(change.after)}",
            "who": f"by {'the monitor' if change.source == 'monitor' else 'code'} after update {change.update}",
        }
        for change in snapshot.changes
    ]


def sample_item(samples: Samples) -> dict[str, Any]:
    """Return the item FINDING of sampled stacks."""
    drawing = samples.to_svg()
    note = "" if len(drawing) <= MAX_DRAWING else "The drawing is too large for the page; run.sample() has it."
    return {"kind": "sample", "drawing": "" if note else drawing, "tables": [], "problem": note}


def profile_item(profile: Profile) -> dict[str, Any]:
    """Return the item FINDING of a profile: a table for each rank, with its trace if there is room for it."""
    tables, room = profile.plain_tables(), MAX_TRACES
    for table in tables:
        table["trace_data"] = ""
        with contextlib.suppress(OSError):  # There is no trace, or it was removed.
            path = Path(table["trace"])
            if path.is_file() and path.stat().st_size <= room:
                room -= path.stat().st_size
                table["trace_data"] = base64.b64encode(path.read_bytes()).decode()
    return {"kind": "profile", "drawing": "", "tables": tables, "problem": ""}


def effective_batch(snapshot: RunSnapshot) -> str:
    """Return `8 x 4 x 2 = 64 samples per update`, as the ranks have counted so far; empty if no rank has.

    The figures describe a full window, because the last window of an epoch is usually cut short. If most windows
    are not full, because their micro-batches vary, the figures are averages.
    """
    known = next((phases for _, phases in sorted(snapshot.phases.items()) if phases.windows and phases.samples), None)
    if known is None or not math.isfinite(known.samples):
        return ""
    varies = 2 * known.num_fullest < known.windows
    means = known.micro_batches / known.windows, known.samples / known.windows
    per_window, samples = means if varies else known.fullest
    each = samples / per_window / snapshot.num_processes
    # Without a prepared loader that counts samples, a micro-batch counts as 1.
    factors, unit = ([each], "samples") if each != 1 else ([], "micro-batches")
    product = " x ".join(_count(factor) for factor in [*factors, per_window, snapshot.num_processes])
    return f"{product} = {_count(samples)} {unit} per update{' on average' * varies}"


def _count(value: float) -> str:
    return format_count(value) if value >= 100 or float(value).is_integer() else format_number(value, 3)


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " [...]"
