"""The conclusion of a run: the step from its last attempt to its outcome."""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from notebook_launcher.engines.engine import starting_until
from notebook_launcher.engines.fork_server_handle import fork_server
from notebook_launcher.errors import ConfigError, InternalError, ResourceError, RunStoppedError, RunTimeoutError
from notebook_launcher.kernel.failures import culprit, failure_display
from notebook_launcher.kernel.inspection.hangs import suggestion
from notebook_launcher.kernel.plan import make_plan
from notebook_launcher.kernel.ranks import describe_restart
from notebook_launcher.kernel.results import RankSummary, Results
from notebook_launcher.kernel.run.ladder import AT_ONCE_BUDGET, STOP_BUDGET, timeout_error
from notebook_launcher.machine.allocation import ranks_by_node
from notebook_launcher.tracebacks import without_locals
from notebook_launcher.wording import describe_limit, name_rank, plural, rank_list

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from notebook_launcher.engines.engine import Engine, Event
    from notebook_launcher.kernel.failures.culprit import Failure
    from notebook_launcher.kernel.hosting import Hosting, UnpacksException
    from notebook_launcher.kernel.inspection.stacks import Stacks
    from notebook_launcher.kernel.plan import Plan
    from notebook_launcher.kernel.ranks import Ranks
    from notebook_launcher.kernel.run.attempt import Attempt
    from notebook_launcher.kernel.run.call_state import RankOutcome
    from notebook_launcher.kernel.run.data import RunData
    from notebook_launcher.messaging import messages
    from notebook_launcher.travel import FunctionCall


LOST_VALUE = "the value is lost: the notebook's process had no file descriptor left for it (`ulimit -n`)"


def conclude(data: RunData, settle_folder: Callable[[bool], Path | None], hosting: Hosting) -> RunOutcome:
    """Return the outcome of a run's last attempt; takes what its parcels hold, and closes them.

    `settle_folder` decides whether the run gets a folder, once it is known whether it failed, and returns it.
    """
    attempt, launched = data.attempt, data.launched
    assert attempt is not None
    asked_to_stop = data.commands.asked_to_stop
    outcomes = attempt.state.sorted_outcomes
    called = [outcome for outcome in outcomes if data.scope.includes(outcome.rank)]
    values, unsent = _rebuild(called, hosting.take_value)
    failures = _failures(data, outcomes)
    last_values, victims = data.live.last_values, culprit.consequences(failures)
    seconds = time.monotonic() - launched
    error = _error_of_attempt(
        attempt, data.plan, failures, data.stacks, hosting.take_exception, asked_to_stop=asked_to_stop
    )
    results = Results(
        values,
        num_processes=data.plan.num_processes,
        ranks=[
            _summary(outcome, victims, launched, last_values.get(outcome.rank, {}))
            for outcome in outcomes
            if outcome.failed or data.scope.includes(outcome.rank)
        ],
        called_ranks=data.scope.ranks,
        unsent=unsent,
        failures=failures,
        seconds=seconds,
        seed=data.plan.seed,
        restarts=data.restarts,
        stopped_by=attempt.rung.value if attempt.rung is not None and asked_to_stop else None,
        timed_out=attempt.timed_out,
        folder=settle_folder(error is not None),
    )
    for outcome in outcomes:
        outcome.close()
    if error is not None:
        failure_display.attach_failures(error, failures, results)
    return RunOutcome(state=_state_after(error), results=results, error=error, asked_to_stop=asked_to_stop)


def _state_after(error: BaseException | None) -> Literal["done", "failed", "stopped"]:
    return "done" if error is None else "stopped" if isinstance(error, RunStoppedError) else "failed"


def describe_failure(data: RunData) -> str:
    """Return how a run's last attempt failed, as `failed after 1.2 s on rank 1: ValueError: boom`.

    Nothing is unpacked: a host has neither the modules nor the classes of the notebook.
    """
    assert data.attempt is not None
    state = data.attempt.state
    if state.node_lost is not None:  # No rank has failed by itself then.
        lost = str(failure_display.node_lost_error(state.node_lost)).partition("\n")[0]
        return f"{failure_display.failed_after(data.seconds, [])}: {lost.rstrip('.')}"
    return failure_display.failed_after(data.seconds, _failures(data, state.sorted_outcomes))


