"""Exact accumulation: the factor of each micro-batch's loss, and the correction where a window ends.

In a window of micro-batches i with weights w_i, on all ranks together, the gradient of the mean loss is
sum(w_i * g_i) / sum(w_i). The sum of the weights is known only when the window ends. So each backward
is scaled as if the window were going to be full, by w_i / (full_size * unit), and if it was not,
the gradients are corrected once, where the window ends. A full window of equal micro-batches needs no
correction, and its numbers equal `loss / full_size`.

The weight of a micro-batch is the number of samples or tokens that its mean loss is over. The user gives the number, a
prepared loader counts it, or all micro-batches weigh the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from notebook_launcher.training.spread_tensors import has_values, is_spread, part_of_gradient
from notebook_launcher.training.user_warnings import users_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from notebook_launcher.training.accumulation.members import Member, Members
    from notebook_launcher.training.accumulation.micro_batches import MicroBatchBlock
    from notebook_launcher.training.accumulation.updates import LiveOptimizers
    from notebook_launcher.training.accumulation.windows import GradientState, Window
    from notebook_launcher.training.data.loader import DataLoaderStateMixin as ActiveLoader
    from notebook_launcher.training.data.rows import Round
    from notebook_launcher.training.parallelism.mesh import Layout
    from notebook_launcher.training.plugins import Rules
    from notebook_launcher.training.user_warnings import Warner


_ZIPPED = (
    "two prepared loaders are read side by side, and one of them has a batch that is not full where the other's is, "
    "such as its last one. A micro-batch weighs as many samples as the loader counted that was read last. Pass "
    "weight=, the number of samples that the loss is a mean over, to every backward."
)


WeightKind: TypeAlias = Literal["given", "counted", "equal"]
"""Sources of the weights of a window's micro-batches; `Weights.kind` explains each."""


class Weights:
    """The weights of a window's micro-batches, all of one kind.

    A micro-batch's weight is, in this order, what `backward(weight=...)` was given, its number of samples
    if a prepared loader counted them, or 1.
    """

    kind: WeightKind | None = None
    """`"given"` if each rank alone knows the weights of its micro-batches, by `weight=` or by the rows of a ready
    batch; `"counted"` if a prepared loader knows the samples of all ranks; `"equal"` if the first micro-batch came
    from no prepared loader, so that a full one weighs 1; None before the first backward."""
    unit = 1.0
    """The unit of weights: the size of a full micro-batch where weights are counted."""
    mine: float | torch.Tensor = 0.0
    """Sum of this rank's weights; a tensor if they were given on a GPU."""
    total: float | torch.Tensor = 0.0
    """Sum of all ranks' weights, a tensor on GPUs. Weights passed as `weight=` are summed when the window ends."""
    full: float | None = None
    """What a full window would hold; None until the window's last backward."""

    def settle(self, kind: WeightKind, unit: float) -> None:
        """Take the kind and the unit of the first backward; raise ValueError for a later one of another kind."""
        if self.kind is None:
            self.kind, self.unit = kind, unit
        elif (self.kind == "given") != (kind == "given"):
            have, miss = ("weight=", "none") if kind == "given" else ("no weight=", "one")
            raise ValueError(
                f"backward() got {have} after micro-batches of the same window got {miss}: their mean has no meaning. "
                "Pass weight= to every backward of a window, or to none."
            )

    @property
    def correction(self) -> float | torch.Tensor:
        """The weight of a full window, by which each loss was divided, by what the window held when it ended."""
        return 1.0 if self.full is None else ratio(self.full, self.total, 1.0)


