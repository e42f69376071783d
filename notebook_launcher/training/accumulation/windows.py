"""The state of accumulation: the windows of micro-batches, and the loaders that are being iterated."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from notebook_launcher.settings.option_checks import DEFAULT_STEPS, whole_number
from notebook_launcher.training.accumulation.members import have_gradients, parameters_of
from notebook_launcher.training.accumulation.weighing import Weights
from notebook_launcher.training.spread_tensors import has_values, part_of_gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from notebook_launcher.training.accumulation.members import Member, Members
    from notebook_launcher.training.accumulation.micro_batches import MicroBatchBlock
    from notebook_launcher.training.data.loader import DataLoaderStateMixin as ActiveLoader
    from notebook_launcher.training.data.rows import Round
    from notebook_launcher.training.plugins import GradientAccumulationPlugin, Rules
    from notebook_launcher.training.requests import Safepoint


# --------------------------------------------------------------------------------------------------------------------
# The gradients of a window, and who has written them.
#
# An optimizer that steps in every second window only leaves gradients, as do an update without `zero_grad()` and
# another model's loss. As with torch alone, the window's gradients are added to them. The window's correction leaves
# them out.


class Gradients:
    """What is known of the gradients that a window gathers; probes are a trained parameter of each of its models."""

    weight_versions: Sequence[int] = ()
    """Versions of the probes when the window began, which show whether the weights were changed inside it."""
    was_clear = False
    """True if the probes had no gradients when the window began, or lost them since."""
    old: Mapping[int, torch.Tensor] = types.MappingProxyType({})
    """By the id of a parameter, a copy of the gradient that it had before the window, which needs no correction."""
    newest: tuple[torch.Tensor, int] | None = None
    """A parameter whose gradient the window has gathered, with the gradient's version after the last backward."""
    has_foreign = False
    """True if a backward of torch's own has written gradients of this window, which no `zero_grad` inside it clears."""

    def keep_old(self, window: Window, members: Members, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Copy the gradients that are there before a window's first backward, for its correction, if there are any."""
        if not any(_may_count(probe.grad, window) for probe in _probes(window, members, optimizers)):
            return
        everything = members.models_and_leaves  # Any of them may join the window.
        parameters = (parameter for member in everything for parameter in member.parameters())
        self.old = {
            id(parameter): part_of_gradient(parameter.grad).detach().clone()
            for parameter in parameters
            if parameter.grad is not None
        }

    def note_written(self, members: Iterable[Member]) -> None:
        """Note the version of a gradient of these members, which a backward has just written to."""
        known = self.newest
        if known is None or (grad := known[0].grad) is None:
            self.newest = _find_gradient(members)
        else:
            self.newest = known[0], grad._version  # noqa: SLF001

    def has_unnoted(self, members: Iterable[Member]) -> bool:
        """Return True if one of these members has gradients that were written since the last `note_written`."""
        known = self.newest
        if known is None or (grad := known[0].grad) is None:
            return _find_gradient(members) is not None
        return known[1] >= 0 and grad._version != known[1]  # noqa: SLF001

    def are_untouched(self, num_gathered: int) -> bool:
        """Return False if something else has changed the gradients of these earlier micro-batches.

        Raises:
            RuntimeError: The gradients were cleared.
        """
        if self.newest is None:
            return True
        grad, version = self.newest[0].grad, self.newest[1]
        if grad is not None and grad._version == version:  # noqa: SLF001
            return True
        if not has_values(grad):
            raise RuntimeError(
                f"backward(): the gradients of {num_gathered} earlier micro-batches of this window were cleared, "
                "by model.zero_grad() or by zero_grad() of an optimizer that prepare() did not return. Call the "
                "prepared optimizer's zero_grad() instead: it keeps the gradients of a window that is open."
            )
        return False


def _find_gradient(members: Iterable[Member]) -> tuple[torch.Tensor, int] | None:
    """Return the first parameter that has a gradient, and the gradient's version."""
    trained = (parameter for member in members for parameter in member.parameters())
    found = ((tensor, tensor.grad._version) for tensor in trained if tensor.grad is not None)  # noqa: SLF001
    return next(found, None)


def _may_count(gradient: torch.Tensor | None, window: Window) -> bool:
    """Return True unless a gradient is missing or known to be all zeros."""
    if gradient is None or window.full_size > 1 or gradient.device.type == "cpu":
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
# The windows of gradient accumulation: the count and the weights of their micro-batches.
#
# A window is the micro-batches between two updates. It ends after `full_size` of them, or where its loader ends. Its
# contents are counted on the way, so that the gradient is divided by the weight that the window held, not by the
# weight of a full window.


@dataclasses.dataclass(slots=True, eq=False)
class Window:
    """The micro-batches that one set of models has gathered since its last update."""

    members: tuple[Member, ...] = ()
    """Members whose gradients the window gathers; empty for the one window that everything shares."""
    joined: list[Member] = dataclasses.field(default_factory=list)
    """Members that `accumulate` was not given, and that an optimizer was to update inside the window nevertheless."""
    trained: frozenset[int] | None = None
    """The ids of the members' trained parameters; None until they are asked for."""
    full_size: int = 1
    """Micro-batches of a full window, when this one began."""
    num_begun: int = 0
    """Micro-batches so far, with the current one."""
    num_gathered: int = 0
    """Backwards so far: one for each micro-batch, unless a block has none or several."""
    iteration: object | None = None
    """The loader's iteration that the window began in."""
    num_drawn: int = 0
    """Number of batches that the loader had drawn when the last micro-batch began."""
    has_stepped: bool = False
    """True if an optimizer has made its update: nothing of the window is left to be saved, though its block is open."""
    is_broken: bool = False
    """True if a backward failed half way, so that the gradients are not of whole micro-batches."""
    weights: Weights = dataclasses.field(default_factory=Weights)
    """The weights of the micro-batches so far."""
    gradients: Gradients = dataclasses.field(default_factory=Gradients)
    """What is known of the gradients, to find those that nobody has weighed."""

    @property
    def key(self) -> frozenset[int]:
        """The ids of the members, by which `GradientState` finds the window."""
        return frozenset(map(id, self.members))

    def reset(self) -> None:
        """Forget the micro-batches; members stay."""
        self.full_size, self.num_begun, self.num_gathered, self.has_stepped = 1, 0, 0, False
        self.weights, self.gradients = Weights(), Gradients()
        self.joined.clear()

    @property
    def knows_its_weight(self) -> bool:
        """True after a single backward that all ranks can count: its weight is the window's, if no other follows."""
        return self.num_gathered == 1 and self.weights.kind != "given"

    def holds(self, members: Iterable[Member]) -> bool:
        """Return True if the window gathers gradients of one of these members."""
        return not self.members or any(
            member in self.members or member in self.joined or not self.outside([member]) for member in members
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
        shares_member = any(member in other.members for member in self.members)
        return shares_member or not self._trained().isdisjoint(other._trained())

    def _trained(self) -> frozenset[int]:
        if self.trained is None:
            self.trained = frozenset(
                id(parameter) for member in self.members for parameter in member.parameters() if parameter.requires_grad
            )
        return self.trained

    def state_dict(self) -> dict[str, Any]:
        """Return the micro-batches of an open window for a checkpoint."""
        weights = {key: getattr(self.weights, name) for key, name in _KEPT_WEIGHTS.items()}
        plain = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in weights.items()}
        return {**{key: getattr(self, name) for key, name in _KEPT.items()}, **plain}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Forget the loop and the micro-batches; restore the micro-batches of a checkpoint, if the state has any."""
        self.reset()
        self.iteration = None
        for names, record in ((_KEPT, self), (_KEPT_WEIGHTS, self.weights)):
            for key, name in names.items():
                if key in state:
                    setattr(record, name, state[key])


_KEPT = {"num_batches": "num_begun", "num_backwards": "num_gathered", "divisor": "full_size"}
"""Parts of a window in a checkpoint, by the names there: fields of the window."""
_KEPT_WEIGHTS = {"kind": "kind", "reference": "unit", "weight": "mine", "world_weight": "total"}
"""The same of its weights."""


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


# --------------------------------------------------------------------------------------------------------------------
# The state of accumulation: the settings, the windows, and the loaders that are being iterated.


Abandoned: TypeAlias = "tuple[Window, int, int]"
"""A window that was left before its end, and is reset already; the micro-batches of a full window, and its own."""


class GradientState:
    """The state of accumulation: the settings, the windows, and the loaders that are being iterated.

    Args:
        plugin: The settings of accumulation.
        rules: The differences from Accelerate.
        requests: Carried out when an outermost loop over a prepared loader asks for its next batch.
    """

    def __init__(self, plugin: GradientAccumulationPlugin, rules: Rules, requests: Safepoint | None = None) -> None:
        self.sync_gradients = True
        """True if the current micro-batch is the last of its window."""
        self.active_loaders = ActiveLoaders(self, requests=requests, follows_draws=rules.follows_draws)
        self.use_plugin(plugin)
        self.block: MicroBatchBlock | None = None
        """The block that was entered last, and has not been left; its `outer` is the block around it."""
        self.given_unit: float | None = None
        """The unit of weights given by hand, under a gradient scaler."""
        self.loops = LoopNotes()
        """Notes on the loops over prepared loaders."""
        self._rules = rules
        self.windows: dict[frozenset[int], Window] = {}
        """The window of each set of members; the key of a window that all members share is empty."""
        self._last: Window | None = None
        """The window of the micro-batch that was entered last."""
        self.loaded: dict[int, dict[str, Any]] = {}
        """Windows of a checkpoint whose models have not been used since, by their numbers."""

    def use_plugin(self, plugin: GradientAccumulationPlugin) -> None:
        """Take over the settings of a plugin; a window that is open keeps its number of micro-batches."""
        self.plugin = plugin
        self.active_loaders.keeps_rounds = not plugin.sync_with_dataloader
        # An Accelerator has resolved the number; a plugin that `compat`'s GradientState was given may have none.
        self._num_steps = plugin.num_steps or DEFAULT_STEPS

    @property
    def num_steps(self) -> int:
        """Micro-batches per update; a new number holds from the next window on, and the plugin stays as it was given.

        Raises:
            ValueError: The new number is no whole number from 1 on.
        """
        return self._num_steps

    @num_steps.setter
    def num_steps(self, steps: object) -> None:
        self._num_steps = whole_number("gradient_accumulation_steps", steps)

    @property
    def current(self) -> Window | None:
        """The window of the block that was entered last, and has not been left."""
        block = self.block
        return None if block is None else block.window

    def window_of(self, members: Sequence[Member]) -> Window:
        """Return the window of a set of members."""
        new = Window(() if self._rules.shared_window else tuple(members))
        if new.key not in self.windows:
            new.load_state_dict(self.loaded.pop(len(self.windows), {}))
            self.windows[new.key] = new
        return self.windows[new.key]

    def enter(self, window: Window, probes: Sequence[torch.Tensor]) -> Sequence[Abandoned]:
        """Begin a micro-batch, before its block becomes `block`; return the windows whose gradients must be dropped."""
        if self.block is not None and self._rules.guards:
            self._check_outer_blocks(window)
        loader, loops = self.active_loaders.active, self.loops
        iteration = None if loader is None else loader.iteration_token
        with_loader = self.plugin.sync_with_dataloader
        may_differ = with_loader and self._num_steps > 1
        if loader is None:
            loops.is_out_of_step = may_differ and (loops.was_read_ahead or window.iteration is not None)
        else:
            is_known = window.num_drawn == loader.num_drawn and window.iteration is iteration
            loops.is_out_of_step, window.num_drawn = may_differ and is_known, loader.num_drawn
            if self.active_loaders.note_micro_batch(loader) > 1:
                loops.left_out = LeftOutBatch(iteration, was_begun=False, was_last=False)
        if not with_loader:
            self.active_loaders.take_round()
        abandoned: Sequence[Abandoned] = ()
        is_continued = not window.num_begun or iteration is window.iteration
        if len(self.windows) > 1 or window.is_broken or not is_continued:
            abandoned = self._abandoned(window, iteration)
            if window.num_begun == 0:
                self._check_alone(window)
        if window.num_begun == 0:
            window.full_size, window.iteration = self._num_steps, iteration
            window.gradients.weight_versions = [probe._version for probe in probes]  # noqa: SLF001
            window.gradients.was_clear = not have_gradients(probes)
        elif window.iteration is None:
            window.iteration = iteration
        window.num_begun += 1
        loops.num_blocks += 1
        # A number of steps that is set inside a window holds from the next one on.
        full_size = self._num_steps if self._rules.nominal_divisor else window.full_size
        is_last = with_loader and loader is not None and self.active_loaders.is_at_end(loader)
        self.sync_gradients = window.num_begun >= full_size or is_last
        self._last = window
        return abandoned

    def _check_outer_blocks(self, window: Window) -> None:
        """Raise RuntimeError if a block around this one has a micro-batch of the same parameters."""
        outer = self.block
        while outer is not None:
            if outer.window is window or outer.window.shares_parameters(window):
                raise RuntimeError(
                    f"accumulate({_names(window)}) inside a block of accumulate({_names(outer.window)}): each block is "
                    "one micro-batch, so this batch would count twice. Write one block around forward, backward and "
                    "step()."
                )
            outer = outer.outer

    def _abandoned(self, window: Window, iteration: object | None) -> list[Abandoned]:
        """Reset the windows that were left before their end and whose gradients would get into this window."""
        abandoned = []
        for other in () if self._rules.keep_abandoned else self.windows.values():
            # A micro-batch of this loader iteration does not continue it.
            was_left = other.is_broken or (
                other.num_begun > 0
                and other.iteration is not None
                and iteration is not other.iteration
                and self._is_over(other)
            )
            if was_left and (other is window or other.shares_parameters(window)):
                abandoned.append((other, other.full_size, other.num_begun))
                other.reset()
                other.is_broken = False
        return abandoned

    def _check_alone(self, window: Window) -> None:
        """Raise ValueError if a window that is open gathers gradients of the same parameters."""
        for other in self.windows.values():
            if other.num_gathered and other is not window and window.shares_parameters(other):
                raise ValueError(
                    f"accumulate({_names(window)}): the window of accumulate({_names(other)}) is open, with "
                    f"{other.num_begun} of {other.full_size} micro-batches, and both train some of the same "
                    "parameters: their gradients would mix. Pass the same models to each accumulate() of a loop."
                )

    def leave(self, block: MicroBatchBlock, *, failed: bool) -> bool:
        """Close a block and end its micro-batch; return False if its window cannot end: the loader is exhausted.

        A micro-batch that failed before its backward does not count.
        """
        self.block, window = block.outer, block.window
        if block.num_backwards == 0:
            was_last = (self.sync_gradients or block.is_put_off) and not failed
            self.loops.left_out = LeftOutBatch(window.iteration, was_begun=True, was_last=was_last)
            if failed:
                window.num_begun -= 1
                window.num_drawn = -1  # Its batch may be tried again.
                return True
        if block.is_put_off or (block.num_backwards == 0 and self.lacks_end(block)):
            window.is_broken = self.end_of_dataloader and self.plugin.sync_with_dataloader
            window.num_begun -= not window.is_broken  # Another micro-batch takes this one's place.
            return not window.is_broken
        if self.sync_gradients and failed:
            window.is_broken = True
        elif self.sync_gradients:
            window.reset()
        return True

    def lacks_end(self, block: MicroBatchBlock) -> bool:
        """Return True if the window of a block that had no backward yet ends with it, though earlier ones had some."""
        return self.sync_gradients and not self._rules.nominal_divisor and block.window.num_gathered > 0

    @property
    def has_left_window(self) -> bool:
        """True if a window is open whose loop has ended, for example by a break."""
        last = self._last
        if not self._rules.guards or last is None or last.iteration is None:
            return False
        return last.num_begun > 0 and self._is_over(last)

    def loop_begins(self) -> None:
        """Forget that the last loop was left inside a window, because the new loop may not use `accumulate`."""
        self.loops.begin_loop()
        last = self._last
        if not self._rules.keep_abandoned and self.current is None and last is not None and last.iteration is not None:
            self.sync_gradients = self.sync_gradients or self._is_over(last)

    def _is_over(self, window: Window) -> bool:
        """Return True if the iteration that the window began in has ended; not for windows that span epochs."""
        if not self.plugin.sync_with_dataloader:
            return False
        return all(loader.iteration_token is not window.iteration for loader in self.active_loaders.loaders)

    @property
    def has_open_window(self) -> bool:
        """True if gradients have been gathered that no update has used."""
        return any(window.num_begun and not window.has_stepped for window in self.windows.values())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for window in self.windows.values():
            window.trained = None  # In another process the ids belong to other objects.
        self.windows = {window.key: window for window in self.windows.values()}
        self.active_loaders.belong_to(self)

    def forget_windows(self) -> None:
        """Forget all windows; models that are prepared later get new ones."""
        self.windows.clear()
        self._last = self.loops.left_out = None
        self.sync_gradients = True

    def state_dict(self) -> dict[str, Any]:
        """Return the open windows, each with its number in the order in which they came to be."""
        opened = [
            {"number": number, **window.state_dict()}
            for number, window in enumerate(self.windows.values())
            if window.num_begun and not window.has_stepped
        ]
        # The unit was called a reference when the first checkpoints were written; the name stays, to read them.
        return {"windows": opened, "given_reference": self.given_unit} if opened else {}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Restore a checkpoint's windows; None: no window was open, so all that are open now are closed."""
        self.load_state_dict(state or {})
        self.sync_gradients = state is None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the windows that were open when the state was taken; windows of models not known yet wait."""
        self.given_unit = state.get("given_reference", self.given_unit)
        self.loaded = {window["number"]: window for window in state.get("windows", [])}
        for number, window in enumerate(self.windows.values()):
            window.load_state_dict(self.loaded.pop(number, {}))

    # Accelerate's names, for code that asks for them.

    @property
    def active_dataloader(self) -> Any | None:
        """The prepared loader that has drawn a batch last and is still iterated; None outside a loop."""
        return self.active_loaders.active

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders that are being iterated, and None at the end, as in Accelerate."""
        return [None, *self.active_loaders.loaders]

    @property
    def in_dataloader(self) -> bool:
        """True while a prepared loader is being iterated."""
        return self.active_loaders.active is not None

    @property
    def end_of_dataloader(self) -> bool:
        """True if the active loader is at its last batch, or one that is iterated beside it, as by `zip`."""
        return self.active_loaders.is_at_end(self.active_loaders.active)

    @property
    def remainder(self) -> int:
        """Samples of the last round that are not repetitions; -1 if unknown, or if the data divide evenly."""
        loader = self.active_loaders.active
        return -1 if loader is None else int(loader.remainder)

    @property
    def adjust_scheduler(self) -> bool:
        """As given; without effect, as in Accelerate 1.15."""
        return self.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """True if a window ends where its loader ends."""
        return self.plugin.sync_with_dataloader

    @property
    def sync_each_batch(self) -> bool:
        """True if gradients are synchronised in every micro-batch."""
        return bool(self.plugin.sync_each_batch)

    @property
    def is_xla_gradients_synced(self) -> bool:
        """False: nothing runs on XLA here."""
        return False

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The settings by name."""
        return {**vars(self.plugin), "num_steps": self.num_steps}

    def __repr__(self) -> str:
        return (
            f"GradientState(sync_gradients={self.sync_gradients}, num_steps={self.num_steps}, "
            f"end_of_dataloader={self.end_of_dataloader})"
        )


def _names(window: Window) -> str:
    return ", ".join(member.describe() for member in window.members)


# --------------------------------------------------------------------------------------------------------------------
# The prepared loaders that are being iterated, and the weights of their present batches.


NO_DRAWS = (0, 0)
"""A loader's batches so far, and how many micro-batches in a row drew one, before its first micro-batch."""
IN_STEP = 2
"""Micro-batches in a row that each drew a batch from a loader, before the loader counts as read side by side."""


class ActiveLoaders:
    """The prepared loaders that are being iterated; the active one is the one that has drawn a batch last.

    Args:
        owner: Told when a loop begins and ends, for as long as it is in use.
        requests: Carried out when an outermost loop asks for its next batch; None: nobody makes any.
        follows_draws: False: as in Accelerate, the active loader is the one whose iteration began last, and it
            alone says whether its data end.
    """

    def __init__(
        self,
        owner: GradientState | None = None,
        *,
        requests: Safepoint | None = None,
        follows_draws: bool = True,
    ) -> None:
        self._loaders: list[ActiveLoader] = []
        """The loaders, the active one last. Their iterations hold them as long."""
        self.active: ActiveLoader | None = None
        """The loader that has drawn a batch last and is still iterated."""
        self.are_several = False
        """True if several loaders are being iterated."""
        self._follows_draws = follows_draws
        self._draws: dict[object, tuple[int, int]] = {}
        """By the iterations of the loaders: the batches drawn up to the last micro-batch, and the number of
        micro-batches in a row that drew one batch each while several loaders were iterated."""
        self.keeps_rounds = False
        """True if micro-batches get the rounds of their batches in the order in which these were drawn, so that a
        loop may read ahead."""
        self.micro_batch_round: Round | None = None
        """With `keeps_rounds`, the round of the present micro-batch; None if it is unknown."""
        self._rounds: dict[object, collections.deque[Round | None]] = {}
        """By the `id` of a loader: the rounds of its batches that were drawn and have had no micro-batch."""
        # Weakly: the owner holds these loaders, and only the garbage collector would free such a cycle.
        self._owner: weakref.ref[GradientState] | None = None if owner is None else weakref.ref(owner)
        self.requests = requests

    @property
    def owner(self) -> GradientState | None:
        """The state of accumulation whose loaders these are; None outside an Accelerator."""
        return None if self._owner is None else self._owner()

    def belong_to(self, owner: GradientState) -> None:
        """Tell another owner from now on when a loop begins and ends."""
        self._owner = weakref.ref(owner)

    def begin(self, loader: ActiveLoader) -> None:
        """Make `loader` the active one."""
        self._rounds.pop(id(loader), None)
        self._loaders.append(loader)
        self.active, self.are_several = loader, len(self._loaders) > 1
        if (owner := self.owner) is not None:
            owner.loop_begins()

    def note_end(self, loader: ActiveLoader) -> None:
        """Note that a loop over `loader` has come to its end."""
        if (owner := self.owner) is not None:
            owner.loops.note_end(loader)

    def evaluates(self) -> bool:
        """Return True if the present loop evaluates, as far as the owner knows."""
        owner = self.owner
        return owner is not None and owner.loops.evaluates()

    def end(self, loader: ActiveLoader) -> None:
        """Remove `loader`, wherever it stands."""
        for at in reversed(range(len(self._loaders))):
            if self._loaders[at] is loader:
                del self._loaders[at]
                break
        self.active, self.are_several = self._loaders[-1] if self._loaders else None, len(self._loaders) > 1

    def note_draw(self, loader: ActiveLoader) -> None:
        """Make a loader that has drawn a batch the active one."""
        if self.keeps_rounds and not self.evaluates():
            self._rounds.setdefault(id(loader), collections.deque()).append(loader.current_round)
        if self.active is not loader and self._follows_draws and loader in self._loaders:
            self._loaders.sort(key=lambda other: other is loader)
            self.active = loader

    def take_round(self) -> None:
        """With `keeps_rounds`, find the round of a new micro-batch.

        It belongs to the first batch drawn that has had none, even when a loop that reads ahead has made its last draw;
        or, in a loop that cuts a batch, to the same batch as the micro-batch before.
        """
        active = self.active
        if active is not None:
            waiting = self._rounds.get(id(active))
        else:
            waiting = next((rounds for rounds in self._rounds.values() if rounds), None)
        if waiting:
            self.micro_batch_round = waiting.popleft()
        elif active is None:
            self.micro_batch_round = None

    def awaits_micro_batch(self, loader: ActiveLoader) -> bool:
        """Return True if a batch of this loop is known to have had no micro-batch yet."""
        return bool(self._rounds.get(id(loader)))

    def note_micro_batch(self, active: ActiveLoader) -> int:
        """Note what the loaders have drawn since the last micro-batch; return the number of the active's batches."""
        num_drawn, token = active.num_drawn, active.iteration_token
        newly = num_drawn - self._draws.get(token, NO_DRAWS)[0]
        if len(self._loaders) == 1:  # As nearly always: what follows costs 2 µs.
            self._draws = {token: (num_drawn, 0)}
            return int(newly)
        draws: dict[object, tuple[int, int]] = {}
        for loader in self.loaders:
            before, in_a_row = self._draws.get(loader.iteration_token, NO_DRAWS)
            is_next = loader.num_drawn == before + 1
            draws[loader.iteration_token] = loader.num_drawn, in_a_row + 1 if is_next else 0
        self._draws = draws
        return int(newly)

    def in_step(self, loader: ActiveLoader) -> list[ActiveLoader]:
        """Return the other loaders that are iterated beside this one, as `zip` does: each micro-batch draws from them.

        The loop around another loop draws one batch for several micro-batches of the inner one.
        """
        others = [other for other in self.loaders if other is not loader]
        return [other for other in others if self._draws.get(other.iteration_token, NO_DRAWS)[1] >= IN_STEP]

    def is_at_end(self, loader: ActiveLoader | None) -> bool:
        """Return True if a loader is at its last batch, or another one that is iterated beside it, as by `zip`."""
        if loader is None or loader.end_of_dataloader:
            return loader is not None
        if len(self._loaders) < 2 or not self._follows_draws:
            return False
        return any(other.end_of_dataloader for other in self.in_step(loader))

    @property
    def loaders(self) -> list[ActiveLoader]:
        """All loaders that are being iterated, the oldest first."""
        return list(self._loaders)

    def __reduce__(self) -> tuple[Callable[[], ActiveLoaders], tuple[()]]:
        # Loaders at work stay where they are, and so does the safepoint; the owner's copy claims its loaders again.
        return functools.partial(ActiveLoaders, follows_draws=self._follows_draws), ()
