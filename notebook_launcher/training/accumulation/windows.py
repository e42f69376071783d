"""The windows of accumulation: which micro-batches belong to one update, their count and their weights."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch

from notebook_launcher.training.accumulation.members import parameters_of
from notebook_launcher.training.spread_tensors import part_of_gradient

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from notebook_launcher.training.accumulation.member_kinds import Member
    from notebook_launcher.training.accumulation.members import Members
    from notebook_launcher.training.data.active_loaders import ActiveLoader


# --------------------------------------------------------------------------------------------------------------------
# The windows of gradient accumulation: the count and the weights of their micro-batches.
#
# A window is the micro-batches between two updates. It ends after `num_steps` of them, or where its loader ends. Its
# contents are counted on the way, so that the gradient is divided by the weight that the window held, not by the
# weight of a full window.


WeightKind: TypeAlias = Literal["given", "counted", "equal"]
"""Sources of the weights of a window's micro-batches; `Window.kind` explains each."""


@dataclasses.dataclass(slots=True, eq=False)
class Window:
    """The micro-batches that one set of models has gathered since its last update.

    A micro-batch's weight is, in this order, what `backward(weight=...)` was given, its number of samples
    if a prepared loader counted them, or 1. All micro-batches of a window are weighed the same way.

    Other modules read the fields; only the methods here write them.
    """

    members: tuple[Member, ...] = ()
    """Members whose gradients the window gathers; empty for the one window that everything shares."""
    key: frozenset[int] = dataclasses.field(init=False)
    """The ids of the members, by which `GradientState` finds the window."""
    _parameters: frozenset[int] | None = None
    """The ids of the members' trained parameters; None until they are asked for."""
    is_broken: bool = False
    """True if a backward failed half way, so that the gradients are not of whole micro-batches."""
    iteration: object | None = None
    """The loader's iteration that the window began in."""
    num_drawn: int = 0
    """Number of batches that the loader had drawn when the last micro-batch began."""
    weight_versions: list[int] = dataclasses.field(default_factory=list)
    """Versions of the weights when the window began."""
    was_clear: bool = False
    """True if the models had no gradients when the window began, or lost them since."""

    # What `reset` forgets.
    joined: list[Member] = dataclasses.field(default_factory=list)
    """Members that `accumulate` was not given, and that an optimizer was to update inside the window nevertheless."""
    num_batches: int = 0
    """Micro-batches so far, with the current one."""
    num_backwards: int = 0
    """Backwards so far."""
    backwards_in_block: int = 0
    """Backwards of the current micro-batch."""
    gathered: tuple[torch.Tensor, int] | None = None
    """A parameter whose gradient the window has gathered, with the gradient's version after the last backward."""
    old_gradients: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    """By the id of a parameter, a copy of the gradient that it had before the window, which needs no correction."""
    has_foreign: bool = False
    """True if a backward of torch's own has written gradients of this window, which no `zero_grad` inside it clears."""
    has_stepped: bool = False
    """True if an optimizer has made its update: nothing of the window is left to be saved, though its block is open."""
    is_deferred: bool = False
    """True if an update was put off because the window's last micro-batch had no backward."""
    kind: WeightKind | None = None
    """`"given"` if each rank alone knows the weights of its micro-batches, by `weight=` or by the rows of a ready
    batch; `"counted"` if a prepared loader knows the samples of all ranks; `"equal"` if the first micro-batch came
    from no prepared loader, so that a full one weighs 1; None before the first backward."""
    knows_its_weight: bool = False
    """True after a single backward that all ranks can count: its weight is the window's, if no other follows."""
    num_steps: int = 1
    """Micro-batches of a full window, when this one began."""
    unit: float = 1.0
    """The unit of weights: the size of a full micro-batch where weights are counted."""
    weight: float | torch.Tensor = 0.0
    """Sum of this rank's weights; a tensor if they were given on a GPU."""
    world_weight: float | torch.Tensor = 0.0
    """Sum of all ranks' weights, a tensor on GPUs. Weights passed as `weight=` are summed when the window ends."""
    correction: float | torch.Tensor = 1.0
    """The factor by which the gradients were multiplied where the window ended."""

    def __post_init__(self) -> None:
        self.renew_ids()

    def renew_ids(self) -> None:
        """Read the ids of members and parameters again: in another process they belong to other objects."""
        self.key = frozenset(map(id, self.members))
        self._parameters = None

    def reset(self) -> None:
        """Forget the micro-batches; members stay."""
        # Written out: a loop over the fields' defaults would take 1 to 2 µs of each update.
        self.num_batches = self.num_backwards = self.backwards_in_block = 0
        self.gathered = self.kind = None
        self.has_foreign = self.has_stepped = self.is_deferred = self.knows_its_weight = False
        self.num_steps = 1
        self.unit = self.correction = 1.0
        self.weight = self.world_weight = 0.0
        if self.joined:
            self.joined.clear()
        if self.old_gradients:
            self.old_gradients = {}

    def begin_micro_batch(
        self, num_steps: int, iteration: object | None, probes: Sequence[torch.Tensor | None]
    ) -> None:
        """Count a micro-batch that begins.

        Args:
            num_steps: Micro-batches of a full window, if this is its first one.
            iteration: The loader's iteration that the micro-batch comes from; None outside a loop.
            probes: A trained parameter of each model: its version shows whether the weights were changed inside the
                window, and its gradient whether there are any.
        """
        if self.num_batches == 0:
            self.num_steps = num_steps
            self.iteration = iteration
            self.weight_versions = [-1 if probe is None else probe._version for probe in probes]  # noqa: SLF001
            self.was_clear = not _have_gradients(probes)
        elif self.iteration is None:
            self.iteration = iteration
        self.num_batches += 1
        self.backwards_in_block = 0

    def take_batch(self, iteration: object | None, num_drawn: int) -> bool:
        """Note how many batches the loader has drawn; return False if none is new since the last micro-batch."""
        before, self.num_drawn = self.num_drawn, num_drawn
        return before != num_drawn or self.iteration is not iteration

    def drop_micro_batch(self) -> None:
        """Leave the current micro-batch out, because it failed before its backward: its batch may be tried again."""
        self.num_batches -= 1
        self.num_drawn = -1
        self.is_deferred = False

    def put_off(self) -> None:
        """Note that an update was put off, because the window's last micro-batch had no backward."""
        self.is_deferred = True

    def extend(self, *, is_exhausted: bool) -> bool:
        """Take one more micro-batch in place of one without a backward; return False if the loader has no more."""
        self.is_deferred = False
        self.is_broken = is_exhausted
        if not is_exhausted:
            self.num_batches -= 1
        return not is_exhausted

    def break_off(self) -> None:
        """Note that a micro-batch has failed half way, so that its gradients are of no use."""
        self.is_broken = True

    def drop(self) -> None:
        """Forget the micro-batches, also of a broken window."""
        self.reset()
        self.is_broken = False

    def join(self, members: Iterable[Member]) -> None:
        """Add members that `accumulate` was not given and that an optimizer updates with the window's."""
        self.joined += members

    @property
    def all_members(self) -> list[Member]:
        """Members whose gradients the window gathers, also members that joined it."""
        return [*self.members, *self.joined]

    def holds(self, members: Iterable[Member]) -> bool:
        """Return True if the window gathers gradients of one of these members."""
        return not self.key or any(
            id(member) in self.key or member in self.joined or not self.outside([member]) for member in members
        )

    def outside(self, members: Iterable[Member]) -> list[torch.Tensor]:
        """Return the trained parameters of these members that belong to no member of `accumulate`."""
        mine = self._trained()
        parameters = (parameter for member in members for parameter in member.parameters())
        return [parameter for parameter in parameters if parameter.requires_grad and id(parameter) not in mine]

    def shares_parameters(self, other: Window) -> bool:
        """Return True if a parameter has its gradient gathered by both windows."""
        if self.joined and other.holds(self.joined):
            return True
        if other.joined and self.holds(other.joined):
            return True
        return not self.key.isdisjoint(other.key) or not self._trained().isdisjoint(other._trained())

    def _trained(self) -> frozenset[int]:
        if self._parameters is None:
            self._parameters = frozenset(
                id(parameter) for member in self.members for parameter in member.parameters() if parameter.requires_grad
            )
        return self._parameters

    def note_gathered(self, members: Iterable[Member]) -> None:
        """Note the version of a gradient of these members, which a backward has just written to."""
        known = self.gathered
        if known is None or (grad := known[0].grad) is None:
            self.gathered = _find_gradient(members)
        else:
            self.gathered = known[0], grad._version  # noqa: SLF001

    def has_unnoted_gradients(self, members: Iterable[Member]) -> bool:
        """Return True if one of these members has gradients that were written since the last `note_gathered`."""
        known = self.gathered
        if known is None or (grad := known[0].grad) is None:
            return _find_gradient(members) is not None
        return known[1] >= 0 and grad._version != known[1]  # noqa: SLF001

    def note_step(self) -> None:
        """Note that an optimizer has made its update."""
        self.has_stepped = True

    def has_gained_gradients(self, probes: Iterable[torch.Tensor | None]) -> bool:
        """Return True if these parameters had no gradients in this window, and now there are some."""
        return self.was_clear and _have_gradients(probes)

    def note_cleared(self) -> None:
        """Note that gradients of these models were cleared inside the window."""
        self.was_clear = True

    def note_foreign(self) -> None:
        """Note that a backward of torch's own has written gradients of this window."""
        self.has_foreign = True

    def check_gathered(self) -> bool:
        """Return False if something else has changed the gradients of earlier micro-batches.

        Raises:
            RuntimeError: The gradients were cleared.
        """
        if self.gathered is None or self.backwards_in_block:
            return True
        grad, version = self.gathered[0].grad, self.gathered[1]
        if grad is not None and grad._version == version:  # noqa: SLF001
            return True
        if not has_values(grad):
            raise RuntimeError(
                f"backward(): the gradients of {self.num_backwards} earlier micro-batches of this window were cleared, "
                "by model.zero_grad() or by zero_grad() of an optimizer that prepare() did not return. Call the "
                "prepared optimizer's zero_grad() instead: it keeps the gradients of a window that is open."
            )
        return False

    def weigh(self, kind: WeightKind, weight: float | torch.Tensor, world_weight: float, unit: float) -> None:
        """Count a micro-batch; raise ValueError if the window's other micro-batches were weighed in another way."""
        if self.kind is None:
            self.kind = kind
            self.unit = unit
        elif (self.kind == "given") != (kind == "given"):
            have, miss = ("weight=", "none") if kind == "given" else ("no weight=", "one")
            raise ValueError(
                f"backward() got {have} after micro-batches of the same window got {miss}: their mean has no meaning. "
                "Pass weight= to every backward of a window, or to none."
            )
        if self.backwards_in_block == 0:
            self.weight += weight
            self.world_weight += world_weight
        self.num_backwards += 1
        self.backwards_in_block += 1
        self.knows_its_weight = self.num_backwards == 1 and kind != "given"

    def count_backward(self) -> None:
        """Count a micro-batch without a weight, as Accelerate does."""
        self.num_backwards += 1
        self.backwards_in_block += 1

    def close(self, num_ranks: int, world_weight: float | torch.Tensor | None = None) -> None:
        """Set the correction of the window that ends: the weight of a full window by the weight that it held.

        `Weighing.count_and_weigh` has divided each loss by the former, and `Weighing.correct` multiplies by this.

        Args:
            num_ranks: Ranks whose weights are summed.
            world_weight: The sum of all ranks' weights; None: `weigh` has summed it.
        """
        if world_weight is not None:
            self.world_weight = world_weight
        self.correction = ratio(num_ranks * self.num_steps * self.unit, self.world_weight, 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the micro-batches of an open window for a checkpoint."""
        return {key: _plain(getattr(self, name)) for key, name in _KEPT.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Forget the loop and the micro-batches; restore the micro-batches of a checkpoint, if the state has any."""
        self.reset()
        self.iteration = None
        self.weight_versions = []
        for key, name in _KEPT.items():
            if key in state:
                setattr(self, name, state[key])


def _have_gradients(probes: Iterable[torch.Tensor | None]) -> bool:
    return any([probe is not None and probe.grad is not None for probe in probes])  # noqa: C419 - takes half the time


_KEPT = {
    "num_batches": "num_batches",
    "num_backwards": "num_backwards",
    "divisor": "num_steps",
    "kind": "kind",
    "reference": "unit",
    "weight": "weight",
    "world_weight": "world_weight",
}
"""Parts of a window in a checkpoint, by the names there: fields of the window."""


def _plain(value: Any) -> Any:
    """Return a weight that may be on a GPU as a number."""
    return value if value is None or isinstance(value, (int, float, str)) else value.item()


def _find_gradient(members: Iterable[Member]) -> tuple[torch.Tensor, int] | None:
    """Return the first parameter that has a gradient, and the gradient's version."""
    trained = (parameter for member in members for parameter in member.parameters())
    found = ((tensor, tensor.grad._version) for tensor in trained if tensor.grad is not None)  # noqa: SLF001
    return next(found, None)


def has_values(gradient: torch.Tensor | None) -> bool:
    """Return True if a gradient, or of a sharded one this rank's part, is not all zeros."""
    return gradient is not None and bool(part_of_gradient(gradient).any())


# --------------------------------------------------------------------------------------------------------------------
# Notes on the loops over prepared loaders: whether each batch gets a micro-batch, and a micro-batch its batch.


class LeftOutBatch(NamedTuple):
    """A batch of a prepared loader that no backward has used."""

    iteration: object | None
    """The loader's iteration that it belongs to."""
    was_begun: bool
    """True if a block of `accumulate` began, and ended without a backward; False if none began."""
    was_last: bool
    """True if it would have been the last of its window."""


class LoopNotes:
    """Notes on the loops over prepared loaders, and on the micro-batches that begin inside them."""

    def __init__(self) -> None:
        self.num_blocks = 0
        """Micro-batches begun so far."""
        self.left_out: LeftOutBatch | None = None
        """The batch that was left out last."""
        self.was_read_ahead = False
        """True if the last loop read all of its loader and no micro-batch began meanwhile, as `list(loader)` does."""
        self.is_out_of_step = False
        """True if the micro-batch began without a batch of its own from the loader that ends its window: the loader
        ends windows by another batch then."""
        self.models: Sequence[torch.nn.Module] = ()
        """The prepared models."""
        self._blocks_before_loop = 0
        """Micro-batches that had begun when the last loop over a prepared loader began."""

    def begin_loop(self) -> None:
        """Note that a loop over a prepared loader begins."""
        self._blocks_before_loop, self.was_read_ahead = self.num_blocks, False

    def note_end(self, loader: ActiveLoader) -> None:
        """Note that a loop over a prepared loader has come to its end."""
        is_unused = self.num_blocks == self._blocks_before_loop and loader.num_drawn > 1
        # An evaluation, which needs no accumulate(), computes no gradients.
        self.was_read_ahead = is_unused and torch.is_grad_enabled()

    def evaluates(self) -> bool:
        """Return True if gradients are switched off, or all prepared models are in evaluation mode."""
        is_off = bool(self.models) and not any(model.training for model in self.models)
        return is_off or not torch.is_grad_enabled()

    def forget_left_out(self) -> None:
        """Forget the batch that was left out last: all ranks have left out the same."""
        self.left_out = None


# --------------------------------------------------------------------------------------------------------------------
# Gradients that parameters have before the first backward of a window.
#
# An optimizer that steps in every second window only leaves them, as do an update without `zero_grad()` and another
# model's loss. As with torch alone, the window's gradients are added to them. The window's correction leaves them
# out.


def keep_old_gradients(window: Window, members: Members, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Copy the gradients that are there before a window's first backward, for its correction, if there are any."""
    if not any(_may_count(probe.grad, window) for probe in _probes(window, members, optimizers)):
        return
    for member in members.models_and_leaves:  # Any of them may join the window.
        for parameter in member.parameters():
            if parameter.grad is not None:
                window.old_gradients[id(parameter)] = part_of_gradient(parameter.grad).detach().clone()


def _may_count(gradient: torch.Tensor | None, window: Window) -> bool:
    """Return True unless a gradient is missing or known to be all zeros."""
    if gradient is None or window.num_steps > 1 or gradient.device.type == "cpu":
        return has_values(gradient)
    return True  # Reading it would make every update wait for the GPU.


def _probes(window: Window, members: Members, optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return a trained parameter of each member and each optimizer whose gradients the window gathers.

    A sharded parameter of which this rank has no part shows nothing.
    """
    known = members.looked_up.probes
    probes = known.get(id(window))
    if probes is None:
        mine = [list(member.parameters()) for member in window.members or members.models_and_leaves]
        trained = {
            id(parameter)
            for parameters in mine
            for parameter in parameters
            if parameter.requires_grad and part_of_gradient(parameter).numel()
        }
        firsts = [
            next((parameter for parameter in parameters if id(parameter) in trained), None)
            for parameters in (*mine, *map(parameters_of, optimizers))
        ]
        probes = known[id(window)] = list({id(first): first for first in firsts if first is not None}.values())
    return probes


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
    """Multiply the gradients of parameters by a factor, each once.

    Args:
        parameters: The parameters.
        factor: The factor.
        old: By the id of a parameter, a part of its gradient that stays as it is.
    """
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