PendingSum: TypeAlias = "tuple[torch.Tensor, dist.Work]"
"""The sum of the ranks' weights, and the work of its all-reduce, which runs beside a backward."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Weighing:
    """Weighs the micro-batches of an Accelerator, on all ranks together."""

    gradient_state: GradientState
    members: Members
    rules: Rules
    optimizers: LiveOptimizers
    scaler: torch.amp.GradScaler | None
    """Scales fp16 losses; None in other precisions."""
    warn_once: Warner
    device: torch.device
    layout: Layout
    """The ranks that read different data: their weights are added up."""
    _is_in_closure: bool = False
    """True while an optimizer calls its closure, which may compute the gradients several times."""
    _is_local: bool = False
    """True if every rank trains by itself (`LocalSGD`), so that its windows are means over its own samples."""

    def __post_init__(self) -> None:
        self._num_data_ranks, self._data_rank = self.layout.num_data_ranks, self.layout.data_rank
        self._data_group = self.layout.data_group

    @contextlib.contextmanager
    def in_closure(self) -> Iterator[None]:
        """Expect several backwards of one micro-batch inside the block, in which an optimizer calls its closure."""
        self._is_in_closure = True
        try:
            yield
        finally:
            self._is_in_closure = False

    def note_local_training(self) -> None:
        """Note if all members train alone now: `LocalSGD` has begun or ended that for some of them."""
        self._is_local = all(
            member.notes is not None and member.notes.trains_alone for member in self.members.models_and_leaves
        )

    def factor_outside_blocks(self, weight: Any, reduction: str) -> float | torch.Tensor:
        """Return the factor of a loss outside any block."""
        num_steps = self.gradient_state.num_steps
        if self.rules.nominal_divisor:
            return 1.0 / num_steps
        loader = self.gradient_state.active_loaders.active
        if weight is None and loader is not None and num_steps == 1:
            weight = loader.current_rows  # of a ready batch, which this rank alone knows
        if weight is not None:
            if num_steps > 1:
                raise ValueError(
                    f"backward(loss, weight={weight!r}) outside of accumulate() with gradient_accumulation_steps="
                    f"{num_steps}: the end of the window is unknown. Write `with accelerator.accumulate(model):` "
                    "around forward, backward and step."
                )
            mine = self._given_weight(weight)
            total = self._total(mine)
            return ratio(self._num_data_ranks * (mine if reduction == "mean" else one_if_used(mine)), total, 0.0)
        weights = self._use_round_weights()
        if weights is None or num_steps > 1:
            return 1.0 / num_steps
        return float(self._num_data_ranks * weights[self._data_rank] / (sum(weights) or 1))

    def count_and_weigh(self, block: MicroBatchBlock, weight: Any, reduction: str) -> float | torch.Tensor:
        """Count the backward in its block and window, and return the factor of its loss."""
        window = block.window
        if self.rules.nominal_divisor:
            window.num_gathered += 1
            block.num_backwards += 1
            return 1.0 / self.gradient_state.num_steps
        weights, gradients, full_size = window.weights, window.gradients, window.full_size
        is_last, loader = self.gradient_state.sync_gradients, self.gradient_state.active_loaders.active
        if weight is None and loader is not None:
            weight = loader.current_rows  # of a ready batch, which this rank alone knows
        # An earlier backward of this block has ended the window.
        is_corrected = is_last and block.num_backwards > 0
        if window.num_gathered == 0 and not gradients.was_clear and self.rules.guards:
            self._check_trained(block)
        if window.num_gathered == 0 and (full_size > 1 or weight is not None):
            gradients.keep_old(window, self.members, self.optimizers)
        if full_size > 1 or block.num_backwards:
            self._check_gradients(block)
        kind, mine, total, unit = self._weight_of(window, weight, loader)
        if kind != weights.kind:
            weights.settle(kind, unit)
        if block.num_backwards == 0:
            weights.mine += mine
            weights.total += total
        window.num_gathered += 1
        block.num_backwards += 1
        if reduction == "sum":
            mine = one_if_used(mine)
        if is_last and window.knows_its_weight:
            # No gradient needs the correction yet, but a second backward of this block will.
            weights.full = self._num_data_ranks * full_size * weights.unit
            return self._num_data_ranks * mine / (weights.total or 1.0)
        # By what a full window would hold; `correct` corrects it by what the window held.
        factor = mine / (full_size * weights.unit)
        return factor * weights.correction if is_corrected else factor

    def _check_gradients(self, block: MicroBatchBlock) -> None:
        """Warn before a backward if gradients are there that it must not be added to.

        Raises:
            RuntimeError: The gradients of the window's earlier micro-batches were cleared.
        """
        window, gradients, guards = block.window, block.window.gradients, self.rules.guards
        if block.num_backwards == 0 and not gradients.are_untouched(window.num_gathered) and guards:
            self._warn_of_changed_gradients(block)
        if gradients.old and window.num_gathered == 0 and window.full_size > 1 and guards:
            self._warn_of_old_gradients(block)
        if guards and not self._is_in_closure and block.num_backwards >= max(1, len(block.members)):
            self.warn_once(
                "two backwards",
                "two backwards in one accumulate(): the block is one micro-batch, so their losses add up, and at the "
                "end of a window each one synchronises. Write backward(loss_a + loss_b), or a block for each "
                "micro-batch.",
            )

    def _weight_of(
        self, window: Window, weight: Any, loader: ActiveLoader | None
    ) -> tuple[WeightKind, float | torch.Tensor, float, float]:
        """Return the kind of a micro-batch's weight, the weight on this rank and on all, and their unit."""
        weights = window.weights
        if weight is not None:
            given = self._given_weight(weight)
            return "given", given, 0.0, self._unit_of_given(given)
        counted = None if loader is None else self._weights_of_round(loader, loader.current_round)
        if loader is None or counted is None:
            mine = weights.unit if weights.kind == "counted" else 1.0
            return "equal", mine, mine * self._num_data_ranks, mine
        if loader.counts_otherwise or self.gradient_state.active_loaders.are_several:
            self._check_counts(window, loader)
        full = float(full_rows_of(loader))
        unit = weights.unit if weights.kind == "counted" else full
        per_weight = full if weights.kind == "equal" else 1.0
        return "counted", counted[self._data_rank] / per_weight, sum(counted) / per_weight, unit

    def _check_counts(self, window: Window, loader: ActiveLoader) -> None:
        """Warn if the samples that the loader counts may not be the weight of the loss."""
        if not self.rules.guards:
            return
        if loader.counts_otherwise and (window.full_size > 1 or self._num_data_ranks > 1):
            self.warn_once("counts otherwise", loader.counts_otherwise)
        expected = relative_weights(loader)
        if any(relative_weights(other) != expected for other in self.gradient_state.active_loaders.in_step(loader)):
            self.warn_once("zipped", _ZIPPED)

    def _given_weight(self, weight: Any) -> float | torch.Tensor:
        """Return the weight that the user gave; 0 for a repeated batch with which a rank only keeps step."""
        looked_up = self.members.looked_up
        if looked_up.has_sparse_gradients is None:
            looked_up.has_sparse_gradients = has_sparse_gradients(self.members.models_and_leaves)
        # A weight of 0 leaves the rows of sparse gradients out, so it must be known to be 0.
        value = checked_weight(weight, self.device, reads=looked_up.has_sparse_gradients)
        weights = self._use_round_weights()
        repeats = weights is not None and not weights[self._data_rank] and (self._is_local or any(weights))
        return 0.0 if repeats else value

    def _use_round_weights(self) -> tuple[int, ...] | None:
        """Return the weights of all ranks' present batches, for a backward that weighs by them; None: unknown."""
        loaders = self.gradient_state.active_loaders
        if loaders.keeps_rounds and self.gradient_state.block is not None:
            return self._weights_of_round(loaders.active, loaders.micro_batch_round)
        return self._weights_of_round(loaders.active, None if loaders.active is None else loaders.active.current_round)

    def _weights_of_round(self, loader: ActiveLoader | None, current: Round | None) -> tuple[int, ...] | None:
        if current is None or len(current.weights) != self._num_data_ranks:
            return None
        weights: tuple[int, ...] = current.weights
        if self._is_local:
            weights = (weights[self._data_rank],) * self._num_data_ranks
        if 0 in weights and loader is not None:
            loader.repeat_is_known = True
        return weights

    def _unit_of_given(self, weight: float | torch.Tensor) -> float:
        # In fp16 a loss that is weighed with thousands of tokens overflows, so weights are taken
        # in multiples of the first, which all ranks agree on once.
        if self.scaler is None:
            return 1.0
        state = self.gradient_state
        if state.given_unit is None:
            state.given_unit = float(self._total(max(float(weight), 1.0))) / self._num_data_ranks
        return state.given_unit

    def _total(self, weight: float | torch.Tensor) -> float | torch.Tensor:
        if self._num_data_ranks == 1 or self._is_local:
            return self._num_data_ranks * weight
        total = as_total(weight, self.device)
        dist.all_reduce(total, group=self._data_group)
        return keep_or_read(total)

    def sum_weights(self, block: MicroBatchBlock) -> PendingSum | None:
        """Begin the all-reduce of the weights that only their ranks know, beside the backward."""
        if self._num_data_ranks == 1 or self._is_local or block.num_backwards > 1:
            return None
        total = as_total(block.window.weights.mine, self.device)
        return total, dist.all_reduce(total, group=self._data_group, async_op=True)

    def correct(self, block: MicroBatchBlock, pending: PendingSum | None) -> None:
        """Rescale the gradients to the mean over the micro-batches that the window really held.

        A window that `knows_its_weight` needs no correction: the factor of its loss was the final one.
        """
        window, weights = block.window, block.window.weights
        if self.rules.nominal_divisor or block.num_backwards > 1 or window.num_gathered == 0:
            return
        if pending is not None:
            pending[1].wait()
            weights.total = keep_or_read(pending[0])
        elif weights.kind == "given":
            weights.total = self._num_data_ranks * weights.mine
        weights.full = self._num_data_ranks * window.full_size * weights.unit
        named: Iterable[torch.Tensor] = (parameter for member in block.members for parameter in member.parameters())
        if window.joined:
            named = [*named, *window.outside(window.joined)]
        rescale(named, weights.correction, window.gradients.old)

    def _check_trained(self, block: MicroBatchBlock) -> None:
        """Warn if gradients are left of a sharded model that no prepared optimizer trains."""
        if len(self.optimizers):
            return
        if any(is_spread(probe) and has_values(probe.grad) for probe in block.probes):
            self.warn_once(
                "untrained",
                "a sharded model has gradients that no optimizer has used or cleared. An optimizer that was made "
                "before prepare() sharded the model has the whole parameters, and trains nothing. Prepare it, too: "
                "`model, optimizer = accelerator.prepare(model, optimizer)`.",
            )

    def _warn_of_old_gradients(self, block: MicroBatchBlock) -> None:
        if self.warn_once.has_warned("not fresh"):
            return
        if any(has_values(probe.grad) for probe in block.probes):
            self.warn_once(
                "not fresh",
                "a window began with gradients that its models had already, from an update without zero_grad() or from "
                "another model's loss: the window's are added to them. If they are not meant to be there, call "
                "optimizer.zero_grad() before the backward, or freeze the model where another model's loss passes "
                f"through it: {_freezing(block)}.",
            )

    def _warn_of_changed_gradients(self, block: MicroBatchBlock) -> None:
        if self.warn_once.has_warned("changed"):
            return
        self.warn_once(
            "changed",
            "gradients were changed between two micro-batches of a window, by another model's loss or by your code: "
            "the update uses the changed gradients. If a loss passes through a model that it does not train, freeze "
            f"that model for this loss: {_freezing(block)}, and True again before the model's own backward. Change "
            "gradients where accelerator.sync_gradients is True.",
        )


