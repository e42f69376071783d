"""The state of accumulation: the settings, the windows, and the loaders that are being iterated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from notebook_launcher.settings.option_checks import DEFAULT_STEPS, accumulation_steps
from notebook_launcher.training.accumulation.members import ends_window
from notebook_launcher.training.accumulation.windows import LeftOutBatch, LoopNotes, Window
from notebook_launcher.training.data.active_loaders import ActiveLoaders

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from notebook_launcher.training.accumulation.member_kinds import Member
    from notebook_launcher.training.accumulation.micro_batches import MicroBatchBlock
    from notebook_launcher.training.plugins import GradientAccumulationPlugin, Rules
    from notebook_launcher.training.requests import Safepoint


# --------------------------------------------------------------------------------------------------------------------
# The state of accumulation by the names of Accelerate's `GradientState`.


class AccelerateNames:
    """The properties of Accelerate's `GradientState`, for code that asks it; the base of `GradientState`."""

    active_loaders: ActiveLoaders
    """The loaders that are being iterated."""
    num_steps: int
    """Micro-batches per update."""
    plugin: GradientAccumulationPlugin
    """The settings of accumulation."""

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


class Abandoned(NamedTuple):
    """A window that was left before its end."""

    window: Window
    """The window, which is reset already."""
    num_steps: int
    """Micro-batches of a full window."""
    num_batches: int
    """Micro-batches that it held."""


class GradientState(AccelerateNames):
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
        self._num_steps = accumulation_steps("gradient_accumulation_steps", steps)

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

    def enter(self, window: Window, probes: Sequence[torch.Tensor | None]) -> Sequence[Abandoned]:
        """Begin a micro-batch, before its block becomes `block`; return the windows whose gradients must be dropped.

        Args:
            window: The window that the micro-batch belongs to.
            probes: The parameters whose versions show that weights were changed inside the window.
        """
        if self.block is not None and self._rules.guards:
            self._check_outer_blocks(window)
        loader, loops = self.active_loaders.active, self.loops
        iteration = None if loader is None else loader.iteration_token
        with_loader = self.plugin.sync_with_dataloader
        may_differ = with_loader and self._num_steps > 1
        if loader is None:
            loops.is_out_of_step = may_differ and (loops.was_read_ahead or window.iteration is not None)
        else:
            loops.is_out_of_step = may_differ and not window.take_batch(iteration, loader.num_drawn)
            if self.active_loaders.note_micro_batch(loader) > 1:
                loops.left_out = LeftOutBatch(iteration, was_begun=False, was_last=False)
        if not with_loader:
            self.active_loaders.take_round()
        abandoned: Sequence[Abandoned] = ()
        # Calls that have nothing to do are left out here: a tenth of a microsecond each, in every micro-batch.
        is_continued = not window.num_batches or iteration is window.iteration
        if len(self.windows) > 1 or window.is_broken or not is_continued:
            abandoned = self._abandoned(window, iteration)
            if window.num_batches == 0:
                self._check_alone(window)
        window.begin_micro_batch(self._num_steps, iteration, probes)
        loops.num_blocks += 1
        # A number of steps that is set inside a window holds from the next one on.
        num_steps = self._num_steps if self._rules.nominal_divisor else window.num_steps
        is_last = with_loader and self.active_loaders.is_at_end(loader)
        self.sync_gradients = ends_window(window.num_batches, num_steps, is_last=is_last)
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
        for other in self.windows.values():
            is_open = other.num_batches > 0 or other.is_broken
            if (
                is_open
                and self._is_abandoned(other, iteration)
                and (other is window or other.shares_parameters(window))
            ):
                abandoned.append(Abandoned(other, other.num_steps, other.num_batches))
                other.drop()
        return abandoned

    def _check_alone(self, window: Window) -> None:
        """Raise ValueError if a window that is open gathers gradients of the same parameters."""
        for other in self.windows.values():
            if other.num_backwards and other is not window and window.shares_parameters(other):
                raise ValueError(
                    f"accumulate({_names(window)}): the window of accumulate({_names(other)}) is open, with "
                    f"{other.num_batches} of {other.num_steps} micro-batches, and both train some of the same "
                    "parameters: their gradients would mix. Pass the same models to each accumulate() of a loop."
                )

    def _is_abandoned(self, window: Window, iteration: object | None) -> bool:
        """Return True if the open window was left: a micro-batch of this loader iteration does not continue it."""
        if self._rules.keep_abandoned:
            return False
        return window.is_broken or (
            window.iteration is not None and iteration is not window.iteration and self._is_over(window)
        )

    def leave(self, block: MicroBatchBlock, *, failed: bool) -> bool:
        """Close a block and end its micro-batch; return False if its window cannot end: the loader is exhausted.

        A micro-batch that failed before its backward does not count.
        """
        self.block, window = block.outer, block.window
        if window.backwards_in_block == 0:
            was_last = (self.sync_gradients or window.is_deferred) and not failed
            self.loops.left_out = LeftOutBatch(window.iteration, was_begun=True, was_last=was_last)
        if failed and window.backwards_in_block == 0:
            window.drop_micro_batch()
        elif window.is_deferred or (window.backwards_in_block == 0 and self.lacks_end(window)):
            return window.extend(is_exhausted=self.end_of_dataloader and self.plugin.sync_with_dataloader)
        elif failed and self.sync_gradients:
            window.break_off()
        elif self.sync_gradients:
            window.reset()
        return True

    def lacks_end(self, window: Window | None) -> bool:
        """Return True if the last micro-batch of a window has had no backward yet, though earlier ones had."""
        if window is None or not self.sync_gradients or self._rules.nominal_divisor:
            return False
        return window.num_backwards > 0 and window.backwards_in_block == 0

    def put_off(self, window: Window) -> None:
        """Put the update of a window off, because its last micro-batch was left out; schedulers wait, too."""
        window.put_off()
        self.sync_gradients = False

    def given_unit_by(self, measure: Callable[[], float]) -> float:
        """Return the unit of weights given by hand; `measure` finds it, once."""
        if self.given_unit is None:
            self.given_unit = measure()
        return self.given_unit

    @property
    def has_left_window(self) -> bool:
        """True if a window is open whose loop has ended, for example by a break."""
        last = self._last
        if not self._rules.guards or last is None or last.iteration is None:
            return False
        return last.num_batches > 0 and self._is_over(last)

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
        return any(window.num_batches and not window.has_stepped for window in self.windows.values())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for window in self.windows.values():
            window.renew_ids()
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
            if window.num_batches and not window.has_stepped
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

    def __repr__(self) -> str:
        return (
            f"GradientState(sync_gradients={self.sync_gradients}, num_steps={self.num_steps}, "
            f"end_of_dataloader={self.end_of_dataloader})"
        )


def _names(window: Window) -> str:
    return ", ".join(member.describe() for member in window.members)
