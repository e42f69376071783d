"""The ranks that serve one or several runs: their process tree, and the process group's generation."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from notebook_launcher.engines.engine import Event, SupervisorLost
from notebook_launcher.engines.fork_server_handle import start_here
from notebook_launcher.kernel.calls.call_scope import AddedFolders
from notebook_launcher.kernel.comms.rank_comms import RankComms
from notebook_launcher.messaging import messages
from notebook_launcher.wording import rank_list

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from notebook_launcher.engines.engine import Tree
    from notebook_launcher.kernel.calls.call_scope import CallScope
    from notebook_launcher.kernel.plan import Plan
    from notebook_launcher.kernel.run.attempt import Attempt
    from notebook_launcher.travel import FunctionCall

TICK = 0.1
"""Seconds after which `finish` yields even if nothing happens, so that output that waits is shown."""


class Ranks:
    """The ranks that serve one run, or all runs of a session; `plan` and `engine` change if nodes are lost."""

    def __init__(self, plan: Plan, *, many_calls: bool) -> None:
        self.plan = plan
        """The options, resolved against the machine."""
        self.engine = plan.config.engine
        """The machines of the ranks; fewer than the options name once some are gone for good. `close` closes an engine
        that is not the options' own."""
        self.many_calls = many_calls
        """True for a session: the ranks wait for further calls."""
        self.tree: Tree | None = None
        """The processes; None before `start` and after `close`."""
        self.generation = 0
        """Number of the process group, raised when the ranks have to make the group again."""
        self.comms = RankComms()
        """The comms of the ranks' widgets."""
        self.is_announced = False
        """True once the first line of output has named the ranks and devices."""
        self._call_id = 0
        """Number of the last call."""
        self._folders = AddedFolders()
        """Entries that `sys.path` has gained since then; ranks that were started later have it already."""

    @property
    def have_served(self) -> bool:
        """True if the ranks are up and have served a call."""
        return self.tree is not None and self._call_id > 0

    def start(self, call: FunctionCall | None = None) -> None:
        """Start the processes unless they are up; raises `ResourceError` if the machine cannot hold them."""
        if self.tree is None:
            setup = self.plan.setup(many_calls=self.many_calls)
            self.tree = start_here(setup, call) if self.engine is None else self.engine.start(setup)

    def next_call(
        self,
        scope: CallScope,
        *,
        restart_count: int,
        can_ask: bool,
        widget_ranks: tuple[int, ...],
        checkpoints: tuple[str, ...] = (),
    ) -> messages.RunCall:
        """Return the record of the next call."""
        self._call_id += 1
        first_folders, last_folders = self._folders.look()
        return messages.RunCall(
            call_id=self._call_id,
            generation=self.generation,
            restart_count=restart_count,
            max_restarts=self.plan.config.max_restarts,
            checkpoints=None if self.plan.config.resume is None else checkpoints,
            can_ask=can_ask,
            ranks=scope.ranks,
            widget_ranks=widget_ranks,
            comm_messages=scope.comm_messages,
            keeps_failure=scope.is_widget_call,
            first_folders=first_folders,
            last_folders=last_folders,
        )

    def replace_ended(self, attempt: Attempt) -> tuple[int, ...]:
        """Repair what the last call broke: processes and the process group. Return the ranks that were replaced."""
        assert self.tree is not None
        replaced = tuple(rank for rank, outcome in sorted(attempt.state.outcomes.items()) if outcome.is_over)
        if not replaced and not attempt.state.kept_group:
            self.generation += 1
        self.replace(replaced)
        return replaced

    def replace(self, ranks: Sequence[int]) -> None:
        """Start ranks again whose processes are gone; every rank makes its process group again at the next call."""
        assert self.tree is not None
        self.generation += bool(ranks)
        for rank in ranks:
            self.comms.forget(rank)
            self.tree.replace(rank)

    def finish(self, deadline: Callable[[], float]) -> Iterator[list[Event]]:
        """Have idle ranks run their exit handlers and exit; yield the events until all are gone or time is up.

        `deadline` returns the time at which to give up waiting; it is called again after each batch of events.
        """
        if self.tree is None:
            return
        self.tree.finish()
        while self.tree.pids and (left := deadline() - time.monotonic()) > 0:
            events = self.tree.events(min(left, TICK))
            yield events
            if any(isinstance(event, SupervisorLost) for event in events):
                return

    def forget_failures(self) -> None:
        """Have all ranks release the frames that they keep of their last call."""
        if self.tree is not None:
            self.tree.send_all(messages.ForgetFailure())

    def wake(self) -> None:
        """Interrupt the wait for events; from any thread."""
        if (tree := self.tree) is not None:
            tree.wake()

    def close(self, deadline: Callable[[], float] | None = None) -> None:
        """Kill remaining processes and release all descriptors; idempotent. Call it again after an interrupt.

        `deadline` is as in `ProcessTree.close`.
        """
        self.comms.close()
        tree, self.tree = self.tree, None
        if tree is not None:
            try:
                tree.close(deadline)
            except BaseException:
                self.tree = tree
                raise
        if self.engine is not None and self.engine != self.plan.config.engine:
            self.engine.close()  # Nobody else knows this engine, which a restart has made of the nodes that were left.


def describe_restart(ranks: Sequence[int], *, stopped_in_nccl: bool) -> str:
    """Return the notice that these ranks of a session were replaced, perhaps after a stop in a group of NCCL's."""
    were, them = ("was", "it") if len(ranks) == 1 else ("were", "them")
    text = f"{rank_list(ranks)} had died and {were} restarted; variables of earlier runs are gone on {them}"
    if stopped_in_nccl:
        text += (
            ". With NCCL a stop ends each rank that waits for its GPU, because no other rank's end releases it: "
            "run.stop(after_step=True) stops all ranks after the same update, and they keep their memory"
        )
    return text
