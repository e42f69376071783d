"""The end of a window: prepared optimizers clip and step, and their schedulers advance, there and nowhere else."""

from __future__ import annotations

import copy
import dataclasses
import math
import types
import warnings
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_launcher.training.accumulation.members import have_gradients, parameters_of
from notebook_launcher.training.accumulation.weighing import rescale
from notebook_launcher.training.plugins import check_limit
from notebook_launcher.training.spread_tensors import whole_tensor
from notebook_launcher.training.user_warnings import Warner
from notebook_launcher.wording import class_name, first_few

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from notebook_launcher.training.accumulation.members import Member, Members
    from notebook_launcher.training.accumulation.micro_batches import MicroBatchBlock
    from notebook_launcher.training.accumulation.weighing import Weighing
    from notebook_launcher.training.accumulation.windows import GradientState, Window
    from notebook_launcher.training.plugins import Rules
    from notebook_launcher.training.rank_check.check import RankCheck


# --------------------------------------------------------------------------------------------------------------------
# The end of a window: prepared optimizers clip and step, there and nowhere else.


@dataclasses.dataclass(kw_only=True, eq=False)
class Updates:
    """The updates of an Accelerator's prepared optimizers."""

    gradient_state: GradientState
    members: Members
    optimizers: LiveOptimizers
    rules: Rules
    weighing: Weighing
    """Corrects windows."""
    rank_check: RankCheck | None
    """Compares the ranks' weights; None if they are not compared."""
    warn_once: Warner
    num_processes: int
    max_grad_norm: float | None
    """Clip the gradients to this total norm before each step; None: do not."""
    scaler: torch.amp.GradScaler | None
    """Scales fp16 losses; None in other precisions."""
    note_step: Callable[[], None]
    """Called after each step."""
    present: Callable[..., Any]
    """Returns the parameters that are trained now, for those of a list from before the model was sharded."""
    last_grad_norm: torch.Tensor | None = None
    """The total norm before the last clipping."""
    steps_made: int = 0
    """Steps of all prepared optimizers so far, skipped ones included."""

    def __post_init__(self) -> None:
        self.scaling = GradientScaling(self.scaler, self.gradient_state, self.optimizers)
        """The steps with scaled gradients, in fp16."""

    def observe(self) -> dict[str, Any]:
        """Return `learning_rate`, of each optimizer's first group, and `grad_norm` if gradients are clipped."""
        groups = [group for prepared in self.optimizers for group in prepared.param_groups[:1]]
        rates = [group["lr"] for group in groups if "lr" in group]
        named = {f"learning_rate_{number}" if number else "learning_rate": rate for number, rate in enumerate(rates)}
        return {**named, "grad_norm": self.last_grad_norm} if self.last_grad_norm is not None else named

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for prepared in self.optimizers:  # each leaves its Updates out, so that it pickles by itself
            prepared._updates = self  # noqa: SLF001 - ours

    def step(self, prepared: AcceleratedOptimizer, closure: Callable[[], Any] | None) -> Any:
        """Step where the window ends; return the result of the optimizer."""
        gradient_state = self.gradient_state
        block = gradient_state.block
        if self.rules.guards and block is not None:
            key = id(prepared), id(block.window)
            if closure is not None or not block.num_backwards or key not in self.members.looked_up.covered:
                self._check_window(prepared, block, closure)
        if not gradient_state.sync_gradients or self._puts_off(block):
            return None
        if self.rules.guards:
            if len(gradient_state.windows) > 1:
                self._check_complete(prepared)
            if self.num_processes > 1:
                self._check_synced(prepared)
        optimizer: Any = prepared.optimizer
        if closure is None and self.scaler is None and self.max_grad_norm is None:
            outcome = optimizer.step()
        else:
            outcome = self._step_with_more(prepared, closure)
            if (rank_check := self.rank_check) is not None:
                rank_check.forgotten.checked = None  # An overflow may have left out the step that was checked.
        self.steps_made += 1
        if block is not None:
            block.window.has_stepped = True
        self.note_step()
        return outcome

    def _step_with_more(self, prepared: AcceleratedOptimizer, closure: Callable[[], Any] | None) -> Any:
        """Step with a closure, a scaler or clipping."""
        if self.max_grad_norm is not None and closure is not None:
            closure = self._clipping(closure, prepared, self.max_grad_norm)
        elif self.max_grad_norm is not None:
            self._clip(parameters_of(prepared), self.max_grad_norm, 2.0, [prepared])
        if self.scaler is not None:
            return self.scaling.step(prepared, closure)
        optimizer: Any = prepared.optimizer
        if closure is None:
            return optimizer.step()
        with self.weighing.in_closure():
            return optimizer.step(closure)

    def _check_window(
        self, prepared: AcceleratedOptimizer, block: MicroBatchBlock, closure: Callable[[], Any] | None
    ) -> None:
        """Check a step inside `accumulate`, and let models join its window."""
        window, covered = block.window, self.members.looked_up.covered
        if closure is not None or block.num_backwards == 0:
            self._check_block(block, closure)
        if window.num_gathered and (key := (id(prepared), id(window))) not in covered:
            owned = self.members.owned_by(prepared.optimizer).members
            if owned and all(member in window.members for member in owned):
                covered.add(key)
            else:
                self._join(owned, window)

    def _join(self, members: Sequence[Member], window: Window) -> None:
        """Let models that a block steps or clips belong to its window, if `accumulate` was given other models only.

        In `with accumulate(head)` both `encoder_optimizer.step()` and its `zero_grad()` then wait for the window's end,
        and the gradients get the window's correction.
        """
        if window.holds(members):
            # The optimizer of the window's models trains others, too: those that the window's backwards have reached.
            members = [member for member in members if not window.holds([member]) and member.has_gradients()]
        if not members:
            return
        others = [other for other in self.gradient_state.windows.values() if other is not window]
        if any(other.num_gathered and other.holds(members) for other in others):
            return
        window.joined += members
        if self.gradient_state.sync_gradients and not window.knows_its_weight:
            # The window has ended, and has corrected the models that it knew.
            rescale(window.outside(members), window.weights.correction, window.gradients.old)

    def _puts_off(self, block: MicroBatchBlock | None) -> bool:
        """Put the update off, and return True, if the window has not ended: its last micro-batch was left out."""
        if block is None or block.num_backwards or not self.gradient_state.lacks_end(block):
            return False
        block.is_put_off, self.gradient_state.sync_gradients = True, False  # Schedulers wait, too.
        return True

    def may_clear(self, prepared: AcceleratedOptimizer) -> bool:
        """Return True if `zero_grad()` clears; the gradients then count as not synchronised."""
        gradient_state = self.gradient_state
        if self.rules.zero_grad_drops_window:
            return gradient_state.sync_gradients
        if gradient_state.loaded:
            return False
        block, ends = gradient_state.block, gradient_state.sync_gradients
        current = None if block is None else block.window
        gathers = current is not None and current.num_gathered and not ends
        if gathers and (id(prepared), id(current)) in self.members.looked_up.covered:
            return False
        if current is not None and block is not None and not (current.num_gathered or current.has_stepped):
            # A backward of torch's own is noted before a `zero_grad()` inside a window, which then keeps the gradients.
            is_unknown = current.gradients.was_clear and not current.gradients.has_foreign
            if current.full_size > 1 and is_unknown and have_gradients(block.probes):
                self._note_foreign(current)
        lookup = self.members.owned_by(prepared.optimizer)
        owned, shared = lookup.members, lookup.shared
        if self._are_gathered(owned, block if ends else None):
            return False
        for member in owned:
            # Gradients that another optimizer has not used yet are still those of the last backward.
            if not shared or all(parameter.grad is None for parameter in shared.get(id(member), ())):
                member.clear_synced()
        if current is not None and not ends and current.holds(owned):
            current.gradients.was_clear = True
        self.members.num_backwards = 0
        return True

    def _are_gathered(self, owned: Sequence[Member], ended: MicroBatchBlock | None) -> bool:
        """Return True if a window, but for the one that ends with a block, has gradients that no step has used."""
        for window in self.gradient_state.windows.values():
            if not (window.num_gathered or window.gradients.has_foreign):
                continue
            if ended is not None and window is ended.window and (ended.num_backwards or window.has_stepped):
                continue
            if window.holds(owned):
                return True
        return False

    def clip_norm(self, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor | None:
        """Clip the gradients where a window ends; inside a window do nothing and return None."""
        check_limit("max_norm", max_norm)
        if not self._clips_now():
            return None
        parameters = self._all_corrected(self.present(given_parameters(parameters)))
        return self._clip(parameters, max_norm, norm_type, self.optimizers)

    def clip_value(self, parameters: Any, clip_value: float) -> None:
        """Clip each element, where a window ends."""
        check_limit("clip_value", clip_value)
        if self._clips_now():
            parameters = self._all_corrected(self.present(given_parameters(parameters)))
            self.scaling.unscale(self.optimizers)
            for group in filter(None, _by_mesh(parameters).values()):  # Without gradients, torch's function fails.
                torch.nn.utils.clip_grad_value_(group, clip_value)

    def _clips_now(self) -> bool:
        """Return True where a window ends; by Accelerate's rules also inside a window."""
        gradient_state = self.gradient_state
        is_wanted = gradient_state.sync_gradients or self.rules.clip_inside_window
        return is_wanted and not self._puts_off(gradient_state.block)

    def _all_corrected(self, parameters: Any) -> Any:
        """Return the parameters that are to be clipped, after their models have joined the window that has ended."""
        window = self.gradient_state.current
        correction = 1.0 if window is None else window.weights.correction
        if window is None or not self.rules.guards or (type(correction) is float and correction == 1.0):
            return parameters
        listed = list(given_parameters(parameters))
        clipped = set(map(id, listed))
        for member in self.members.models_and_leaves:
            if not window.holds([member]) and any(id(parameter) in clipped for parameter in member.parameters()):
                self._join([member], window)
        return listed

    def _clip(
        self, parameters: Any, max_norm: float, norm_type: float, optimizers: Iterable[AcceleratedOptimizer]
    ) -> torch.Tensor:
        self.scaling.unscale(optimizers)
        norm = self.last_grad_norm = clip_norm_(parameters, max_norm, norm_type)
        return norm

    def _clipping(
        self, closure: Callable[[], Any], prepared: AcceleratedOptimizer, max_norm: float
    ) -> Callable[[], Any]:
        """Return the closure of a step, with its gradients clipped each time that it has computed them."""

        def compute() -> Any:
            loss = closure()
            self._clip(parameters_of(prepared), max_norm, 2.0, [prepared])
            return loss

        return compute

    def clear(self) -> None:
        """Release the optimizers."""
        self.optimizers.clear()
        self.scaling.clear()

    # Refusals of a step whose gradients are not whole, or are one rank's alone.

    def _check_complete(self, prepared: AcceleratedOptimizer) -> None:
        """Raise RuntimeError if another window than the current one gathers gradients that this step would use."""
        gradient_state = self.gradient_state
        owned = self.members.owned_by(prepared.optimizer).members
        for key, window in gradient_state.windows.items():
            if window is not gradient_state.current and window.num_gathered and key and window.holds(owned):
                raise RuntimeError(
                    f"step(): this {type(prepared.optimizer).__name__} also updates models whose window is still open, "
                    f"with {window.num_begun} of {window.full_size} micro-batches. Pass all models of an optimizer "
                    "to the same accumulate(), as in accumulate(encoder, decoder), or give each model an optimizer."
                )

    def _check_block(self, block: MicroBatchBlock, closure: Callable[[], Any] | None) -> None:
        """Raise ValueError for a closure in a window of several micro-batches; warn of a backward of torch's own."""
        window = block.window
        if closure is not None and (window.num_begun > 1 or not self.gradient_state.sync_gradients):
            raise ValueError(
                f"step(closure) in a window of {window.full_size} micro-batches: the closure computes one of them, and "
                "the step needs the gradient of all. Call backward(loss) before step(), without a closure; LBFGS "
                "and others that call their closure again need gradient_accumulation_steps=1."
            )
        lacks_backward = closure is None and window.full_size > 1 and block.num_backwards == 0
        if lacks_backward and window.gradients.has_unnoted(block.members):
            self._note_foreign(window)

    def _note_foreign(self, window: Window) -> None:
        window.gradients.has_foreign = True
        self.warn_once(
            "backward of torch",
            "a micro-batch of accumulate() has gradients and called no accelerator.backward(loss). loss.backward() "
            f"alone adds the {window.full_size} micro-batches of a window up: that is their mean only if the loss "
            "is divided by their number, and if they are of equal size. Write accelerator.backward(loss), and do "
            "not divide.",
        )

    def _check_synced(self, prepared: AcceleratedOptimizer) -> None:
        """Raise RuntimeError if gradients of this optimizer are one rank's alone, unless `LocalSGD` wants that."""
        owned = self.members.owned_by(prepared.optimizer)
        for member in owned.members:
            notes = member.notes
            if notes is not None and notes.trains_alone:
                return
            if not member.is_synced and member.has_gradients():
                if notes is None or not self.members.are_set_by_hand(notes):
                    raise RuntimeError(
                        f"step(): the gradients of {member.describe()} were not synchronised, so the ranks' weights "
                        f"would diverge. {member.explain_unsynced()}"
                    )
                self._check_foreign(member)
            elif notes is not None and not notes.answered:
                self._check_foreign(member)
        if owned.local and (local := [parameter for parameter in owned.local if parameter.grad is not None]):
            raise RuntimeError(_describe_local(prepared.optimizer, local, self.members))
        if self.rank_check is not None:
            self.rank_check.forgotten.checked = id(prepared.optimizer)

    def _check_foreign(self, member: Member) -> None:
        """Have the ranks compare gradients that no backward of the Accelerator has computed, now and then."""
        if self.rank_check is not None and member.has_gradients():
            self.rank_check.gradients.compare(member)


def _describe_local(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], members: Members) -> str:
    """Return the message that nothing synchronises these parameters, and why."""
    mine = {id(parameter) for parameter in parameters}
    inside = [model for model in members.models if any(id(parameter) in mine for parameter in model.parameters())]
    shapes = first_few([str(tuple(parameter.shape)) for parameter in parameters])
    if inside:
        name = class_name(getattr(inside[0], "module", inside[0]))
        why = (
            f"were frozen, or not yet part of the {name}, when prepare() wrapped it. Unfreeze or add them first and "
            "call prepare() then, after accelerator.free_memory() if it was called for this model before; for stages "
            "that train other layers, give DistributedDataParallelKwargs(find_unused_parameters=True) and freeze after "
            "prepare()."
        )
    else:
        why = (
            "belong to no model that prepare() was given. Write `model, optimizer = accelerator.prepare(model, "
            "optimizer)`, with each model and leaf tensor that the optimizer updates. Prepare the model to average "
            "gradients by hand, too."
        )
    return (
        f"step(): nothing synchronised the gradients of {len(parameters)} parameters of this "
        f"{type(optimizer).__name__} (shapes {shapes}), so the ranks' weights "
        f"would diverge: they {why}"
    )


