"""The Accelerator: prepares models, optimizers, schedulers and loaders, and accumulates exactly."""

from __future__ import annotations

import collections
import difflib
import gc
import os
from typing import TYPE_CHECKING, Any, ClassVar

from notebook_launcher.training import device_memory, precision, resolving, unwrapping
from notebook_launcher.training.accumulation import synchronisation
from notebook_launcher.training.accumulation.backward import Accumulation
from notebook_launcher.training.accumulation.joining import join_uneven_inputs
from notebook_launcher.training.accumulation.members import Members
from notebook_launcher.training.accumulation.updates import Updates
from notebook_launcher.training.accumulation.verify import check_accumulation
from notebook_launcher.training.accumulation.windows import GradientState
from notebook_launcher.training.data import (
    skip_first_batches,
)
from notebook_launcher.training.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    pick_handlers,
)
from notebook_launcher.training.process.accelerator_state import AcceleratorState
from notebook_launcher.training.rank_check.check import RankCheck
from notebook_launcher.training.recording import phases
from notebook_launcher.training.recording.trackers import Trackers
from notebook_launcher.training.rules import EXACT, Rules
from notebook_launcher.training.safepoint import make_safepoint
from notebook_launcher.training.surface.collectives import CollectiveMethods
from notebook_launcher.training.surface.loaders import LoaderSettings, loader_config
from notebook_launcher.training.surface.parallelism import ParallelismMethods
from notebook_launcher.training.surface.preparation import PreparationMethods
from notebook_launcher.training.surface.processes import ProcessMethods
from notebook_launcher.training.surface.records import RecordMethods
from notebook_launcher.training.surface.saving import SavingMethods

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    import torch

    from notebook_launcher.training.accumulation.optimizer import AcceleratedOptimizer
    from notebook_launcher.training.accumulation.scheduler import AcceleratedScheduler
    from notebook_launcher.training.accumulation.verify import AccumulationReport

__all__ = ["Accelerator"]