def fault_of_ours(fault: BaseException, plan: Plan, *, seconds: float, folder: Path | None = None) -> RunOutcome:
    """Return the outcome of a run that failed by a fault of this package, or for lack of memory or processes."""
    error: Exception
    if isinstance(fault, (ConfigError, ResourceError, RunTimeoutError, RunStoppedError)):
        # The first if a node that a restart needs does not come up, the last two if the run ends meanwhile.
        error = fault
    else:
        error = InternalError(
            f"the run's thread failed: {type(fault).__name__}: {fault}. The ranks were ended. This is a fault of "
            "notebook-launcher: report it with this traceback."
        )
        error.__cause__ = fault
    results = Results({}, num_processes=plan.num_processes, seconds=seconds, seed=plan.seed, folder=folder)
    return RunOutcome(state=_state_after(error), results=results, error=error)


def _rebuild(
    outcomes: list[RankOutcome], unpack: Callable[[int], Any]
) -> tuple[dict[int, Any], dict[int, str | Exception]]:
    """Return the values by rank, and by rank the reason why its value could not travel."""
    values: dict[int, Any] = {}
    unsent: dict[int, str | Exception] = {}
    for outcome in outcomes:
        if outcome.returned is None:
            continue
        fd = outcome.take_parcel()
        if fd is None:
            unsent[outcome.rank] = outcome.returned.unsent or LOST_VALUE
            continue
        try:
            values[outcome.rank] = unpack(fd)
        except Exception as error:  # whatever the value's own code raises
            unsent[outcome.rank] = without_locals(error)
    return values, unsent


def _failures(data: RunData, outcomes: list[RankOutcome]) -> tuple[Failure, ...]:
    failed = [
        outcome
        for outcome in outcomes
        # The second kind died at its exit, after it had returned.
        if outcome.failed or (outcome.exited is not None and outcome.exited.exitcode != 0 and not outcome.after_stop)
    ]
    returned = {outcome.rank: outcome.time for outcome in outcomes if outcome.returned is not None}
    return culprit.failures_of(failed, data.output.last_lines, data.plan.node_names, returned)


def _summary(
    outcome: RankOutcome, victims: Mapping[int, int], launched: float, metrics: Mapping[str, float]
) -> RankSummary:
    record = outcome.returned or outcome.raised
    peak = record.peak_rss if record is not None else outcome.exited.peak_rss if outcome.exited is not None else None
    return RankSummary(
        rank=outcome.rank,
        state="stopped" if outcome.state == "failed" and outcome.rank in victims else outcome.state,
        seconds=outcome.time - launched,
        peak_memory=peak,
        metrics=dict(metrics),
    )


def _error_of_attempt(
    attempt: Attempt,
    plan: Plan,
    failures: tuple[Failure, ...],
    stacks: Stacks | None,
    unpack: UnpacksException,
    *,
    asked_to_stop: bool,
) -> BaseException | None:
    # First: a run that lacks a rank, or times out, before it has any rank is ended by killing its supervisor.
    if attempt.state.not_started is not None:
        return _not_started_error(attempt.state.not_started, plan)
    if attempt.state.tree_lost and not attempt.timed_out and not (attempt.gave_up and failures):
        return _lost_tree_error(attempt, asked_to_stop=asked_to_stop)
    if attempt.timed_out:
        return RunTimeoutError("\n".join(filter(None, (_describe_timeout(attempt, plan), _evidence(stacks, plan)))))
    real = [failure for failure in failures if not attempt.state.outcomes[failure.rank].after_stop]
    if not asked_to_stop:
        real = real or list(failures)  # Nobody asked for an end, so a rank without a value is a failure.
    if real:
        first = attempt.state.outcomes[real[0].rank]
        evidence = _evidence(stacks, plan) if stacks and real[0].victim else ""
        return failure_display.to_exception(
            first, real[0], plan.num_processes, unpack, evidence=evidence, is_checked=plan.config.check_collectives
        )
    if failures and asked_to_stop:
        ranks = rank_list(failure.rank for failure in failures)
        return RunStoppedError(f"the run was stopped before {ranks} returned")
    return None