def _freezing(block: MicroBatchBlock) -> str:
    """Return the call that freezes the first model of this block that has gradients, by the user's name for it."""
    for member in block.members:
        module = getattr(member, "module", None)
        if module is not None and any(has_values(parameter.grad) for parameter in member.parameters()):
            name = users_name(module, getattr(module, "module", module)) or f"<the {member.describe()}>"
            return f"{name}.requires_grad_(False)"
    return "model.requires_grad_(False)"


def full_rows_of(loader: ActiveLoader) -> int:
    """Return the samples of a full batch of one rank, at least 1: of the present round if the loader does not know."""
    drawn = loader.current_round
    return loader.current_full_rows or (0 if drawn is None else max(drawn.rows)) or 1


def relative_weights(loader: ActiveLoader) -> tuple[float, ...] | None:
    """Return the weights of a loader's present batches, in full batches; None if they are unknown."""
    drawn = loader.current_round
    if drawn is None:
        return None
    full = full_rows_of(loader)
    return tuple(weight / full for weight in drawn.weights)


# --------------------------------------------------------------------------------------------------------------------
# The correction of a window's gradients, once it is known what the window held.
#
# On a CPU its factor is a number. If the ranks' weights were reduced on a GPU, the factor stays a tensor there,
# because reading it would make the program wait for all queued work, once for each update.


