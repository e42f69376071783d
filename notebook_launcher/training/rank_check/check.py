"""Comparison of the ranks' weights now and then, with a report of the first parameter that differs.

    rank 0                               rank 1
    writes its fingerprint to the store  writes its fingerprint to the store
    ------------------ backward: the gradients are reduced ------------------
    reads rank 1's                       reads rank 0's

A rank that has come out of a reduction knows that every other rank has entered it, and so has written. No rank
waits for another one, and no collective is added that could pair with one of the user's. Reductions 1, 2, 4, 8 and
so on are compared: 20 comparisons in a million updates. A backward on a GPU only queues its reduction, so there a
rank waits for its GPU before it reads, at these updates alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.context import current
from notebook_launcher.messaging import messages
from notebook_launcher.training.accumulation.members.ddp import FORWARD_SYNCED
from notebook_launcher.training.fingerprints import Sketch, fingerprint, is_comparable, sketch
from notebook_launcher.training.rank_check.bulletin import Bulletin
from notebook_launcher.training.rank_check.divergence import SWITCH, Difference, describe_divergence
from notebook_launcher.training.rank_check.evidence import Comparand, Evidence, digest
from notebook_launcher.training.rank_check.forgotten import ForgottenOptimizers
from notebook_launcher.training.rank_check.gradient_comparison import GradientComparison
from notebook_launcher.training.rank_check.left_out import LeftOut
from notebook_launcher.training.user_warnings import warn_user

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from notebook_launcher.training.accumulation.members.member_kinds import PreparedModel
    from notebook_launcher.training.accumulation.members.members import Members
    from notebook_launcher.training.accumulation.windows.gradient_state import GradientState
    from notebook_launcher.training.accumulation.windows.windows import Window
    from notebook_launcher.training.requests.agreement import UpdateFence

__all__ = ["RankCheck", "notify_or_warn"]

SAME_INPUTS = 3
"""Comparisons in a row with the same inputs on all ranks, after which a notice is shown."""


class RankCheck:
    """Compares between ranks the parameters that an Accelerator keeps equal, and their optimizer states.

    Args:
        members: Models and tensors that are trained.
        optimizers: The prepared optimizers that are in use.
        gradient_state: The state of accumulation.
        rank: This process's rank.
        num_processes: Ranks that train together.
        fence: Has a rank on a GPU wait for its work before it reads what other ranks have written.
    """

    def __init__(
        self,
        members: Members,
        optimizers: Iterable[torch.optim.Optimizer],
        gradient_state: GradientState,
        *,
        rank: int,
        num_processes: int,
        fence: UpdateFence,
    ) -> None:
        self._members = members
        self._optimizers = optimizers
        self._gradient_state = gradient_state
        self._rank = rank
        self._num_processes = num_processes
        self.bulletin = Bulletin(rank, num_processes)
        self.gradients = GradientComparison(self.bulletin, num_processes)
        self.forgotten = ForgottenOptimizers(members, self.gradients)
        self.left_out = LeftOut(gradient_state, rank, num_processes, fence)
        self._fence = fence
        self._same_inputs = 0
        """Comparisons in a row at which all ranks had the same inputs."""
        self._notified: set[str] = set()
        """The notices that were shown, each once."""
        self.is_pending = False
        """True between a `write` that has written something and its `compare`."""

    def write(
        self, watched: Sequence[tuple[PreparedModel, Any]], window: Window | None, *, syncs: bool
    ) -> list[Comparand]:
        """Before a backward: write evidence of the comparands that are due, and return these.

        Args:
            watched: The models that the backward may reach.
            window: The window that the backward belongs to: its contents are written if this rank left something out.
                None outside any block.
            syncs: True if the backward reduces the gradients.
        """
        written: list[Comparand] = []
        for member, _ in watched:
            if member.notes.forwards & FORWARD_SYNCED and member.notes.is_due:
                written = self._write_due(watched)
                break
        else:
            if self._members.leaves:
                written = self._write_due(watched)
        has_left_out = False
        if window is not None and (syncs or self._gradient_state.loops.left_out is not None):
            has_left_out = self.left_out.write(window, watched, syncs=syncs)
        self.is_pending = bool(written) or has_left_out
        return written

    def _write_due(self, watched: Sequence[tuple[PreparedModel, Any]]) -> list[Comparand]:
        """Write evidence of the comparands that are due, and return these."""
        due = [member for member, _ in watched if member.notes.is_due and member.notes.forwards & FORWARD_SYNCED]
        comparands = [Comparand.of_model(member.module) for member in due if member.notes.compares]
        leaves = self._members.leaves
        if leaves and self._members.leaf_notes.is_due and any(leaf.syncs for leaf in leaves):
            comparands.append(Comparand.of_leaves(self._members))
        topics = {comparand.owner: f"comparison {comparand.notes.num_synced + 1}" for comparand in comparands}
        return [
            comparand
            for comparand in comparands
            if self.bulletin.write(comparand.owner, topics[comparand.owner], self._evidence_of(comparand))
        ]

    def compare(self, written: Sequence[Comparand]) -> None:
        """After a backward: compare the evidence that the ranks have written.

        Raises:
            RuntimeError: The ranks' weights, optimizer states or learning rates differ, on every rank; or this rank
                has left a micro-batch out of its window, and others have not, on the ranks that left one out.
        """
        self.is_pending = False
        self.left_out.compare()
        reached = [comparand for comparand in written if comparand.is_to_compare]
        if reached:
            self._fence.finish()
        for comparand in reached:
            update = comparand.notes.compared = comparand.notes.num_synced
            found = self.bulletin.read(comparand.owner, f"comparison {update}")
            evidence = {rank: Evidence(*fields) for rank, fields in found.items()}
            _compare_steps(evidence, f"update {update}")
            self._compare_inputs(evidence)
            self._compare_outside(evidence)

            def gather(
                mine: Any, ranks: Iterable[int], comparand: Comparand = comparand, update: int = update
            ) -> dict[int, Any]:
                return self.bulletin.exchange(comparand.owner, f"details {update}", mine, ranks)

            self._judge(comparand, evidence, f"update {update}", gather)

    def compare_now(self, call: str, exchange: Callable[[Any], list[Any]]) -> None:
        """Compare everything at a place that all ranks have reached.

        Args:
            call: Function that the user called, for the error: `"save_state"`.
            exchange: Returns what each rank has passed to it, in rank order.

        Raises:
            RuntimeError: As `compare`; on every rank.
        """
        models = self._members.synced_models
        comparands = [Comparand.of_model(member.module) for member in models if not member.notes.trains_alone]
        comparands += [Comparand.of_leaves(self._members)] if self._members.leaves else []
        by_rank = exchange([self._evidence_of(comparand) for comparand in comparands])
        if any(len(theirs) != len(comparands) for theirs in by_rank):
            return

        def gather(mine: Any, ranks: Iterable[int]) -> dict[int, Any]:
            everything = exchange(mine)
            return {rank: everything[rank] for rank in ranks}

        for at, comparand in enumerate(comparands):
            self._judge(comparand, {rank: Evidence(*theirs[at]) for rank, theirs in enumerate(by_rank)}, call, gather)

    def _evidence_of(self, comparand: Comparand) -> Evidence:
        state, gradient_state = self._state_of(comparand), self._gradient_state
        return Evidence(
            form=digest([(name, list(tensor.shape)) for name, tensor in comparand.tensors]),
            weights=fingerprint(tensor for _, tensor in comparand.tensors),
            state_form=digest([name for name, _ in state]),
            state=fingerprint(tensor for _, tensor in state),
            rates=self._rates(comparand),
            inputs=comparand.notes.inputs if gradient_state.active_loaders.active is None else None,
            outside=fingerprint(self.forgotten.outside_parameters()) if self.forgotten.outside else None,
            num_steps=(gradient_state.current or gradient_state).num_steps,
        )

    def _judge(
        self, comparand: Comparand, evidence: dict[int, Evidence], where: str, gather: Callable[..., dict[int, Any]]
    ) -> None:
        """Raise or report the first thing in which these ranks differ; every rank comes to the same conclusion."""
        mine = evidence[self._rank]
        alike = {rank: theirs for rank, theirs in evidence.items() if theirs.form == mine.form}
        in_parts = any(theirs.state_form != mine.state_form for theirs in alike.values())
        rates = {rank: tuple(theirs.rates) for rank, theirs in alike.items()}
        found: dict[str, dict[int, Any]] = {
            "weights": {rank: theirs.weights for rank, theirs in alike.items()},
            "rates": rates,
            "state": {rank: 0 if in_parts else theirs.state for rank, theirs in alike.items()},
        }
        what = next((what for what, values in found.items() if len(set(values.values())) > 1), None)
        if what is None:
            return
        tensors = {"weights": comparand.tensors, "rates": [], "state": self._state_of(comparand)}[what]
        details = gather([[name, *sketch(tensor)] for name, tensor in tensors], sorted(alike)) if tensors else {}
        difference = Difference(
            what=what,
            where=where,
            model=comparand.title,
            num_updates=comparand.notes.num_synced,
            values=found[what],
            rates=rates,
            sketches={rank: {name: Sketch(*rest) for name, *rest in theirs} for rank, theirs in details.items()},
            unowned=self._unowned(comparand),
            own_state=comparand.notes.own_state,
        )
        text, is_error = describe_divergence(difference)
        if is_error:
            raise RuntimeError(text)
        self._notify(what, text)

    def _compare_inputs(self, evidence: dict[int, Evidence]) -> None:
        inputs = {theirs.inputs for theirs in evidence.values()}
        same = len(evidence) == self._num_processes and len(inputs) == 1 and None not in inputs
        self._same_inputs = self._same_inputs + 1 if same else 0
        if self._same_inputs == SAME_INPUTS:
            self._notify(
                "inputs",
                f"all {self._num_processes} ranks gave the model the same inputs at {SAME_INPUTS} updates in a row "
                "that were compared, so every rank trains on the same samples. Was the loader not prepared? Write "
                "`loader = accelerator.prepare(loader)`, which gives each rank a share of its own.",
            )

    def _compare_outside(self, evidence: dict[int, Evidence]) -> None:
        found = {theirs.outside for theirs in evidence.values()}
        if len(found) > 1 and None not in found:
            kinds = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in self.forgotten.outside))
            self._notify(
                "outside",
                f"the weights that {kinds} updates differ between the ranks: neither the optimizer nor its model was "
                "prepared, so each rank trains a model of its own. Write `model, optimizer = "
                "accelerator.prepare(model, optimizer)`; if this is intended, `Accelerator(check_ranks=False)` "
                "compares nothing.",
            )

    def _notify(self, key: str, text: str) -> None:
        if self._rank == 0 and key not in self._notified:
            self._notified.add(key)
            notify_or_warn(text)

    # What optimizers know of a comparand's parameters.

    def _state_of(self, comparand: Comparand) -> list[tuple[str, torch.Tensor]]:
        if comparand.notes.own_state:
            return []
        names = {id(tensor): name for name, tensor in comparand.tensors}
        # `get`: an optimizer's state is a defaultdict, and to look must not add to it.
        kept = [
            (names[id(parameter)], prepared.state.get(parameter))
            for prepared, group in self._groups(comparand)
            for parameter in group["params"]
            if id(parameter) in names
        ]
        return [
            (f"{key} of {name}", value)
            for name, entries in kept
            if isinstance(entries, dict)
            for key, value in entries.items()
            if is_comparable(value)
        ]

    def _rates(self, comparand: Comparand) -> list[float]:
        rates = [group.get("lr") for _, group in self._groups(comparand)]
        return [float(rate) for rate in rates if isinstance(rate, (int, float, torch.Tensor))]

    def _unowned(self, comparand: Comparand) -> frozenset[str]:
        """Return the names of parameters that no prepared optimizer has."""
        owned = {id(parameter) for _, group in self._groups(comparand) for parameter in group["params"]}
        return frozenset(name for name, tensor in comparand.tensors if id(tensor) not in owned)

    def _groups(self, comparand: Comparand) -> list[tuple[Any, dict[str, Any]]]:
        mine = {id(tensor) for _, tensor in comparand.tensors}
        groups = [(prepared, group) for prepared in self._optimizers for group in prepared.param_groups]
        return [
            (prepared, group)
            for prepared, group in groups
            if any(id(parameter) in mine for parameter in group["params"])
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return _nobody, ()  # The ranks of another launch need not all have a copy.


def _compare_steps(evidence: dict[int, Evidence], where: str) -> None:
    """Raise RuntimeError if the ranks' windows have different numbers of micro-batches; on every rank."""
    by_rank = {rank: theirs.num_steps for rank, theirs in sorted(evidence.items())}
    if len(set(by_rank.values())) > 1:
        numbers = ", ".join(f"{number} on rank {rank}" for rank, number in by_rank.items())
        raise RuntimeError(
            f"{where}: gradient_accumulation_steps differs between the ranks: {numbers}. Windows then hold different "
            "numbers of micro-batches, and the ranks soon make different numbers of updates. Give all ranks the same "
            f"number: micro-batches may have different sizes. {SWITCH}"
        )


def notify_or_warn(text: str) -> None:
    """Show a line in the cell; without a launcher, warn."""
    context = current()
    if context is None:
        warn_user(text)
    else:
        context.send(messages.Notice(text=text))


def _nobody() -> None:
    pass