def _describe_timeout(attempt: Attempt, plan: Plan) -> str:
    if attempt.went_idle:
        quiet = "no rank had written, reported or asked anything, or made an update, for"
        return f"the run was stopped: {quiet} idle_timeout={plan.config.idle_timeout:g} s."
    text = f"the run was stopped: it had not ended after timeout={plan.config.timeout:g} s."
    if not attempt.state.started:
        text += " No rank had begun the function yet"
        is_first = plan.config.engine is None and plan.config.start_method == "forkserver" and fork_server().is_cold
        text += ": the first launch imports torch, which takes seconds." if is_first else "."
    return text


def _lost_tree_error(attempt: Attempt, *, asked_to_stop: bool) -> BaseException:
    if attempt.state.node_lost is not None:
        return failure_display.node_lost_error(attempt.state.node_lost)
    if asked_to_stop and attempt.gave_up:
        return RunStoppedError(
            "the run was stopped, and its processes did not answer: one of the launcher was stopped (SIGSTOP), or "
            "the machine was too busy"
        )
    if asked_to_stop:
        return RunStoppedError("the run was stopped before its ranks had started")
    return InternalError(
        f"the supervisor of this run is gone ({attempt.state.supervisor_lost or ''}); its ranks were killed with it. "
        "Launch again, and if this happens again, report it with this message."
    )


def _evidence(stacks: Stacks | None, plan: Plan) -> str:
    """Return where the ranks were, after a sentence about what that suggests; empty if neither is known."""
    hint = suggestion(stacks, is_checked=plan.config.check_collectives, backend=plan.backend)
    return "\n".join(filter(None, (hint, stacks.in_past_tense if stacks else "")))


def _not_started_error(failed: messages.RankNotStarted, plan: Plan) -> ResourceError:
    who = name_rank(failed.rank, plan.node_names[failed.rank] if plan.node_names else "", of=plan.num_processes)
    advice = describe_limit(failed.errno, on_node=plan.config.engine is not None)
    reason = failed.message if failed.message.endswith(".") else f"{failed.message}."
    msg = f"{who} could not be started: {reason} {advice}".rstrip()
    return ResourceError(failed.errno, msg)


# --------------------------------------------------------------------------------------------------------------------
# The exit of a launch's ranks after the last attempt: their exit handlers run, within a limit of time.


EXIT_BUDGET = 5.0
"""Time limit in seconds of the ranks' exit handlers after a success."""
FAILED_EXIT_BUDGET = 0.5
"""Time limit in seconds of the ranks' exit handlers after a failure, or once the run is being stopped."""


def end_ranks(data: RunData, ranks: Ranks, attempt: Attempt, handle: Callable[[Event], None]) -> None:
    """Have the ranks run their exit handlers and exit; kill ranks that take too long, and show a notice about them.

    `handle` takes each event of the process tree that arrives meanwhile.
    """
    failed, began, commands = attempt.state.failed, time.monotonic(), data.commands

    def deadline() -> float:
        if math.isfinite(commands.kill_asked_at):
            return began
        usual = began + (FAILED_EXIT_BUDGET if failed else EXIT_BUDGET)
        usual = min(usual, max(began + FAILED_EXIT_BUDGET, attempt.limit + STOP_BUDGET))
        return min(usual, max(began, commands.stop_asked_at) + FAILED_EXIT_BUDGET)

    for events in ranks.finish(deadline):
        for event in events:
            handle(event)
        data.output.publish()
    when, hint = f"{EXIT_BUDGET:g} s after it returned", ". Finish such work in the function, a save for example"
    if data.commands.asked_to_stop:
        when, hint = "as the run was stopped", ""
    elif time.monotonic() >= attempt.limit + STOP_BUDGET:
        when, hint = "as its time was over", ""
    for rank in attempt.tree.pids:
        attempt.state.note_killed_at_exit(rank)
        if not failed:
            text = f"rank {rank} was killed: {when} it was still running exit handlers or threads{hint}"
            data.output.notice(text, "stderr")
    close_ranks(data, ranks, attempt)


def close_ranks(data: RunData, ranks: Ranks, attempt: Attempt) -> None:
    """Close the ranks of an attempt that is over; a stop of the run limits the wait for processes that do not end."""
    commands, began = data.commands, time.monotonic()

    def deadline() -> float:
        asked_at = max(began, commands.stop_asked_at)
        by_limit = max(began + FAILED_EXIT_BUDGET, attempt.limit + STOP_BUDGET)
        return min(attempt.gives_up_at, asked_at + STOP_BUDGET, commands.kill_asked_at + AT_ONCE_BUDGET, by_limit)

    ranks.close(deadline)