# --------------------------------------------------------------------------------------------------------------------
# An optimizer that steps once, where a window ends, and knows if it stepped.


def _of_wrapped(name: str) -> Any:
    """Return a property that is an attribute of the wrapped optimizer."""
    return property(
        lambda self: getattr(self.optimizer, name), lambda self, value: setattr(self.optimizer, name, value)
    )


class AcceleratedOptimizer(torch.optim.Optimizer):
    """A prepared optimizer: inside a window `step()` and `zero_grad()` do nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer, updates: Updates | None = None) -> None:
        # Not super().__init__(): the wrapped optimizer has the parameters and the state.
        self.optimizer = optimizer
        self._updates = updates
        self._is_overflow = False  # Accelerate's name: loops set it, to hold a scheduler back

    state: Any = _of_wrapped("state")
    defaults: Any = _of_wrapped("defaults")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Attribute of the wrapped optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups
        self._note_other_parameters()

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped because gradients had overflowed."""
        return self._is_overflow

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, if the window ends with this micro-batch.

        Raises:
            RuntimeError: Gradients of a model were not synchronised; the message has the reason.
        """
        if self._updates is None:
            return self.optimizer.step(closure)
        return self._updates.step(self, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless a window has gathered some that no step has used."""
        if self._updates is not None and not self._updates.may_clear(self):
            return
        clear = self.optimizer.zero_grad
        if not set_to_none or getattr(clear, "__func__", None) is not torch.optim.Optimizer.zero_grad:
            clear(set_to_none=set_to_none)
            return
        for parameter in parameters_of(self.optimizer):
            parameter.grad = None  # Torch's own does the same behind a guard and a label, which take 24 of 270 µs.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        if self._updates is not None and "params" in param_group:
            param_group = {**param_group, "params": self._updates.present(param_group["params"], trains=True)}
        self.optimizer.add_param_group(param_group)
        self._note_other_parameters()

    def _note_other_parameters(self) -> None:
        """Have the members of this optimizer looked up again."""
        if self._updates is not None:
            self._updates.members.changed()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Call the wrapped optimizer's `train`, which schedule-free optimizers have."""
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval(self) -> None:
        """Call the wrapped optimizer's `eval`."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # missing while this object is being unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "_is_overflow": self._is_overflow}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _updates=None)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"


# --------------------------------------------------------------------------------------------------------------------
# Clipping of gradients, even if some are sharded (over one mesh or several) and others are whole.
#
# Torch's functions take one kind at a time (torch 2.13: "got mixed torch.Tensor and DTensor").


def clip_norm_(parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale gradients down to a total norm, and return the norm before, a whole tensor on every rank."""
    groups = _by_mesh(parameters)
    if len(groups) == 1 and next(iter(groups)) is None:
        return torch.nn.utils.clip_grad_norm_(groups[None], max_norm, norm_type=norm_type)
    norms = [_total_norm(group, norm_type) for group in groups.values()]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    for group in groups.values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def given_parameters(given: Any) -> Iterable[torch.Tensor]:
    """Return the parameters that a call was given: one, several, or a model for all of its own."""
    parameters: Iterable[torch.Tensor] = given.parameters() if isinstance(given, torch.nn.Module) else given
    return [given] if isinstance(given, torch.Tensor) else parameters


