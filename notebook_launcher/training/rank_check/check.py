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

import dataclasses
import hashlib
import json
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from notebook_launcher import context
from notebook_launcher.training.accumulation.members import FORWARD_SYNCED, parameters_of
from notebook_launcher.training.fingerprints import Sketch, fingerprint, is_comparable, sketch
from notebook_launcher.training.rank_check.divergence import (
    SWITCH,
    ForgottenOptimizers,
    describe_divergence,
    named,
)
from notebook_launcher.training.user_warnings import notify_or_warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from notebook_launcher.training.accumulation.members import Member, Members, Notes, PreparedModel, SyncedModel
    from notebook_launcher.training.accumulation.windows import GradientState, Window
    from notebook_launcher.training.requests import UpdateFence


SAME_INPUTS = 3
"""Comparisons in a row with the same inputs on all ranks, after which a notice is shown."""


class RankCheck:
    """Compares between ranks the parameters that an Accelerator keeps equal, and their optimizer states.

    The fence has a rank on a GPU wait for its work before it reads what other ranks have written.
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
        self.gradients = GradientComparison(self.bulletin)
        self.forgotten = ForgottenOptimizers(members, self.gradients)
        self.left_out = LeftOut(gradient_state, self.bulletin, fence)
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
        due = [member for member, _ in watched if member.notes.forwards & FORWARD_SYNCED and member.notes.is_due]
        comparands = [Comparand.of_model(member.module) for member in due if member.notes.compares]
        leaves = self._members.leaves
        if leaves and self._members.leaf_notes.is_due and any(leaf.reduces_next for leaf in leaves):
            comparands.append(Comparand.of_leaves(self._members))
        written = [
            each
            for each in comparands
            if self.bulletin.write(each.owner, f"comparison {each.notes.num_synced + 1}", self._evidence_of(each))
        ]
        has_left_out = False
        if window is not None and (syncs or self._gradient_state.loops.left_out is not None):
            has_left_out = self.left_out.write(window, watched, syncs=syncs)
        self.is_pending = bool(written) or has_left_out
        return written

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
        """Compare everything at a place that all ranks have reached: the call of the user's that the error names.

        `exchange` returns what each rank has passed to it, in rank order.
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
        rates = [group.get("lr") for _, group in self._groups(comparand)]
        outside = [tensor for optimizer in self.forgotten.outside for tensor in parameters_of(optimizer)]
        return Evidence(
            form=digest([(name, list(tensor.shape)) for name, tensor in comparand.tensors]),
            weights=fingerprint(tensor for _, tensor in comparand.tensors),
            state_form=digest([name for name, _ in state]),
            state=fingerprint(tensor for _, tensor in state),
            rates=[float(rate) for rate in rates if isinstance(rate, (int, float, torch.Tensor))],
            inputs=comparand.notes.inputs if gradient_state.active_loaders.active is None else None,
            outside=fingerprint(filter(is_comparable, outside)) if outside else None,
            num_steps=gradient_state.num_steps if (window := gradient_state.current) is None else window.full_size,
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
        owned = {id(parameter) for _, group in self._groups(comparand) for parameter in group["params"]}
        text, is_error = describe_divergence(
            what,
            found[what],
            rates,
            {rank: {name: Sketch(*rest) for name, *rest in theirs} for rank, theirs in details.items()},
            where=where,
            title=comparand.title,
            notes=comparand.notes,
            unowned=frozenset(name for name, tensor in comparand.tensors if id(tensor) not in owned),
        )
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

    def _groups(self, comparand: Comparand) -> list[tuple[Any, dict[str, Any]]]:
        mine = {id(tensor) for _, tensor in comparand.tensors}
        groups = [(prepared, group) for prepared in self._optimizers for group in prepared.param_groups]
        return [
            (prepared, group)
            for prepared, group in groups
            if any(id(parameter) in mine for parameter in group["params"])
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # The ranks of another launch need not all have a copy.


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


# --------------------------------------------------------------------------------------------------------------------
# Evidence that ranks write for each other at a comparison, and the parameters that it compares.


class Evidence(NamedTuple):
    """The fingerprints and numbers that a rank writes for the others at a comparison."""

    form: int
    """Fingerprint of the parameters' names and shapes."""
    weights: int
    """Fingerprint of the parameters."""
    state_form: int
    """Fingerprint of the names of the optimizers' states. It differs where each rank keeps a part on purpose."""
    state: int
    rates: list[float]
    """The learning rates of all groups."""
    inputs: int | None
    """Fingerprint of the model's inputs; None where a prepared loader shares the data out."""
    outside: int | None
    """Fingerprint of the parameters that unprepared optimizers update beside the prepared models; None without any."""
    num_steps: int
    """Micro-batches of a full window."""


@dataclasses.dataclass(frozen=True, slots=True)
class Comparand:
    """Parameters that ranks compare together, and reduce together: a model's, or the leaf tensors."""

    owner: Any
    """The object that the bulletin names: the model, or the members for their leaf tensors."""
    title: str
    """The comparand's name in messages."""
    notes: Notes
    """The notes that count the comparand's reductions."""
    tensors: list[tuple[str, torch.Tensor]]
    """The parameters with their names, if they are trained, not ignored by DDP, and whole on each rank."""

    @property
    def is_to_compare(self) -> bool:
        """True after a reduction whose number is a power of two and that was not compared yet."""
        update = self.notes.num_synced
        return self.notes.compared < update and not update & (update - 1)

    @classmethod
    def of_model(cls, model: SyncedModel) -> Comparand:
        """Return the comparand of a model."""
        tensors = [
            (name.replace("_orig_mod.", ""), parameter)
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in model.parameters_to_ignore and is_comparable(parameter)
        ]
        return cls(model, type(model.module).__name__, model.notes, tensors)

    @classmethod
    def of_leaves(cls, members: Members) -> Comparand:
        """Return the comparand of the leaf tensors."""
        tensors = [(f"leaf tensor {at}", leaf.tensor) for at, leaf in enumerate(members.leaves)]
        return cls(members, "the leaf tensors", members.leaf_notes, tensors)


def digest(value: Any) -> int:
    """Return 48 bits that depend on a plain value, as JSON has it."""
    return int.from_bytes(hashlib.blake2b(json.dumps(value).encode(), digest_size=6).digest(), "little")


# --------------------------------------------------------------------------------------------------------------------
# Comparison of gradients that no backward of the Accelerator has computed, before a step uses them.


class GradientComparison:
    """Compares gradients of `loss.backward()`, `torch.autograd.grad` and of the user at steps 1, 2, 4, 8 and so on."""

    def __init__(self, bulletin: Bulletin) -> None:
        self._bulletin = bulletin
        self._num_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """By model: its steps with such gradients."""

    def compare(self, member: Member) -> None:
        """Compare the gradients of a model, at a step that uses them; every rank raises if they differ."""
        self._num_steps[member] = number = self._num_steps.get(member, 0) + 1
        if number & (number - 1):
            return
        trained = [parameter for parameter in member.synchronised if is_comparable(parameter)]
        mine = fingerprint(parameter.grad for parameter in trained if parameter.grad is not None)
        found = self._bulletin.exchange(member, f"gradients {number}", mine, range(self._bulletin.num_processes))
        if len(set(found.values())) > 1:
            raise RuntimeError(
                f"step(): the gradients of {member.describe()} differ between the ranks, so the weights "
                "would diverge. No accelerator.backward(loss) has computed them, and gradients of "
                "torch.autograd.grad, or set by hand, are not synchronised. Call accelerator.backward(loss), or "
                f"average them: parameter.grad = accelerator.reduce(gradient, 'mean'). {SWITCH}"
            )


# --------------------------------------------------------------------------------------------------------------------
# Comparison of the micro-batches that ranks have left out of their windows, by `continue` or a caught exception.
#
# Each rank knows how many samples the others' loaders gave them, so a window of counted samples needs no exchange.
# That holds only while all ranks use what they are given. A rank that leaves a micro-batch out writes what its window
# holds before the next reduction, and looks for the other ranks' notes after it. Ranks that left out nothing write
# nothing, which is the answer, and pay nothing.


class LeftOut:
    """Finds windows that lack a micro-batch on some ranks, although other ranks have used theirs."""

    def __init__(self, gradient_state: GradientState, bulletin: Bulletin, fence: UpdateFence) -> None:
        self._gradient_state = gradient_state
        self._bulletin = bulletin
        self._fence = fence
        self._num_reductions = 0
        """Backwards so far that have reduced the gradients; a rank's n-th one is paired with every other rank's."""
        self._registered_in: int | None = None
        """The run of a session in which the bulletin has named this object last."""
        self._held: list[int] | None = None
        """Contents of this rank's window, if this rank has written them for the present backward."""

    def write(self, window: Window, watched: Sequence[tuple[PreparedModel, Any]], *, syncs: bool) -> bool:
        """Before a backward: write what the window holds, if this rank left something out since the last reduction.

        Returns True if this rank has written, and `compare` has to follow.
        """
        found, self._held = self._gradient_state.loops.left_out, None
        # DDP reduces at the first backward after a forward that was to synchronise and had none.
        syncs = syncs or (found is not None and any(member.notes.forwards & FORWARD_SYNCED for member, _ in watched))
        if not syncs:
            return False
        self._num_reductions += 1
        if self._registered_in != context.call_id():  # On all ranks; later only some may have a word to write.
            self._registered_in = context.call_id()
            self._bulletin.register(self)
        # Weights that were given are added up over the ranks where a window ends.
        if found is not None and found.iteration is window.iteration and window.weights.kind != "given":
            held = [self._gradient_state.loops.num_blocks, window.num_begun, window.num_gathered]
            if self._bulletin.write(self, f"window {self._num_reductions}", held):
                self._held = held
        return self._held is not None

    def compare(self) -> None:
        """After the backward, if this rank has written: raise if another rank's window holds other micro-batches."""
        held, self._held = self._held, None
        if held is None:
            return
        self._fence.finish()  # On a GPU a peer could otherwise be about to write.
        found = self._bulletin.read(self, f"window {self._num_reductions}")
        others = [rank for rank in range(self._bulletin.num_processes) if found.get(rank) != held]
        if not others:
            self._gradient_state.loops.left_out = None  # All ranks have left out the same.
            return
        left_out = self._gradient_state.loops.left_out
        how = "no block of accumulate() began for a batch of the loader, by `continue` for instance."
        if left_out is not None and left_out.was_begun:
            how = (
                "a block of accumulate() ended without a backward, by `continue` or by an exception that the loop "
                "caught."
            )
        way_out = "pass weight=len(inputs) to every backward: then a window counts what its ranks really hold."
        if left_out is not None and left_out.was_last:
            way_out = (
                "run its backward with weight=0 (and pass weight= in all other backwards of the window): the last "
                "micro-batch of a window reduces the gradients together with the other ranks."
            )
        raise RuntimeError(
            f"update {self._num_reductions}: rank {self._bulletin.rank} left a micro-batch out of its window, and rank"
            f"{'s' * (len(others) > 1)} {named(others)} did not: {how} The ranks' gradients would be means over "
            f"different samples. Leave it out on all ranks, or {way_out} {SWITCH}"
        )


# --------------------------------------------------------------------------------------------------------------------
# Plain data that ranks write for each other into the process group's store; no rank waits for another rank.
#
# A collective pairs with whatever the peers call next, so a check that adds one could hang where the program alone
# would not. A key in the store pairs with nothing: a peer's word is there, or it is not.


PREFIX = "notebook_launcher/bulletin"
PATIENCE = 10.0
"""Seconds for which `exchange` waits for ranks that are about to write."""


class Bulletin:
    """Plain data about objects that each rank has a copy of; every rank writes about its own copy."""

    def __init__(self, rank: int, num_processes: int) -> None:
        self.rank = rank
        self.num_processes = num_processes
        self._store: Any = None
        self._call_id = 0
        """The run of a session in which the names were given."""
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def write(self, owner: Any, topic: str, content: Any) -> bool:
        """Write plain data on an object for the other ranks; return False if the process group has no store (MPI)."""
        if not self.register(owner):
            return False
        store = self._store()
        key = self._key(owner, topic, self.rank)
        store.set(key, json.dumps(content))
        # `set` returns before the store has it. Its answer to a question comes after.
        return bool(store.check([key]))

    def register(self, owner: Any) -> bool:
        """Give an object its name in the store, if it has none; return False if the process group has no store (MPI).

        All ranks must register their objects of a type in the same order.
        """
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no other name for it
        if store is None:
            return False
        if self._store is None or self._store() is not store or self._call_id != context.call_id():
            # With a new process group all begins again, and with a new run: the last one may have failed on one rank
            # before that rank had registered what the others had.
            self._store, self._call_id = weakref.ref(store), context.call_id()
            self._names.clear()
        if owner not in self._names:
            kind = type(owner).__name__
            # The store counts, so that several Accelerators need not know of each other.
            number = store.add(f"{PREFIX}/{self.rank}/{self._call_id}/{kind}", 1)
            self._names[owner] = f"{self._call_id}/{kind} {number}"
        return True

    def read(self, owner: Any, topic: str, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Return what these ranks, by default all of them, have written so far."""
        store = self._store()
        asked = range(self.num_processes) if ranks is None else ranks
        keys = {rank: self._key(owner, topic, rank) for rank in asked}
        return {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}

    def exchange(self, owner: Any, topic: str, mine: Any, ranks: Iterable[int]) -> dict[int, Any]:
        """Write, and return what these ranks are about to write; a rank that ends meanwhile is left out."""
        wanted = set(ranks)
        self.write(owner, topic, mine)
        deadline = time.monotonic() + PATIENCE
        while len(found := self.read(owner, topic, wanted)) < len(wanted) and time.monotonic() < deadline:
            time.sleep(0.001)
        return found

    def _key(self, owner: Any, topic: str, rank: int) -> str:
        return f"{PREFIX}/{rank}/{self._names[owner]}/{topic}"