# --------------------------------------------------------------------------------------------------------------------
# The outcome of a run.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The results of a run, and the exception with which it failed; None after a success."""

    state: Literal["done", "failed", "stopped"]
    """`"stopped"` if the user stopped the run before every rank had returned."""
    results: Results
    """The values of the ranks that returned, even after a failure."""
    error: BaseException | None
    """The exception for the cell; None after a success."""
    asked_to_stop: bool = False
    """True if the user had asked for a stop when the ranks had settled, even if all had returned."""


# --------------------------------------------------------------------------------------------------------------------
# Mending of a session's ranks: processes that ended or became useless, and a process group that broke.


DEATH_NOTICE = 1.0
"""Longest wait in seconds for the supervisor's report of a rank's end, once the rank's channel has closed."""


def replace_the_dead(data: RunData, ranks: Ranks, attempt: Attempt, handle: Callable[[Event], None]) -> None:
    """Replace ranks of a session that died between two runs; `handle` as for `end_ranks`."""
    tree, until = attempt.tree, time.monotonic() + DEATH_NOTICE
    while (events := tree.events(0)) or (tree.is_dying and time.monotonic() < until):
        for event in events or tree.events(DEATH_NOTICE):
            handle(event)
    if attempt.state.outcomes and not attempt.state.tree_lost:
        mend(data, ranks, attempt, handle)
        attempt.forget_outcomes(ranks.generation)


def mend(data: RunData, ranks: Ranks, attempt: Attempt, handle: Callable[[Event], None]) -> None:
    """Make a session's ranks ready for the next call, and show a notice if they lost something."""
    _remove_the_spent(attempt, handle)
    replaced = ranks.replace_ended(attempt)
    if replaced:
        in_nccl = attempt.ladder is not None and "nccl" in (attempt.tree.setup.backend or "")
        data.output.notice(describe_restart(replaced, stopped_in_nccl=in_nccl))
    elif attempt.state.broke_group:
        data.output.notice(
            "the next run makes a new process group: models that the ranks keep must be wrapped again "
            "(DistributedDataParallel, Accelerator.prepare)"
        )


def _remove_the_spent(attempt: Attempt, handle: Callable[[Event], None]) -> None:
    """End ranks that no later call can use: their GPU context was lost, or they have no descriptor left."""
    spent = tuple(rank for rank, outcome in attempt.state.outcomes.items() if outcome.is_spent)
    if not spent:
        return
    attempt.tree.signal(spent, signal.SIGKILL)
    until = time.monotonic() + DEATH_NOTICE
    while any(attempt.state.outcomes[rank].is_spent for rank in spent) and (left := until - time.monotonic()) > 0:
        for event in attempt.tree.events(left):
            handle(event)


# --------------------------------------------------------------------------------------------------------------------
# Restarts after a failure: on the same machines, or on the remaining ones, if the run resumes from a checkpoint.


RESUME_HINT = (
    'With resume="checkpoint" a run continues on the remaining nodes from its newest checkpoint: '
    "accelerator.load_state() loads it with fewer ranks, too."
)


def restart(data: RunData, ranks: Ranks, call: FunctionCall | None) -> None:
    """Start all ranks again; if nodes do not come up, start the ranks of the other nodes, and show a notice.

    Raises:
        ConfigError: Nodes do not come up, and the run cannot continue without them.
        ResourceError: The machine cannot hold the ranks any more.
        RunStoppedError: The user has stopped the run meanwhile.
        RunTimeoutError: Its time is over meanwhile.
    """
    before, rest = ranks.plan, None
    timeout = math.inf if before.config.timeout is None else before.config.timeout
    while True:
        try:
            with starting_until(lambda: min(data.launched + timeout, data.commands.stop_asked_at)):
                if rest is not None:
                    ranks.plan = rest.plan(before)
                ranks.start(call)
            break
        except ConfigError as error:
            if data.commands.asked_to_stop:
                raise RunStoppedError(f"the run was stopped while it started again. {error}") from error
            if time.monotonic() >= data.launched + timeout:
                raise timeout_error(timeout, str(error)) from error
            rest = _rest_after(error, rest, ranks, before)
            ranks.engine = rest.engine
    if rest is not None:
        _replace_plan(data, before, ranks.plan, rest.reason)