HANDLERS = (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
ELSEWHERE = {
    "deepspeed_plugin": "DeepSpeed",
    "deepspeed_plugins": "DeepSpeed",
    "fsdp_plugin": "FSDP (apply torch's fully_shard to the model, then prepare model and optimizer)",
    "torch_tp_plugin": "tensor parallelism",
    "megatron_lm_plugin": "Megatron-LM",
    "parallelism_config": "other parallelism than data parallelism",
    "dynamo_plugin": "a dynamo plugin (pass dynamo_backend=, or compile the model yourself)",
}
"""Accelerate's arguments that have no counterpart, and what they are for."""


class Accelerator(
    PreparationMethods,
    LoaderSettings,
    ProcessMethods,
    CollectiveMethods,
    SavingMethods,
    RecordMethods,
    ParallelismMethods,
):
    """Data-parallel training with exact gradient accumulation, by Hugging Face Accelerate's names.

        accelerator = Accelerator(gradient_accumulation_steps=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = loss_function(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    The gradient of an update is that of the mean loss over all samples that the window saw on all ranks.
    In a rank of a launch the run's settings are adopted; an argument wins, and the difference is said.
    Accelerators share nothing: a second one in the same process is independent of the first.
    """

    _rules: ClassVar[Rules] = EXACT

    def __init__(
        self,
        device_placement: bool = True,  # noqa: FBT001, FBT002 - the order is Accelerate's
        split_batches: bool | None = None,  # noqa: FBT001
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,  # noqa: FBT001, FBT002
        dataloader_config: DataLoaderConfiguration | None = None,
        *,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        max_grad_norm: float | None = None,
        even_batches: bool | None = None,
        dispatch_batches: bool | None = None,
        use_seedable_sampler: bool | None = None,
        rng_types: list[str] | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Iterable[Any] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        dynamo_backend: str | None = None,
        check_ranks: bool | None = None,
        **unsupported: Any,
    ) -> None:
        """Settle everything; the process group is joined if there is one to join.

        Args:
            device_placement: Whether models and batches are moved to `accelerator.device`.
            split_batches: Whether each rank gets a slice of every batch; shortcut for `dataloader_config`.
            mixed_precision: `"no"`, `"fp16"` or `"bf16"`. None: the launch's, then `ACCELERATE_MIXED_PRECISION`.
            gradient_accumulation_steps: Micro-batches per update. None: the launch's, then
                `ACCELERATE_GRADIENT_ACCUMULATION_STEPS`, then 1.
            cpu: Compute on the CPU, though there is a GPU.
            dataloader_config: How data are shared out.
            gradient_accumulation_plugin: More about accumulation than its steps.
            max_grad_norm: Clip gradients to this total norm before each update. None: the launch's.
            even_batches: Shortcut for `dataloader_config`.
            dispatch_batches: Shortcut for `dataloader_config`.
            use_seedable_sampler: Shortcut for `dataloader_config`.
            rng_types: Generators that are made equal on all ranks at the start of each epoch: `"torch"`, `"cuda"`,
                `"generator"` (the sampler's). None: the last.
            step_scheduler_with_optimizer: False: each `step()` of a scheduler advances it.
            kwargs_handlers: `DistributedDataParallelKwargs`, `GradScalerKwargs` and so on, one of each.
            log_with: Trackers: names, classes, instances, or `"all"`.
            project_dir: Where checkpoints and logs go.
            project_config: More about that.
            dynamo_backend: Compile prepared models with this backend of `torch.compile`.
            check_ranks: Whether ranks compare their weights at updates 1, 2, 4, 8 and so on and at `save_state`, and
                raise an error where they differ. None: the launch's, which is True.
            unsupported: Refused by name.

        Raises:
            ValueError: A setting that cannot work; the message has the valid ones.
            TypeError: An argument that does not exist.
        """
        _refuse(unsupported)
        conflicts: list[str] = []
        handlers = pick_handlers(kwargs_handlers, HANDLERS)
        self.autocast_handler: AutocastKwargs = handlers.get(AutocastKwargs) or AutocastKwargs()
        self.ddp_handler = resolving.resolve_hook(handlers.get(DistributedDataParallelKwargs), conflicts)
        self.scaler_handler: GradScalerKwargs = handlers.get(GradScalerKwargs) or GradScalerKwargs()
        self.init_handler: InitProcessGroupKwargs = handlers.get(InitProcessGroupKwargs) or InitProcessGroupKwargs()
        self.profile_handler: ProfileKwargs | None = handlers.get(ProfileKwargs)
        chosen_precision = self._resolve_precision(mixed_precision, conflicts)
        plugin = resolving.resolve_accumulation(
            gradient_accumulation_steps, gradient_accumulation_plugin, self._rules, conflicts
        )
        max_grad_norm = resolving.resolve_max_grad_norm(max_grad_norm, conflicts)
        checks = resolving.resolve_check(check_ranks, self._rules, conflicts)
        self.dataloader_config = loader_config(
            dataloader_config,
            split_batches=split_batches,
            even_batches=even_batches,
            dispatch_batches=dispatch_batches,
            use_seedable_sampler=use_seedable_sampler,
        )
        self.project_configuration = project_config or ProjectConfiguration(project_dir=_path(project_dir))
        if project_dir is not None and self.project_configuration.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        self.device_placement = device_placement
        self.rng_types = ["generator"] if rng_types is None else list(rng_types)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.dynamo_backend = dynamo_backend

        self.state = self._make_state(chosen_precision, cpu=cpu)
        resolving.check_precision(chosen_precision, self.state.device)
        self.gradient_state = self._make_gradient_state(plugin)
        self._members = Members(num_processes=self.num_processes, strict=self._rules.guards)
        self._accumulation = Accumulation(
            self.gradient_state, self._members, self._rules, rank=self.process_index, num_processes=self.num_processes
        )
        self._accumulation.device = self.device
        self._accumulation.clock = phases.make_clock()
        self._accumulation.scaler = self._make_scaler()
        self._accumulation.safepoint = safepoint = make_safepoint(self)
        self.gradient_state.stack.on_next = None if safepoint is None else safepoint.act
        self._updates = Updates(
            self._accumulation, self._rules, num_processes=self.num_processes, max_grad_norm=max_grad_norm
        )
        self._accumulation.check = self._make_rank_check() if checks and self.num_processes > 1 else None
        self._optimizers: list[AcceleratedOptimizer] = []
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[Any] = []
        self._custom_objects: list[Any] = []
        self._save_hooks: collections.OrderedDict[int, Callable[..., Any]] = collections.OrderedDict()
        self._load_hooks: collections.OrderedDict[int, Callable[..., Any]] = collections.OrderedDict()
        self._prepared: dict[int, tuple[Any, Any]] = {}
        self._trackers = Trackers(
            self.state, log_with, self.project_configuration.logging_dir, observe=self._updates.observe
        )
        resolving.report_conflicts(conflicts)

    @property
    def rank_check(self) -> RankCheck | None:
        """What compares the ranks' weights now and then; None with one process, and where it is switched off."""
        return self._accumulation.check

    def _make_rank_check(self) -> RankCheck:
        rank, num_processes = self.process_index, self.num_processes
        return RankCheck(self._members, self._updates, self.gradient_state, rank=rank, num_processes=num_processes)

    def _resolve_precision(self, argument: str | None, conflicts: list[str]) -> str:
        return resolving.resolve_precision(argument, conflicts)

    def _make_state(self, precision: str, *, cpu: bool) -> AcceleratorState:
        handler = self.init_handler
        return AcceleratorState(cpu=cpu, backend=handler.backend, timeout=handler.timeout, mixed_precision=precision)

    def _make_gradient_state(self, plugin: GradientAccumulationPlugin) -> GradientState:
        return GradientState(plugin, self._rules)

    # Settings.

    @property
    def mixed_precision(self) -> str:
        """What the forward pass computes in."""
        return self.state.mixed_precision

    @property
    def native_amp(self) -> bool:
        """Whether that is a half precision."""
        return self.mixed_precision != "no" and (self.scaler is not None or self.mixed_precision == "bf16")

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """What scales fp16 losses; None in other precisions."""
        self._updates.update_scaler() if hasattr(self, "_updates") else None
        return self._accumulation.scaler

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update; a new value holds from the next window on."""
        return int(self.gradient_state.num_steps)

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.gradient_state.num_steps = resolving.whole_number("gradient_accumulation_steps", steps)

    @property
    def sync_gradients(self) -> bool:
        """Whether the micro-batch at hand is the last of its window, so that optimizers step."""
        return bool(self.gradient_state.sync_gradients)

    @sync_gradients.setter
    def sync_gradients(self, sync: bool) -> None:
        self.gradient_state.sync_gradients = sync

    @property
    def max_grad_norm(self) -> float | None:
        """The norm that gradients are clipped to before each update."""
        return self._updates.max_grad_norm

    @property
    def last_grad_norm(self) -> torch.Tensor | None:
        """The total norm of the gradients before they were last clipped."""
        return self._updates.last_grad_norm

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any prepared optimizer was left out for an overflow."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @property
    def step(self) -> int:
        """Micro-batches in the window that is open."""
        window = self.gradient_state.current
        return 0 if window is None else window.num_batches

    # Training.

    def accumulate(self, *models: Any) -> AbstractContextManager[None]:
        """Compute one micro-batch of a window: put forward, backward and step inside.

        Gradients are synchronised in the window's last micro-batch alone: every `gradient_accumulation_steps`
        of them, and where the loader ends. Prepared optimizers and schedulers step there.

        Args:
            models: The models or leaf tensors that are trained in this block; none: everything prepared. Anything that
                holds their parameters will do: a compiled or containing module, `model.module`, the name from before
                `prepare`, a list. Each set of models has windows of its own.

        Raises:
            ValueError: Nothing in an argument was prepared, or a window of other models that share parameters is open.
            TypeError: An argument has no parameters.
        """
        return self._accumulation.block(models)

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        """Let gradients accumulate on each rank by itself; put forward and backward inside."""
        return synchronisation.without_sync(self._members.inside(model))

    def trigger_sync_in_backward(self, model: Any) -> AbstractContextManager[None]:
        """Let the next backward synchronise all that was gathered, though its forward ran under `no_sync`."""
        return synchronisation.sync_next(self._members.inside(model))

    def backward(self, loss: torch.Tensor, weight: Any = None, *, reduction: str = "mean", **kwargs: Any) -> None:
        """Compute gradients; at the end of a window they are those of the mean loss over all of it.

        Args:
            loss: A tensor of one element, on any rank: the mean over this micro-batch.
            weight: How many samples or tokens that mean is over. All ranks' weights are added up, once for each
                window. None: the number of samples that the prepared loader counted, or 1. Must be given in every
                micro-batch of a window or in none.
            reduction: `"sum"` if the loss is a sum over `weight`, and not a mean.
            kwargs: For `torch.Tensor.backward`, such as `retain_graph`.

        Raises:
            ValueError: The loss has more than one element, or the weights of a window do not go together.
        """
        if self._accumulation.scaler is not None:
            self._updates.update_scaler()
        self._accumulation.backward(loss, weight, reduction, kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Undo the scaling of fp16 gradients, of one optimizer, a list, or all; once for each update."""
        chosen = self._optimizers if optimizer is None else optimizer
        self._updates.unscale(chosen if isinstance(chosen, (list, tuple)) else [chosen])

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor | None:
        """Clip gradients to a total norm where a window ends; inside one nothing happens.

        Returns:
            The norm before, a tensor of one element; None inside a window.
        """
        return self._updates.clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element of the gradients to `[-clip_value, clip_value]` where a window ends."""
        self._updates.clip_value(parameters, clip_value)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """Compute in the Accelerator's precision outside of a prepared model, a loss for instance."""
        kwargs = autocast_handler or self.autocast_handler
        return precision.autocast(self.device, self.mixed_precision if self.native_amp else "no", kwargs)

    def join_uneven_inputs(
        self,
        joinables: list[Any],
        even_batches: bool | None = None,  # noqa: FBT001 - Accelerate's signature
    ) -> AbstractContextManager[None]:
        """Let ranks with more batches go on after others have run out (torch's `Join`).

        Args:
            joinables: Models that `prepare` returned.
            even_batches: Overrides that of the prepared loaders inside.
        """
        return join_uneven_inputs(self, joinables, even_batches)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader that begins `num_batches` later, once."""
        skipping = skip_first_batches(dataloader, num_batches)
        if hasattr(skipping, "stack"):
            skipping.stack = self.gradient_state.stack
        return skipping

    def check_accumulation(
        self, model: Any, batches: Iterable[Any], loss_function: Callable[..., torch.Tensor], **options: Any
    ) -> AccumulationReport:
        """Compare accumulated gradients with those of the full batch; see `verify.check_accumulation`."""
        return check_accumulation(self, model, batches, loss_function, **options)

    def unwrap_model(
        self,
        model: Any,
        keep_fp32_wrapper: bool = True,  # noqa: FBT001, FBT002 - Accelerate's signature
        keep_torch_compile: bool = True,  # noqa: FBT001, FBT002
    ) -> Any:
        """Return the model that `prepare` was given.

        Args:
            model: As `prepare` returned it.
            keep_fp32_wrapper: Whether its forward stays in mixed precision; False to pickle it.
            keep_torch_compile: Whether a compiled model stays compiled.
        """
        return unwrapping.unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Let go of everything prepared and of `objects`; returns a None for each, to assign to their names."""
        self._members.clear()
        self._accumulation.clear()
        self._updates.clear()
        self._optimizers.clear()
        self._schedulers.clear()
        self._dataloaders.clear()
        self._prepared.clear()
        self.gradient_state.forget_windows()
        released = device_memory.release_memory(*objects)
        gc.collect()
        return list(released)

    clear = free_memory

    def _make_scaler(self) -> torch.amp.GradScaler | None:
        if self.mixed_precision != "fp16" or (self.device.type == "cpu" and not self._rules.fp16_on_cpu):
            return None
        if not self.scaler_handler.enabled:
            return None
        return precision.make_scaler(self.device, self.scaler_handler)

    def __repr__(self) -> str:
        return (
            f"Accelerator(rank {self.process_index} of {self.num_processes} on {self.device}, "
            f"mixed_precision={self.mixed_precision!r}, "
            f"gradient_accumulation_steps={self.gradient_accumulation_steps}; "
            "gradients are means over all that a window held)"
        )


def _path(directory: str | os.PathLike[str] | None) -> str | None:
    return None if directory is None else os.fspath(directory)


def _refuse(unsupported: dict[str, Any]) -> None:
    for name, value in unsupported.items():
        if name not in ELSEWHERE:
            known = [*Accelerator.__init__.__annotations__, *ELSEWHERE]
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]}=?" if close else ""
            raise TypeError(f"Accelerator() has no argument {name}=.{hint}")
        if value is not None:
            raise ValueError(f"Accelerator({name}=...): {ELSEWHERE[name]} is not supported; data parallelism is.")
