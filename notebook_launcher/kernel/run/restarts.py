"""Restarts after a failure: on the same machines, or on the remaining ones, if the run resumes from a checkpoint."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from notebook_launcher.engines.engine import ReducibleEngine, starting_until
from notebook_launcher.errors import ConfigError, RunStoppedError
from notebook_launcher.kernel.plan import make_plan
from notebook_launcher.kernel.run.time_limits import timeout_error
from notebook_launcher.machine.node_allocation import ranks_by_node
from notebook_launcher.wording.counts import plural

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from notebook_launcher.kernel.plan import Plan
    from notebook_launcher.kernel.ranks import Ranks
    from notebook_launcher.kernel.run.data import RunData
    from notebook_launcher.travel import FunctionCall

__all__ = ["restart"]

RESUME_HINT = (
    'With resume="checkpoint" a run continues on the remaining nodes from its newest checkpoint: '
    "accelerator.load_state() loads it with fewer ranks, too."
)


def restart(data: RunData, ranks: Ranks, call: FunctionCall | None) -> None:
    """Start all ranks again; if nodes do not come up, start the ranks of the other nodes, and show a notice.

    Args:
        data: The run data.
        ranks: The ranks, all of which have ended.
        call: The function and its arguments: forked ranks inherit them, and the fork server reads their code.

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
                    ranks.follow(rest.plan(before))
                ranks.start(call)
            break
        except ConfigError as error:
            if data.commands.asked_to_stop:
                raise RunStoppedError(f"the run was stopped while it started again. {error}") from error
            if time.monotonic() >= data.launched + timeout:
                raise timeout_error(timeout, str(error)) from error
            rest = _rest_after(error, rest, ranks, before)
            ranks.move_to(rest.engine)
    if rest is not None:
        _replace_plan(data, before, ranks.plan, rest.reason)


def _rest_after(error: ConfigError, rest: _Rest | None, ranks: Ranks, before: Plan) -> _Rest:
    """Return the nodes that are left after an error of a start; raise ConfigError if the run cannot continue on them.

    Args:
        error: The error of the start; it names the nodes that did not come up.
        rest: The nodes on which the start was tried; None: those of the launch.
        ranks: The ranks.
        before: The plan of the launch.
    """
    if not error.nodes and rest is not None:
        msg = f"{rest.reason}\nThe run cannot continue on the remaining nodes: {error}"
        raise ConfigError(msg, field=error.field) from error
    if not error.nodes or ranks.many_calls or not isinstance(ranks.engine, ReducibleEngine):
        raise error
    present = rest or _Rest.of(before, ranks.engine)
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

    engine: ReducibleEngine
    kept: tuple[int, ...]
    """Number of ranks on each node that had ranks and is left."""
    lost: tuple[int, ...] = ()
    """Number of ranks on each node that had ranks and is gone."""
    reason: str = dataclasses.field(default="", compare=False)
    """The errors about the nodes that did not come up, each on a line; empty before the first."""

    @classmethod
    def of(cls, plan: Plan, engine: ReducibleEngine) -> _Rest:
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
    data.output.place_ranks(after.node_names)
    if after.num_processes < before.num_processes:
        data.live.note_fewer_ranks(before.num_processes, after.num_processes, seconds=data.seconds)
        data.usage.forget(after.num_processes)
    data.output.notice(f"{data.name}: {_first_line(reason)} {_sequel(before, after, data.checkpoints)}")


def _sequel(before: Plan, after: Plan, checkpoints: Sequence[str]) -> str:
    where = f"on {plural(after.num_nodes, 'node')}"
    whence = f"from the checkpoint {Path(checkpoints[-1]).name}" if checkpoints else "from the beginning"
    if after.num_processes == before.num_processes:
        return f"Continuing with all {after.num_processes} ranks {where} that are left, {whence}"
    return f"Continuing with {after.num_processes} of {before.num_processes} ranks {where}, {whence}"


def _first_line(reason: str) -> str:
    """Return the lines that name nodes, without the command and the last words of each."""
    lines = [line.partition(" The command was: ")[0] for line in reason.splitlines() if line.startswith("node ")]
    return " ".join(lines or [reason.partition("\n")[0]])
