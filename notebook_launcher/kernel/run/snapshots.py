"""Freezes the run data into the snapshots that views read."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from notebook_launcher import context
from notebook_launcher.history.schema import RankFailure, RankSnapshot, RunSnapshot
from notebook_launcher.kernel.config_record import config_as_json
from notebook_launcher.kernel.display.formatting import one_line_of
from notebook_launcher.kernel.failures.culprit import STOPPED, consequences

if TYPE_CHECKING:
    from collections.abc import Mapping

    from notebook_launcher.history.schema import RankPhases, RankState, RunState
    from notebook_launcher.kernel.failures.failure import Failure
    from notebook_launcher.kernel.results import Results
    from notebook_launcher.kernel.run.data import RunData
    from notebook_launcher.kernel.run.outcome import RunOutcome

__all__ = ["state_of", "take_rank_snapshots", "take_snapshot"]

ACTIVITIES: dict[int, RankState] = {
    context.COMPUTING: "running",
    context.WAITING: "waiting",
    context.SAVING: "saving",
    context.ENDED: "running",  # Its result is on the way.
}


def state_of(data: RunData) -> RunState:
    """Return `"starting"`, `"running"`, `"waiting"`, `"paused"`, `"stopping"`, `"done"`, `"failed"` or `"stopped"`."""
    if data.outcome is not None:
        return data.outcome.state
    attempt = data.attempt
    if data.commands.asked_to_stop:
        return "stopping"
    if data.hang is not None:
        return "waiting"
    if attempt is not None and attempt.requests.paused_after is not None:
        return "paused"
    is_up = attempt is not None and (attempt.state.started or (data.output.has_text and not data.restarts))
    return "running" if is_up else "starting"


def take_snapshot(data: RunData) -> RunSnapshot:
    """Return the present state of the run as plain data; from any thread."""
    outcome, plan = data.outcome, data.plan
    results = outcome.results if outcome is not None else None
    hang = data.hang
    failures = _failures(results)
    phases = data.live.phases
    return RunSnapshot(
        id=data.id,
        name=data.edits["name"] or data.name,
        kind=data.kind,
        state=state_of(data),
        started=data.started,
        seconds=data.seconds,
        num_processes=plan.num_processes,
        summary=plan.summary,
        seed=plan.seed,
        config=config_as_json(plan.config),
        arguments=dict(data.scope.arguments or {}),
        restarts=results.restarts if results is not None else data.restarts,
        stopped_by=results.stopped_by if results is not None else None,
        timed_out=results.timed_out if results is not None else False,
        error=_error(outcome),
        ranks=take_rank_snapshots(data, phases),
        failures=tuple(_failure(failure) for failure in failures),
        waiting=hang.text(time.monotonic()) if hang is not None else data.stopped_in,
        phases=phases,
        usage=dict(data.usage.usage),
        changes=data.live.changes,
        settings=data.live.settings.present(),
    )


def take_rank_snapshots(data: RunData, phases: Mapping[int, RankPhases] | None = None) -> tuple[RankSnapshot, ...]:
    """Return the present state of all ranks as plain data; from any thread. `phases`: the present ones, if known."""
    phases = data.live.phases if phases is None else phases
    attempt, outcome, hang = data.attempt, data.outcome, data.hang
    # Once for all ranks, of which there may be a thousand. The ranks of a session outlive the run.
    pids = attempt.tree.pids if attempt is not None and outcome is None else {}
    reasons = {} if outcome is None else _reasons(outcome.results)
    places = {} if hang is None else hang.places()
    return tuple(
        _take_rank_snapshot(
            data, rank, pids.get(rank), phases.get(rank), reason=reasons.get(rank, ""), where=places.get(rank, "")
        )
        for rank in range(data.plan.num_processes)
    )


def _take_rank_snapshot(
    data: RunData, rank: int, pid: int | None, phases: RankPhases | None, *, reason: str, where: str
) -> RankSnapshot:
    live, attempt, outcome = data.live, data.attempt, data.outcome
    progress = live.progress.get(rank)
    step = live.last_steps.get(rank)
    results = outcome.results if outcome is not None else None
    summary = results.summary_of(rank) if results is not None else None
    lines = data.output.last_lines(rank, 1)
    gpu = data.gpus.read(rank)
    hang = data.hang
    since = hang.since.get(rank) if hang is not None else None
    return RankSnapshot(
        rank=rank,
        pid=pid,
        node=data.plan.node_names[rank] if data.plan.node_names else "",
        state=summary.state if summary is not None and summary.state != "unknown" else _rank_state(data, rank),
        reason=reason,
        done=progress.done if progress else None,
        total=progress.total if progress else None,
        description=progress.description if progress else "",
        rate=live.items_per_second(rank),
        step=step if step is not None else phases.windows if phases else None,
        samples_per_second=live.samples_per_second(rank, is_over=outcome is not None),
        memory=attempt.tree.memory(rank) if attempt is not None and pid is not None else None,
        peak_memory=summary.peak_memory if summary else None,
        gpu_memory=gpu.memory,
        gpu_utilization=gpu.utilization,
        last_line=lines[0] if lines else "",
        waited=time.monotonic() - since if since is not None else None,
        where=where,
        metrics=dict(live.last_values.get(rank, {})),
        seconds=summary.seconds if summary else None,
        returned=results.short(rank) if results is not None else "",
    )


def _rank_state(data: RunData, rank: int) -> RankState:
    attempt = data.attempt
    if attempt is not None and rank in attempt.state.outcomes:
        return attempt.state.outcomes[rank].state
    if attempt is None or rank not in attempt.state.started:
        # What it writes before the call comes from the imports of the function.
        return "running" if data.output.last_lines(rank, 1) and not data.restarts else "starting"
    if rank in data.asking:
        return "asking"
    if (hang := data.hang) is not None and rank in hang.since:
        return "waiting"
    with contextlib.suppress(ValueError):  # The board was closed while the run ended.
        return ACTIVITIES[attempt.tree.board.activity_of(rank)]
    return "running"


def _error(outcome: RunOutcome | None) -> str:
    """Return the run's failure in one line; a stop that the user asked for is not a failure."""
    if outcome is None or outcome.error is None or outcome.state == "stopped":
        return ""
    return one_line_of(outcome.error)


def _reasons(results: Results) -> dict[int, str]:
    """Return why ranks returned nothing: a rank's own failure, or the culprit."""
    own = {failure.rank: failure.summary for failure in reversed(_failures(results))}
    return own | {rank: f"caused by rank {blamed}" for rank, blamed in consequences(results.failures).items()}


def _failures(results: Results | None) -> list[Failure]:
    """Return the failures, without ranks that were only stopped."""
    return [failure for failure in results.failures if failure.summary != STOPPED] if results is not None else []


def _failure(failure: Failure) -> RankFailure:
    return RankFailure(
        rank=failure.rank,
        summary=failure.summary,
        traceback=failure.traceback,
        victim=failure.victim,
        last_lines=failure.last_lines,
    )