def keep_or_read(total: torch.Tensor) -> float | torch.Tensor:
    """Return a reduced total of one element: a number if that needs no wait, otherwise a tensor."""
    return float(total) if total.device.type == "cpu" else total.squeeze()


def ratio(numerator: float | torch.Tensor, total: float | torch.Tensor, otherwise: float) -> float | torch.Tensor:
    """Return `numerator / total`, or `otherwise` if the total is 0."""
    if isinstance(total, torch.Tensor):
        return torch.where(total == 0, otherwise, numerator / total)
    return numerator / total if total else otherwise


def rescale(
    parameters: Iterable[torch.Tensor], factor: float | torch.Tensor, old: Mapping[int, torch.Tensor] | None = None
) -> None:
    """Multiply the gradients of parameters by a factor, each once; `old` has the parts of them that stay, by id."""
    if not isinstance(factor, torch.Tensor) and factor == 1.0:
        return
    # By id, so that a gradient of several models is multiplied once. A sharded gradient is represented by this rank's
    # part, because torch refuses whole and sharded tensors in one call.
    found = {id(parameter): part_of_gradient(parameter.grad) for parameter in parameters if parameter.grad is not None}
    gradients = list(found.values())
    if isinstance(factor, torch.Tensor):
        apart = [gradient for gradient in gradients if not _fits(gradient, factor)]
        gradients = [gradient for gradient in gradients if _fits(gradient, factor)]
        for gradient in apart:
            exact = torch.promote_types(gradient.dtype, torch.float32)
            gradient.copy_(gradient.to(exact).mul_(factor.to(gradient.device)))
    if gradients:
        torch._foreach_mul_(gradients, factor)
    for key, part in (old or {}).items():
        if key in found:
            found[key].add_(part * (1.0 - factor))