def _by_mesh(parameters: Any) -> dict[Any, list[torch.Tensor]]:
    """Return the parameters that have a gradient, by the mesh that it is sharded over; None for whole gradients."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for parameter in given_parameters(parameters):
        gradient = parameter.grad
        if gradient is None:
            continue
        # A plain tensor is not asked: it takes 1 µs to find that it has no such attribute.
        mesh = None if type(gradient) is torch.Tensor else getattr(gradient, "device_mesh", None)
        groups.setdefault(mesh, []).append(parameter)
    return groups or {None: []}


def _total_norm(parameters: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    grads: list[Any] = [parameter.grad for parameter in parameters]
    if float(norm_type) == math.inf and hasattr(grads[0], "device_mesh"):
        return _largest(grads)
    norm = torch.nn.utils.get_total_norm(grads, norm_type)
    return whole_tensor(norm)


def _largest(gradients: list[Any]) -> torch.Tensor:
    """Return the largest absolute value of sharded gradients, where torch fails if a rank's part of one is empty."""
    parts = [gradient.to_local() for gradient in gradients]
    # Not every backend reduces the maximum of 16-bit numbers.
    exact = torch.promote_types(parts[0].dtype, torch.float32)
    found = [torch.linalg.vector_norm(part.to(exact), math.inf) for part in parts if part.numel()]
    largest = torch.stack(found).max() if found else torch.zeros((), dtype=exact, device=parts[0].device)
    mesh = gradients[0].device_mesh
    for dimension in range(mesh.ndim):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group(dimension))
    return largest


