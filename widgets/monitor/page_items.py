"""Items of the monitor's messages, made from snapshots: JSON, in which a number that is not finite is null."""

from __future__ import annotations

import base64
import contextlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.drawing.run_picture import call_text, failures_to_show
from notebook_launcher.history.schema import RankPhases
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
)

if TYPE_CHECKING:
    from notebook_launcher.history.schema import RankFailure, RankSnapshot, RunSnapshot
    from notebook_launcher.history.summaries import MergedProgress
    from notebook_launcher.kernel.inspection.profiles import Profile
    from notebook_launcher.kernel.inspection.stacks import Samples

NOBODY_CHANGES = "Needs an Accelerator that has made an update"
MAX_METRICS = 64
"""Metrics of a rank whose last values are shown."""
MAX_SETTINGS = 64
MAX_TEXT = 2000
MAX_DRAWING = 1_500_000
"""Characters of a drawing that is sent to the page: Jupyter's server drops what comes above 3 MB in 3 s."""
MAX_TRACES = 1_000_000
"""Bytes of the traces of a profile that are sent to the page; larger ones are in the run's folder."""
MAX_TRACEBACK = 20_000


def json_number(value: float | None, digits: int = 6) -> float | None:
    """Return a value for JSON, rounded to `digits` significant digits; None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return rounded if math.isfinite(rounded) else value  # The largest numbers may be rounded up to infinity.


def run_item(snapshot: RunSnapshot, *, can_act: bool, action_hint: str) -> dict[str, Any]:
    """Return the item RUN."""
    merged, sync = merge_progress(snapshot.ranks), measure_sync(snapshot.phases.values())
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
        "action_hint": action_hint if is_live else "",
        "sync": {
            "share": json_number(sync.share, 3),
            "saved_seconds": json_number(sync.saved_seconds, 3),
            "text": sync.text,
        },
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
    slowest = slowest_rank(snapshot)
    return [
        _rank_item(rank, snapshot.phases.get(rank.rank, RankPhases()), is_slowest=rank.rank == slowest)
        for rank in snapshot.ranks
    ]


def rank_words(rank: RankSnapshot) -> dict[str, str]:
    """Return numbers of a rank as the page shows them."""
    return {
        "step": format_count(rank.step),
        "samples_per_second": format_number(rank.samples_per_second, 3),
        "memory": format_bytes(rank.peak_memory if rank.memory is None else rank.memory),
        "gpu_memory": format_bytes(rank.gpu_memory),
        "gpu_utilization": format_share(rank.gpu_utilization),
        "done": done_words(rank.done, rank.total),
    }


def _rank_item(rank: RankSnapshot, phases: RankPhases, *, is_slowest: bool) -> dict[str, Any]:
    return {
        "words": rank_words(rank),
        "rank": rank.rank,
        "state": rank.state,
        "reason": _short(rank.reason),
        "step": rank.step,
        "rate": json_number(rank.rate, 3),
        "samples_per_second": json_number(rank.samples_per_second, 3),
        "memory": rank.memory,
        "peak_memory": rank.peak_memory,
        "gpu_memory": rank.gpu_memory,
        "gpu_utilization": json_number(rank.gpu_utilization, 3),
        "last_line": _short(rank.last_line),
        "done": rank.done,
        "total": rank.total,
        "slowest": is_slowest,
        "returned": _short(rank.returned),
        "metrics": {name: json_number(value) for name, value in list(rank.metrics.items())[:MAX_METRICS]},
        "shares": {phase: round(share, 3) for phase, share in phases.shares.items()},
    }


def error_items(snapshot: RunSnapshot) -> list[dict[str, Any]]:
    """Return the items ERR."""
    return [_error_item(failure) for failure in failures_to_show(snapshot)]


def _error_item(failure: RankFailure) -> dict[str, Any]:
    trace = failure.traceback
    return {
        "rank": failure.rank,
        "summary": _short(failure.summary),
        # The end has the exception and its place.
        "traceback": trace if len(trace) <= MAX_TRACEBACK else "[...]\n" + trace[-MAX_TRACEBACK:],
        "victim": failure.victim,
        "last_lines": [_short(line) for line in failure.last_lines],
    }


def setting_items(snapshot: RunSnapshot) -> list[dict[str, Any]]:
    """Return the items SETTING."""
    return [
        {"name": one_line(setting.name, 80), "text": format_setting(setting.value), "kind": setting.kind}
        for setting in snapshot.settings[:MAX_SETTINGS]
    ]


def change_items(snapshot: RunSnapshot) -> list[dict[str, Any]]:
    """Return the items CHANGE."""
    return [
        {
            "name": one_line(change.name, 80),
            "before": format_setting(change.before),
            "after": format_setting(change.after),
            "update": change.update,
            "step": change.step,
            "seconds": json_number(change.time),
            "source": change.source,
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