def _fits(gradient: torch.Tensor, factor: torch.Tensor) -> bool:
    # torch would round the factor to the 16 bits of the gradient first.
    return gradient.device == factor.device and gradient.dtype.itemsize >= 4


# --------------------------------------------------------------------------------------------------------------------
# The weights that `backward` is given: numbers, and tensors that stay on their GPU.
#
# A weight that a GPU has computed, such as the number of tokens that are not padding, is not read there: that would
# have the program wait for all that is queued, once for each micro-batch.


def stays_on_device(weight: Any, device: torch.device) -> bool:
    """Return True for a tensor of one element on the device, unless the device is the CPU, where a read is free."""
    return isinstance(weight, torch.Tensor) and weight.device.type == device.type != "cpu" and weight.numel() == 1


def checked_weight(weight: Any, device: torch.device, *, reads: bool = False) -> float | torch.Tensor:
    """Return a weight as a number, or as a tensor without dimensions where it stays on its device.

    On its device an invalid weight turns into NaN, and so do the gradients: an error would need a wait. With `reads`
    the result is a number.
    """
    if not reads and stays_on_device(weight, device):
        kept = weight.detach().reshape(()).double()
        return torch.where((kept >= 0.0) & (kept < math.inf), kept, math.nan)
    try:
        value = None if isinstance(weight, (str, bytes, bool)) else float(weight)
    except (TypeError, ValueError, RuntimeError):
        value = None
    if value is None:
        raise TypeError(
            f"weight={weight!r} is not a number. Pass the number of samples or tokens that the loss averages over."
        )
    if not 0.0 <= value < math.inf:
        raise ValueError(
            f"weight={weight!r} must be 0 or more: the number of samples or tokens that the loss averages over."
        )
    return value


def one_if_used(weight: float | torch.Tensor) -> float | torch.Tensor:
    """Return 1 for a weight above 0, and 0 for 0."""
    return (weight > 0).double() if isinstance(weight, torch.Tensor) else float(weight > 0)


def as_total(weight: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a weight, to which an all-reduce can add the weights of the other ranks."""
    if isinstance(weight, torch.Tensor):
        return weight.reshape(1).clone()
    return torch.full((1,), weight, dtype=torch.float64, device=device)  # `torch.tensor` waits for the GPU.


def has_sparse_gradients(members: Iterable[Member]) -> bool:
    """Return True if a layer of these members names rows in its gradients, as `Embedding(sparse=True)` does."""
    modules = (module for member in members for module in getattr(member, "module", torch.nn.Module()).modules())
    return any(getattr(module, "sparse", False) is True for module in modules)