# --------------------------------------------------------------------------------------------------------------------
# Steps with the scaled gradients of fp16: they are unscaled once for each update, and the scale follows the steps.


@dataclasses.dataclass(eq=False)
class GradientScaling:
    """Steps and unscales the prepared optimizers of an Accelerator with its `GradScaler`; without one, does nothing."""

    scaler: torch.amp.GradScaler | None
    gradient_state: GradientState
    optimizers: LiveOptimizers
    _unscaled: set[int] = dataclasses.field(default_factory=set)
    """Ids of the optimizers whose gradients were unscaled since their last step."""
    _stepped: set[int] = dataclasses.field(default_factory=set)
    """Ids of the optimizers that have stepped since the scale was updated last."""

    def step(self, prepared: AcceleratedOptimizer, closure: Callable[[], Any] | None) -> Any:
        """Step with scaled gradients, and note if that was skipped; return the result of the optimizer."""
        if closure is not None:
            raise ValueError(
                "step(closure) cannot be used with fp16: its gradients are scaled. Use bf16, or no closure."
            )
        scaler = self.scaler
        assert scaler is not None
        happened: list[bool] = []
        handle = prepared.optimizer.register_step_post_hook(lambda *_: happened.append(True))
        try:
            outcome = scaler.step(prepared.optimizer)
        finally:
            handle.remove()
        # GradScaler always calls an optimizer that skips by itself (`fused=True`).
        skips_inside = getattr(prepared.optimizer, "_step_supports_amp_scaling", False)
        found = scaler._per_optimizer_states[id(prepared.optimizer)]["found_inf_per_device"]  # noqa: SLF001 - no public name
        skipped_inside = bool(skips_inside) and any(float(flag) for flag in found.values())
        prepared._is_overflow = skipped_inside or not happened  # noqa: SLF001 - ours
        self._unscaled.discard(id(prepared))
        self._stepped.add(id(prepared))
        # GradScaler.update() must run once, after all optimizers have stepped, because it forgets which were unscaled.
        if len(self._stepped) >= len(self.optimizers):
            self.update()
        return outcome

    def update(self) -> torch.amp.GradScaler | None:
        """Update the scale by the steps since its last update; return the scaler, None in other precisions.

        Gradients that other windows have gathered by then get the new scale, because more will be added to them.
        """
        scaler = self.scaler
        if self._stepped and scaler is not None:
            opened = [window for window in self.gradient_state.windows.values() if window.num_gathered]
            before = _scale_of(scaler).clone() if opened else torch.ones(())
            done = {
                id(parameter)
                for prepared in self.optimizers
                if id(prepared) in self._stepped or id(prepared) in self._unscaled
                for parameter in parameters_of(prepared)
            }
            self._stepped.clear()
            self._unscaled.clear()
            scaler.update()
            for window in opened:
                members = (*window.members, *window.joined)
                parameters = (parameter for member in members for parameter in member.parameters())
                gathered = [parameter for parameter in parameters if id(parameter) not in done]
                rescale(gathered, _scale_of(scaler) / before)
                if window.gradients.newest is not None:
                    # The version of the gradient has changed.
                    window.gradients.note_written(window.members)
        return scaler

    def unscale_given(self, given: Any) -> None:
        """Undo the scaling of the gradients of one optimizer, of a list, or with None of all.

        Raises:
            ValueError: An optimizer was not prepared.
        """
        known = {id(ours): prepared for prepared in self.optimizers for ours in (prepared, prepared.optimizer)}
        chosen = self.optimizers if given is None else given
        listed = [chosen] if id(chosen) in known or not isinstance(chosen, Iterable) else list(chosen)
        for optimizer in listed:
            if id(optimizer) not in known:
                raise ValueError(
                    f"unscale_gradients({type(optimizer).__name__}): it was not prepared. Pass an optimizer that "
                    "prepare() returned, a list of them, or nothing for all."
                )
        self.unscale(known[id(optimizer)] for optimizer in listed)

    def unscale(self, optimizers: Iterable[AcceleratedOptimizer]) -> None:
        """Undo the scaling of fp16 gradients, once for each update."""
        scaler = self.scaler
        if scaler is None:
            return
        for prepared in optimizers:
            if id(prepared) not in self._unscaled and have_gradients(parameters_of(prepared)):
                scaler.unscale_(prepared.optimizer)
                self._unscaled.add(id(prepared))

    def clear(self) -> None:
        """Forget which optimizers were unscaled and have stepped."""
        self._unscaled.clear()
        self._stepped.clear()