def _rest_after(error: ConfigError, rest: _Rest | None, ranks: Ranks, before: Plan) -> _Rest:
    """Return the nodes that are left after an error of a start; raise ConfigError if the run cannot continue on them.

    `rest`: the nodes on which the start was tried; None: those of the launch.
    """
    if not error.nodes and rest is not None:
        msg = f"{rest.reason}\nThe run cannot continue on the remaining nodes: {error}"
        raise ConfigError(msg, field=error.field) from error
    engine = ranks.engine
    if not error.nodes or ranks.many_calls or engine is None or not hasattr(engine, "without"):
        raise error  # An engine of the user's own may have no `without`.
    present = rest or _Rest.of(before, engine)
    reason = "\n".join(filter(None, (present.reason, str(error))))
    if before.config.resume is None:
        raise ConfigError(f"{reason}\n{RESUME_HINT}", field="engine") from error
    left = present.without(error.nodes, reason=reason)
    if left == present:  # The engine chooses its nodes itself, and still counts on one that is gone.
        raise ConfigError(reason, field="engine") from error
    return left


@dataclasses.dataclass(frozen=True, slots=True)
class _Rest:
    """Nodes that are left of an engine."""

    engine: Engine
    kept: tuple[int, ...]
    """Number of ranks on each node that had ranks and is left."""
    lost: tuple[int, ...] = ()
    """Number of ranks on each node that had ranks and is gone."""
    reason: str = dataclasses.field(default="", compare=False)
    """The errors about the nodes that did not come up, each on a line; empty before the first."""

    @classmethod
    def of(cls, plan: Plan, engine: Engine) -> _Rest:
        """Return all nodes of a launch."""
        return cls(engine, tuple(len(part) for part in ranks_by_node(plan.num_processes, plan.num_nodes)))

    def without(self, nodes: Collection[int], *, reason: str) -> _Rest:
        """Return the nodes without these, which are down for this reason; raises `ConfigError` if none is left."""
        rest = self.engine.without(nodes)
        if rest is None:
            raise ConfigError(f"{reason}\nNo other node is left.", field="engine")
        kept = tuple(num for number, num in enumerate(self.kept) if number not in nodes)
        lost = tuple(num for number, num in enumerate(self.kept) if number in nodes)
        return _Rest(rest, kept, (*self.lost, *lost), reason)

    def plan(self, before: Plan) -> Plan:
        """Return the plan of a launch on these nodes. Nodes that had no ranks take the ranks of lost nodes."""
        num_nodes = min(before.num_nodes, len(self.engine.look()))
        num_spare = num_nodes - len(self.kept)
        num_processes = sum(self.kept) + sum(sorted(self.lost, reverse=True)[: max(0, num_spare)])
        config = dataclasses.replace(
            before.config,
            engine=self.engine,
            num_processes=num_processes,
            nodes=num_nodes,
            processes_per_node=None,
        )
        # The options stay as given, where people read them.
        return dataclasses.replace(make_plan(config), config=before.config, random=before.random)


def _replace_plan(data: RunData, before: Plan, after: Plan, reason: str) -> None:
    """Write the new plan to the run data, and show a line about it."""
    data.plan = after
    data.output.console.nodes = after.node_names
    if after.num_processes < before.num_processes:
        data.live.note_fewer_ranks(before.num_processes, after.num_processes, seconds=data.seconds)
        data.usage.forget(after.num_processes)
    # The lines that name nodes, without the command and the last words of each.
    lines = [line.partition(" The command was: ")[0] for line in reason.splitlines() if line.startswith("node ")]
    why = " ".join(lines or [reason.partition("\n")[0]])
    whence = f"from the checkpoint {Path(data.checkpoints[-1]).name}" if data.checkpoints else "from the beginning"
    where, left = f"on {plural(after.num_nodes, 'node')}", f"{after.num_processes} of {before.num_processes} ranks"
    if after.num_processes == before.num_processes:
        where, left = f"{where} that are left", f"all {after.num_processes} ranks"
    data.output.notice(f"{data.name}: {why} Continuing with {left} {where}, {whence}")
