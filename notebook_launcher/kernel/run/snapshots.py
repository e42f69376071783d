"""Freezes the run data into the snapshots that views read."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from notebook_launcher import context
from notebook_launcher.history.schema import RankFailure, RankSnapshot, RunMetrics, RunReader, RunSnapshot
from notebook_launcher.kernel.display.output import one_line_of
from notebook_launcher.kernel.failures.culprit import STOPPED, consequences
from notebook_launcher.kernel.plan import config_as_json
from notebook_launcher.wording import Listed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.drawing.run_report import RunReport
    from notebook_launcher.history.schema import MetricPoint, RankPhases, RankState, RunChange, RunPicture, RunState
    from notebook_launcher.kernel.failures.culprit import Failure
    from notebook_launcher.kernel.results import Results
    from notebook_launcher.kernel.run.data import RunData


QUIET = 1.0
"""Seconds for which a run shows no progress, because it may be over before a person can read the line."""
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
    phases = data.live.phases
    # A stop that the user asked for is not a failure.
    error = "" if outcome is None or outcome.error is None or outcome.state == "stopped" else one_line_of(outcome.error)
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
        error=error,
        ranks=take_rank_snapshots(data, phases),
        failures=tuple(
            RankFailure(
                rank=failure.rank,
                summary=failure.summary,
                traceback=failure.traceback,
                victim=failure.victim,
                last_lines=failure.last_lines,
            )
            for failure in _failures(results)
        ),
        waiting=hang.text(time.monotonic()) if hang is not None else data.stopped_in,
        phases=phases,
        usage=dict(data.usage.usage),
        changes=data.live.changes,
        settings=data.live.settings.present(),
        notices=tuple(data.notices),
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
        state=summary.state if summary is not None else _rank_state(data, rank),
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


def _reasons(results: Results) -> dict[int, str]:
    """Return why ranks returned nothing: a rank's own failure, or the culprit."""
    own = {failure.rank: failure.summary for failure in reversed(_failures(results))}
    return own | {rank: f"caused by rank {blamed}" for rank, blamed in consequences(results.failures).items()}


def _failures(results: Results | None) -> list[Failure]:
    """Return the failures, without ranks that were only stopped."""
    return [failure for failure in results.failures if failure.summary != STOPPED] if results is not None else []


# --------------------------------------------------------------------------------------------------------------------
# A run of this process as views and users read it, while it goes on and afterwards.


class LiveRunReader(RunReader):
    """Reads the run data; from any thread."""

    def __init__(self, data: RunData) -> None:
        self._data = data
        """The run data, which a reader only reads."""

    @property
    def id(self) -> str:
        """Identifier of the run: the time, the function, six random digits."""
        return self._data.id

    @property
    def name(self) -> str:
        """Name of the run: as edited, else as launched, else the function's name."""
        return self._data.edits["name"] or self._data.name

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of the run: as edited, else as launched."""
        edited = self._data.edits["tags"]
        return self.config.tags if edited is None else tuple(edited)

    @property
    def notes(self) -> str:
        """Notes that `edit` has written; empty if there are none."""
        return self._data.edits["notes"] or ""

    @property
    def last_line(self) -> str:
        """The last line of a run's output, where a picture or a client shows it."""
        return self._data.output.last_line

    @property
    def config(self) -> LaunchConfig:
        """The options as given."""
        return self._data.plan.config

    @property
    def state(self) -> RunState:
        """`"starting"`, `"running"`, `"paused"`, `"stopping"`, then `"done"`, `"failed"` or `"stopped"`.

        The state is `"waiting"` while ranks have waited for longer than `hang_notice` in a collective which other
        ranks have not entered; `run.snapshot().waiting` names the ranks and the collective.
        """
        return state_of(self._data)

    @property
    def seed(self) -> int | None:
        """The seed of the launch; None: its ranks began with the random states of the kernel."""
        return self._data.plan.seed

    @property
    def ranks(self) -> tuple[RankSnapshot, ...]:
        """Present state of each rank."""
        return Listed(take_rank_snapshots(self._data))

    @property
    def metrics(self) -> RunMetrics:
        """Metrics that the ranks have reported so far, in the order of arrival."""
        return RunMetrics(self.metrics_since(0)[0])

    @property
    def pictures(self) -> tuple[RunPicture, ...]:
        """Images and histograms that the ranks have reported so far, in the order of arrival."""
        return tuple(self._data.live.picture_series.values)

    @property
    def phases(self) -> dict[int, RankPhases]:
        """Time that each rank spent on each phase of training, as reported by its Accelerator."""
        return self._data.live.phases

    @property
    def changes(self) -> tuple[RunChange, ...]:
        """Settings that `set` has changed so far: name, values before and after, and the update."""
        return self._data.live.changes

    def snapshot(self) -> RunSnapshot:
        """Return everything that is known of the run at this moment, as plain data."""
        return take_snapshot(self._data)

    def report(self) -> RunReport:
        """Return what is known of the run in plain values: a dict, which `print` shows as text and `to_json()` as JSON.

        State, ranks, who waits where, the first error with its line, metrics (last, lowest, highest), the rank that the
        others wait for, and what to type next; at any time, also after the run's end.
        """
        from notebook_launcher.drawing.run_report import report_on

        return report_on(self)

    def metrics_since(self, position: int) -> tuple[Sequence[MetricPoint], int]:
        """Return the metrics reported after a position, and the next position; start with 0."""
        return self._data.live.metric_series.since(position)

    def pictures_since(self, position: int) -> tuple[list[RunPicture], int]:
        """Return the pictures reported after a position, and the next position; start with 0."""
        return self._data.live.picture_series.since(position)

    def logs_since(self, rank: int, position: int) -> tuple[str, int]:
        """Return the text that a rank wrote after a position, and the next position; start with 0.

        A rank that a restart has left out is read, too: its log is still written to the run's folder.
        """
        return self._data.output.logs[rank].since(position)

    def log_order(self, num_pieces: int) -> list[tuple[int, int]]:
        """Return the rank and the end of the newest pieces of output of all ranks, in the order of their arrival."""
        return self._data.output.order.pieces(num_pieces)