def _scale_of(scaler: torch.amp.GradScaler) -> torch.Tensor:
    """Return the scale where it is; `get_scale()` would wait for a GPU."""
    scale = scaler._scale  # noqa: SLF001
    assert scale is not None
    return scale


# --------------------------------------------------------------------------------------------------------------------
# The prepared optimizers that are in use.


class LiveOptimizers:
    """The prepared optimizers that are in use, in order.

    The optimizers are held weakly: each one refers to its `Updates`, and a strong reference back would be a cycle that
    only the garbage collector frees.
    """

    def __init__(self, optimizers: Iterable[AcceleratedOptimizer] = ()) -> None:
        self._refs = [weakref.ref(prepared) for prepared in optimizers]

    def __iter__(self) -> Iterator[AcceleratedOptimizer]:
        return (prepared for prepared in (ref() for ref in self._refs) if prepared is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def add(self, prepared: AcceleratedOptimizer) -> None:
        """Add an optimizer."""
        self._refs.append(weakref.ref(prepared))

    def clear(self) -> None:
        """Forget all optimizers."""
        self._refs.clear()

    def __reduce__(self) -> tuple[type[LiveOptimizers], tuple[list[AcceleratedOptimizer]]]:
        return LiveOptimizers, (list(self),)


# --------------------------------------------------------------------------------------------------------------------
# A learning-rate scheduler that advances once for each update, and the rates that it will give.


PLANNED = ("total_steps", "T_max", "total_iters")
"""Attributes of schedulers that give the number of their steps."""
FEW = 100
"""Updates of a preview if the scheduler does not say how many it is made for."""


class AcceleratedScheduler:
    """A prepared scheduler: `step()` advances it if an update was made, and only then.

    Args:
        scheduler: A torch scheduler, or anything with `step()`.
        optimizers: The optimizers whose updates it follows: its own, or all.
        step_with_optimizer: False: every `step()` advances it.
        steps_per_update: 1; Accelerate's number of processes in `compat`.
        gradient_state: Knows if a micro-batch is the last of its window.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: list[AcceleratedOptimizer],
        *,
        step_with_optimizer: bool = True,
        steps_per_update: int = 1,
        gradient_state: GradientState | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = optimizers
        self.step_with_optimizer = step_with_optimizer
        self.steps_per_update = steps_per_update
        self.gradient_state = gradient_state
        self.warn_once = Warner()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance, if the window has ended and its update was not skipped for an overflow."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if self.gradient_state is not None and not self.gradient_state.sync_gradients:
            if self.gradient_state.has_left_window:
                self.warn_once(
                    "left window",
                    "scheduler.step() did not advance: the loop was left inside a window of micro-batches, and a "
                    "prepared scheduler takes a step for each update. Leave the loop where accelerator.sync_gradients "
                    "is True; or, for a step at the end of each epoch whatever was left, give "
                    "Accelerator(step_scheduler_with_optimizer=False).",
                )
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        _advance(self.scheduler, self.steps_per_update, *args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of the last step, one for each parameter group."""
        rates: list[float] = self.scheduler.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped scheduler's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped scheduler's state."""
        self.scheduler.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        # Another process has no window to wait for.
        return {**self.__dict__, "gradient_state": None}

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def _advance(scheduler: Any, steps: int, *args: Any, **kwargs: Any) -> None:
    for _ in range(steps):
        # Short windows make more updates than planned, and OneCycleLR refuses to go past its end.
        if getattr(scheduler, "_step_count", 0) <= getattr(scheduler, "total_steps", float("inf")):
            scheduler.step(*args, **kwargs)


def preview(scheduler: Any, updates: int | None, group: int, *, steps_per_update: int) -> list[float]:
    """Carry out `Accelerator.preview` with a copy of the scheduler, which a copy of the optimizer's rates follows."""
    name, optimizer = type(scheduler).__name__, getattr(scheduler, "optimizer", None)
    if not hasattr(optimizer, "param_groups") or not hasattr(scheduler, "get_last_lr"):
        raise TypeError(f"preview({name}): pass a scheduler of torch.optim.lr_scheduler, prepared or not.")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TypeError(f"preview({name}): its rates follow a metric of the training, so nobody knows them before.")
    if updates is None:
        left = [getattr(scheduler, planned, None) for planned in PLANNED]
        updates = next((number for number in left if isinstance(number, int) and number > 0), FEW)
    rates = _Rates(optimizer)
    # What a user's schedule refers to, such as the model, stays as it is.
    kept = {id(optimizer): rates, **{id(method): method for method in _methods_of(scheduler)}}
    follower, found = copy.deepcopy(scheduler, kept), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of a scheduler that steps without its optimizer.
        for _ in range(updates):
            found.append(float(rates.param_groups[group]["lr"]))
            _advance(follower, steps_per_update)
    return found


def _methods_of(scheduler: Any) -> list[Any]:
    """Return the methods, of objects of any kind, by which a scheduler computes its rates."""
    held = [value if isinstance(value, (list, tuple)) else [value] for value in vars(scheduler).values()]
    inner = [_methods_of(other) for other in getattr(scheduler, "_schedulers", ())]
    return [each for values in (*held, *inner) for each in values if isinstance(each, (types.MethodType, weakref.ref))]


class _Rates:
    """The parameter groups of an optimizer without its parameters and its state, for a scheduler to write into."""

    def __init__(self, optimizer: Any) -> None:
        groups = optimizer.param_groups
        self.param_groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"} for group in groups
        ]
        self.defaults = dict(optimizer.defaults)

    def step(self) -> None:
        """Do nothing; schedulers look whether it is there."""
