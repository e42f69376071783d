"""The Accelerator: prepares models, optimizers, schedulers and loaders, and accumulates exactly."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import gc
import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from notebook_launcher import context, reporting
from notebook_launcher.pictures import Rates
from notebook_launcher.training import checkpoints, device_memory, operations, precision, resolving, unwrapping
from notebook_launcher.training.accumulation.joining import join_uneven_inputs
from notebook_launcher.training.accumulation.members import Members, sync_next, without_sync
from notebook_launcher.training.accumulation.micro_batches import MicroBatches
from notebook_launcher.training.accumulation.updates import LiveOptimizers, Updates
from notebook_launcher.training.accumulation.verify import check_accumulation
from notebook_launcher.training.accumulation.weighing import Weighing
from notebook_launcher.training.accumulation.windows import GradientState
from notebook_launcher.training.checkpoints.loading import load_state
from notebook_launcher.training.checkpoints.models import gather_state_dict
from notebook_launcher.training.checkpoints.objects import check_custom_objects
from notebook_launcher.training.checkpoints.saving import StatefulObjects, save_state
from notebook_launcher.training.data.metrics import gather_for_metrics
from notebook_launcher.training.data.prepare import skip_first_batches
from notebook_launcher.training.parallelism.mesh import Layout, make_layout
from notebook_launcher.training.parallelism.sharded_models import Replacements, Sharding
from notebook_launcher.training.plugins import (
    EXACT,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    Rules,
    check_instance,
    check_keywords,
    check_switch,
    pick_handlers,
)
from notebook_launcher.training.preparation import Preparation, Prepared, register_hook
from notebook_launcher.training.process.process_state import AcceleratorState
from notebook_launcher.training.random import draw_alike
from notebook_launcher.training.rank_check.check import RankCheck
from notebook_launcher.training.recording.phases import make_clock
from notebook_launcher.training.recording.profiling import build_profiler
from notebook_launcher.training.recording.trackers import Trackers
from notebook_launcher.training.requests import Steering, make_fence, make_safepoint
from notebook_launcher.training.resolving import Settings
from notebook_launcher.training.user_warnings import Warner
from notebook_launcher.wording import class_name

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.hooks import RemovableHandle

    from notebook_launcher.training.accumulation.updates import AcceleratedOptimizer, AcceleratedScheduler
    from notebook_launcher.training.accumulation.verify import AccumulationReport
    from notebook_launcher.training.parallelism.deepspeed import DeepSpeedPlugin
    from notebook_launcher.training.parallelism.fsdp_plugin import FullyShardedDataParallelPlugin
    from notebook_launcher.training.parallelism.mesh import ParallelismConfig
    from notebook_launcher.training.requests import Safepoint

SAVE_KEYWORDS = ("tag", "client_state", "save_latest", "exclude_frozen_parameters")
"""What Accelerate's `save_state` passes on to DeepSpeed's `save_checkpoint`."""
LOAD_KEYWORDS = (
    *("strict", "assign", "map_location", "tag", "custom_load_fn"),
    *("load_module_strict", "load_optimizer_states", "load_lr_scheduler_states", "load_module_only"),
)
"""What `load_state` takes for `load_state_dict`, and what Accelerate's passes on to DeepSpeed's `load_checkpoint`."""

HANDLERS = (AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs, ProfileKwargs)
UNSUPPORTED_ARGUMENTS = {
    "deepspeed_plugins": "one DeepSpeedPlugin serves all models: pass it as deepspeed_plugin=.",
    "torch_tp_plugin": "pass parallelism_config=ParallelismConfig(tp_size=2), for 2 ranks that share a layer.",
    "megatron_lm_plugin": "Megatron-LM is not supported. To shard, pass parallelism_config=ParallelismConfig(...).",
    "dynamo_plugin": "pass dynamo_backend='inductor', or compile the model with torch.compile(model).",
}
"""Accelerate's arguments that have no counterpart, and what to write instead."""


def _setting(name: str, doc: str, check: Callable[[Any], Any] | None = None) -> Any:
    """Return a property that shows one of the settings; what is set holds for objects that are prepared afterwards."""

    def show(accelerator: Accelerator) -> Any:
        return getattr(accelerator._preparation.settings, name)  # noqa: SLF001

    def change(accelerator: Accelerator, value: Any) -> None:
        checked = value if check is None else check(value)
        part = accelerator._preparation  # noqa: SLF001
        part.settings = dataclasses.replace(part.settings, **{name: checked})

    return property(show, change, doc=doc)


def _shown(path: str, doc: str = "", *, settable: bool = False) -> Any:
    """Return a property that shows an attribute of one of the parts, and sets it if `settable`."""
    part, _, name = path.rpartition(".")

    def change(accelerator: Accelerator, value: Any) -> None:
        setattr(operator.attrgetter(part)(accelerator), name, value)

    return property(operator.attrgetter(path), change if settable else None, doc=doc or None)


class Accelerator:
    """Distributed training with exact gradient accumulation, by Hugging Face Accelerate's names.

        accelerator = Accelerator(gradient_accumulation_steps=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = loss_function(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    The gradient of an update is the gradient of the mean loss over all samples of the window, on all ranks.
    In a rank of a launch the run's settings are adopted; an argument wins, and the difference is reported.
    Accelerators share nothing: a second one in the same process is independent of the first.

    A new Accelerator resolves all settings, and joins the process group, if any.

    Args:
        device_placement: True if models and batches are moved to `accelerator.device`.
        split_batches: True if each rank gets a slice of every batch; shortcut for `dataloader_config`.
        mixed_precision: `"no"`, `"fp16"` or `"bf16"`. None: the launch's, then `ACCELERATE_MIXED_PRECISION`.
        gradient_accumulation_steps: Micro-batches per update. None: the launch's, then
            `ACCELERATE_GRADIENT_ACCUMULATION_STEPS`, then 1.
        cpu: Compute on the CPU, though there is a GPU.
        dataloader_config: Settings of prepared loaders.
        gradient_accumulation_plugin: Settings of accumulation in full.
        deepspeed_plugin: Carry out DeepSpeed's settings by torch: ZeRO, batch sizes, clipping, precision.
        fsdp_plugin: Share each model out among the ranks, with these settings.
        parallelism_config: The number of ranks that share a model out, and of its replicas. None: the launch's
            `shard`; with `fsdp_plugin` alone, all ranks share each model out.
        max_grad_norm: Clip each optimizer's gradients to this total norm before its update. None: the launch's.
        even_batches: Shortcut for `dataloader_config`.
        dispatch_batches: Shortcut for `dataloader_config`.
        use_seedable_sampler: Shortcut for `dataloader_config`.
        rng_types: Generators that are made equal on all ranks at the start of each epoch: `"torch"`, `"cuda"`,
            `"generator"` (the sampler's). None: `["generator"]`.
        step_scheduler_with_optimizer: False: each `step()` of a scheduler advances it.
        kwargs_handlers: `DistributedDataParallelKwargs`, `GradScalerKwargs` and so on, one of each.
        log_with: Trackers: names such as `"wandb"`, `"mlflow"` or `"tensorboard"`, classes, instances, or `"all"`.
        project_dir: The folder for checkpoints and logs.
        project_config: Folder and naming of checkpoints and logs in full.
        dynamo_backend: Compile prepared models with this backend of `torch.compile`. None: by
            `ACCELERATE_DYNAMO_BACKEND`, else nothing is compiled.
        check_ranks: True if ranks compare their weights at updates 1, 2, 4, 8 and so on and at `save_state`, and
            raise an error where they differ. None: the launch's, which is True.
        unsupported: Accelerate's arguments without a counterpart; each is refused by its name.

    Raises:
        ValueError: A setting is invalid; the message lists the valid values.
        TypeError: An argument does not exist, or has a value of another type.
    """

    _rules: ClassVar[Rules] = EXACT

    # Other ways to parallelise: questions of ported code, and a no to each.
    fp8_enabled = has_fp8_handler = has_lomo_optimizer = False
    fp8_backend = None
    pipeline_parallel_rank = context_parallel_rank = 0
    flag_tensor: torch.Tensor | None = None
    """This rank's flag, where `set_trigger` has raised it; see `check_trigger`."""

    def __init__(
        self,
        device_placement: bool = True,  # the order is Accelerate's
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        *,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        deepspeed_plugin: DeepSpeedPlugin | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        parallelism_config: ParallelismConfig | None = None,
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
        _refuse(unsupported)
        check_switch("cpu", cpu)
        handlers = pick_handlers(kwargs_handlers, HANDLERS)
        given = Settings(
            rules=self._rules,
            mixed_precision=mixed_precision,
            accumulation=resolving.given_accumulation(gradient_accumulation_steps, gradient_accumulation_plugin),
            max_grad_norm=max_grad_norm,
            check_ranks=check_ranks,
            loaders=resolving.resolve_loaders(
                dataloader_config,
                split_batches=split_batches,
                even_batches=even_batches,
                dispatch_batches=dispatch_batches,
                use_seedable_sampler=use_seedable_sampler,
            ),
            device_placement=device_placement,
            rng_types=resolving.resolve_rng_types(rng_types),
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            dynamo_backend=dynamo_backend,
            project=resolving.resolve_project(project_config, project_dir),
            ddp=handlers.get(DistributedDataParallelKwargs) or DistributedDataParallelKwargs(),
            scaler=handlers.get(GradScalerKwargs),
            autocast=handlers.get(AutocastKwargs) or AutocastKwargs(),
            group=handlers.get(InitProcessGroupKwargs) or InitProcessGroupKwargs(),
            profile=handlers.get(ProfileKwargs),
            deepspeed_plugin=deepspeed_plugin,
            fsdp_plugin=fsdp_plugin,
            parallelism_config=parallelism_config,
        )
        settings = resolving.resolve(given, resolve_precision=self._resolve_precision)
        self.state = self._make_accelerator_state(settings, cpu=cpu)
        draw_alike()  # Data are split before `prepare`, with the same numbers on all ranks.
        self._layout = lay_out(settings, self.state)
        self._make_parts(settings, log_with)
        if settings.conflicts:
            context.notify(f"Accelerator(): {'; '.join(settings.conflicts)}. The code wins.")
        if settings.zero is not None:
            context.notify(f"Accelerator(): {settings.zero.describe()}")

    def _make_parts(self, settings: Settings, log_with: Any) -> None:
        """Make the parts in the order in which they need each other: each gets its collaborators in its constructor."""
        process, rules, warn_once = self.state, settings.rules, Warner()
        safepoint = self._safepoint = make_safepoint(process)
        state = self.gradient_state = self._make_gradient_state(settings.accumulation, safepoint)
        members = Members(num_processes=process.num_processes, strict=rules.guards)
        state.loops.models = members.models
        self._prepared = Prepared(members)
        optimizers, replacements = LiveOptimizers(), Replacements()
        scaler, scales = None, process.device.type != "cpu" or rules.fp16_on_cpu
        if process.mixed_precision == "fp16" and scales and settings.scaler is not None and settings.scaler.enabled:
            scaler = torch.amp.GradScaler(process.device.type, **settings.scaler.to_kwargs())
        self.rank_check = None
        """Compares the ranks' weights now and then; None with one process, and where it is switched off."""
        if settings.check_ranks and process.num_processes > 1:
            self.rank_check = RankCheck(
                members,
                optimizers,
                state,
                rank=process.process_index,
                num_processes=process.num_processes,
                fence=make_fence(process.device, process.num_processes),
            )
        shared: dict[str, Any] = {"gradient_state": state, "members": members, "rules": rules, "scaler": scaler}
        weighing = Weighing(
            **shared, optimizers=optimizers, warn_once=warn_once, device=process.device, layout=self._layout
        )
        self._micro_batches = MicroBatches(
            **shared,
            weighing=weighing,
            num_processes=process.num_processes,
            clock=make_clock(),
            safepoint=safepoint,
            rank_check=self.rank_check,
            warn_once=warn_once,
        )
        self._updates = Updates(
            **shared,
            optimizers=optimizers,
            weighing=weighing,
            rank_check=self.rank_check,
            warn_once=warn_once,
            num_processes=process.num_processes,
            max_grad_norm=settings.max_grad_norm,
            note_step=self._micro_batches.note_step,
            present=replacements.present,
        )
        self._preparation = Preparation(
            process=process,
            prepared=self._prepared,
            updates=self._updates,
            gradient_state=state,
            settings=settings,
            sharding=Sharding(
                layout=self._layout,
                device=process.device,
                computes_in=precision.forward_precision(process.mixed_precision, scaler),
                replacements=replacements,
            ),
        )
        self.project_configuration = settings.project
        """Folder and naming of checkpoints and logs."""
        self._trackers = Trackers(
            process,
            log_with,
            settings.project.logging_dir,
            observe=self._updates.observe,
            skip_missing=rules.skip_missing_trackers,
        )
        self._steering = Steering(self._prepared, self._updates, state)
        if safepoint is not None:
            safepoint.connect(self._steering, self._save_update)

    # Settings.

    mixed_precision: str = _shown(
        "state.mixed_precision", 'Precision of the forward pass: `"no"`, `"fp16"` or `"bf16"`.'
    )
    is_fsdp2: bool = _shown(
        "_layout.shards",
        "True if prepared models are sharded; models that `fully_shard` was applied to beforehand do not count.",
    )

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The sizes of the mesh of ranks; None where every rank has the whole model."""
        return None if self._layout.mesh is None else self._layout.sizes

    torch_device_mesh: DeviceMesh | None = _shown(
        "_layout.mesh", "The mesh of ranks, its outermost dimension first; None where every rank has the whole model."
    )
    is_composable_parallelism_enabled: bool = _shown("_layout.shards", "True if prepared models are sharded.")

    @property
    def native_amp(self) -> bool:
        """True if the forward computes in half precision."""
        return precision.forward_precision(self.mixed_precision, self.scaler) != "no"

    scaler: torch.amp.GradScaler | None = _shown(
        "_micro_batches.scaler", "The scaler of fp16 losses; None in other precisions."
    )
    gradient_accumulation_steps: int = _shown(
        "gradient_state.num_steps",
        "Micro-batches per update; a new value holds from the next window on.",
        settable=True,
    )
    sync_gradients: bool = _shown(
        "gradient_state.sync_gradients",
        "True if the current micro-batch is the last of its window, so that optimizers step.",
        settable=True,
    )
    max_grad_norm: float | None = _shown(
        "_updates.max_grad_norm", "The norm that gradients are clipped to before each update."
    )
    last_grad_norm: torch.Tensor | None = _shown(
        "_updates.last_grad_norm", "The total norm of the gradients before they were last clipped."
    )

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if the last step of any prepared optimizer was skipped for an overflow."""
        return any(optimizer.step_was_skipped for optimizer in self._prepared.optimizers)

    @property
    def step(self) -> int:
        """Micro-batches in the window that is open."""
        window = self.gradient_state.current
        return 0 if window is None else window.num_begun

    device_placement: bool = _setting("device_placement", "True if models and batches are moved to the device.")
    ddp_handler: DistributedDataParallelKwargs = _setting("ddp", "Arguments of DistributedDataParallel.")
    autocast_handler: AutocastKwargs = _setting("autocast", "Arguments of `torch.autocast`.")
    init_handler: InitProcessGroupKwargs = _setting("group", "Arguments of `init_process_group`.")
    profile_handler: ProfileKwargs | None = _setting("profile", "Arguments of `profile`.")
    scaler_handler: GradScalerKwargs | None = _setting("scaler", "Arguments of the scaler of fp16 losses.")
    deepspeed_plugin: DeepSpeedPlugin | None = _setting("deepspeed_plugin", "DeepSpeed's settings.")
    dataloader_config: DataLoaderConfiguration = _setting(
        "loaders", "Settings of prepared loaders.", resolving.resolve_loaders
    )
    dynamo_backend: str | None = _setting(
        "dynamo_backend",
        "The backend of `torch.compile` that prepared models are compiled with.",
        resolving.resolve_backend,
    )
    rng_types: list[str] = _setting(
        "rng_types",
        "Generators that are made equal on all ranks at the start of each epoch.",
        resolving.resolve_rng_types,
    )
    step_scheduler_with_optimizer: bool = _setting(
        "step_scheduler_with_optimizer", "False: each `step()` of a scheduler advances it."
    )

    split_batches: bool = _shown("dataloader_config.split_batches", "True if each rank gets a slice of every batch.")
    dispatch_batches: bool | None = _shown(
        "dataloader_config.dispatch_batches", "True if rank 0 reads for all ranks; None: for iterable data sets."
    )
    even_batches: bool = _shown(
        "dataloader_config.even_batches",
        "True if the last round is filled with samples from the start of the epoch.",
        settable=True,
    )
    use_seedable_sampler: bool = _shown(
        "dataloader_config.use_seedable_sampler", "True if the order of samples depends on seed and epoch alone."
    )
    use_stateful_dataloader: bool = _shown("dataloader_config.use_stateful_dataloader", "The setting as given.")
    non_blocking: bool = _shown(
        "dataloader_config.non_blocking", "True if batches are copied to the GPU beside the computation."
    )
    # Preparing.

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects for training on all ranks.

        In a launch, each rank draws random numbers of its own from then on, as for dropout, unless your code has seeded
        torch; before, all ranks draw the same ones. So split data before.

        Args:
            args: Models, optimizers, data loaders, schedulers and leaf tensors that require grad, in any order.
                Anything else comes back as it is.
            device_placement: For each object, whether it is moved to the device.

        Returns:
            The prepared objects in the same order; one for one.
        """
        return self._preparation.prepare(*args, preparer=self, device_placement=device_placement)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Move a model to the device, let it compute in mixed precision and synchronise its gradients.

        Args:
            model: A module. One that `fully_shard` was applied to, or that is DistributedDataParallel, is only noted.
            device_placement: None: the Accelerator's.
            evaluation_mode: True if the model is only evaluated, so that it has no gradients to synchronise.
        """
        return self._preparation.prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> AcceleratedOptimizer:  # noqa: ARG002
        """Make an optimizer step only where a window ends.

        Args:
            optimizer: An optimizer of torch.
            device_placement: Accepted and without effect: the state follows the parameters to their device.
        """
        return self._preparation.prepare_optimizer(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Make a scheduler advance once for each update of its optimizer."""
        return self._preparation.prepare_scheduler(scheduler)

    def preview(self, scheduler: Any, updates: int | None = None, *, group: int = 0) -> Rates:
        """Return the learning rates of the coming updates, without a step of the scheduler or of its optimizer.

        The rates are counted in updates, as a prepared scheduler steps: eight micro-batches that are accumulated are
        one of them. Works before `prepare` and after it, in the notebook and in ranks. A cell shows the list as a
        curve, and in a run the monitor shows it among the pictures, as `rates ahead`.

        Args:
            scheduler: A scheduler of torch, prepared or not.
            updates: Number of updates; None: as many as the scheduler is made for (`total_steps`, `T_max`,
                `total_iters`), else 100.
            group: The optimizer's parameter group.

        Raises:
            TypeError: The rates of this scheduler cannot be known before the training.
            ValueError: The number of updates or the group cannot be.
        """
        rates = Rates(self._preparation.preview(scheduler, updates, group))
        rates.first_update = 1 + (reporting.updates_so_far() or 0)
        if self.is_main_process:
            reporting.report_values({f"rates ahead, group {group}" if group else "rates ahead": rates})
        return rates

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Give each rank its part of a loader's data.

        Args:
            data_loader: A `torch.utils.data.DataLoader`.
            device_placement: True if its batches are moved to the device; None: the Accelerator's.
            slice_fn_for_dispatch: Cuts a rank's part out of a batch, where rank 0 reads for all.
        """
        return self._preparation.prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)

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
            RuntimeError: The block is inside another one that trains the same parameters.
        """
        return self._micro_batches.block(models)

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        """Let gradients accumulate on each rank by itself; put forward and backward inside.

        Raises:
            ValueError: Nothing in the model was prepared.
        """
        members = self._prepared.members.inside(model)
        if not members and self._rules.guards:
            raise ValueError(
                f"no_sync({class_name(model)}): nothing in it was prepared. Pass the model that prepare() returned."
            )
        return without_sync(members)

    def trigger_sync_in_backward(self, model: Any) -> AbstractContextManager[None]:
        """Let the next backward synchronise all gathered gradients, though its forward ran under `no_sync`."""
        return sync_next(self._prepared.members.inside(model))

    def backward(self, loss: torch.Tensor, weight: Any = None, *, reduction: str = "mean", **kwargs: Any) -> None:
        """Compute gradients; at the end of a window they are the gradients of the mean loss over the whole window.

        In a launch, a line names the first loss that is NaN or infinite, with its rank, update and batch. On a GPU that
        would wait for the loss, so there only a loss that is given to `report` is looked at.

        Args:
            loss: A tensor of one element, on any rank: the mean over this micro-batch.
            weight: Number of samples or tokens that the mean is over. All ranks' weights are added up, once for each
                window. None: the number of samples that the prepared loader counted, or 1. Must be given in every
                micro-batch of a window or in none. A tensor on the GPU stays there; a negative one makes NaN there.
            reduction: `"sum"` if the loss is a sum over `weight`, and not a mean.
            kwargs: For `torch.Tensor.backward`, such as `retain_graph`.

        Raises:
            ValueError: The loss has more than one element, or only some micro-batches of the window have a weight.
        """
        if self._micro_batches.scaler is not None:
            self._updates.scaling.update()
        self._micro_batches.backward(loss, weight, reduction, kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Undo the scaling of fp16 gradients, of one optimizer, a list, or all; once for each update."""
        self._updates.scaling.unscale_given(optimizer)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor | None:
        """Clip gradients to a total norm where a window ends; inside one nothing happens.

        Args:
            parameters: Parameters, or a model for all of its own.
            max_norm: The norm, 0 or more.
            norm_type: As of `torch.nn.utils.clip_grad_norm_`.

        Returns:
            The norm before, a tensor of one element; None inside a window.
        """
        return self._updates.clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element of the gradients to `[-clip_value, clip_value]` where a window ends."""
        self._updates.clip_value(parameters, clip_value)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """Compute in the Accelerator's precision outside of a prepared model, a loss for instance."""
        check_instance("autocast_handler", autocast_handler, AutocastKwargs, "AutocastKwargs(enabled=False)")
        kwargs = autocast_handler or self.autocast_handler
        return precision.autocast(self.device, self.mixed_precision if self.native_amp else "no", kwargs)

    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Let ranks with more batches continue after others have run out (torch's `Join`).

        Args:
            joinables: Models that `prepare` returned.
            even_batches: Overrides the setting of the prepared loaders inside the block.

        Raises:
            ValueError: Ranks would run out inside a window of several micro-batches.
        """
        return join_uneven_inputs(
            joinables,
            self._prepared.loaders,
            even_batches=even_batches,
            default=self.even_batches,
            num_processes=self.num_processes,
            num_steps=self.gradient_accumulation_steps if self._rules.guards else 1,
        )

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader that begins `num_batches` later, once."""
        skipping = skip_first_batches(dataloader, num_batches)
        if hasattr(skipping, "active_loaders"):
            skipping.active_loaders = self.gradient_state.active_loaders
        return skipping

    def check_accumulation(
        self, model: Any, batches: Iterable[Any], loss_function: Callable[..., torch.Tensor], **options: Any
    ) -> AccumulationReport:
        """Compare accumulated gradients with the gradients of the full batch; see `verify.check_accumulation`."""
        return check_accumulation(self, model, batches, loss_function, **options)

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Return the model that `prepare` was given.

        Args:
            model: As `prepare` returned it.
            keep_fp32_wrapper: True if its forward stays in mixed precision; False to pickle it.
            keep_torch_compile: True if a compiled model stays compiled.
        """
        return unwrapping.unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Release everything prepared, and `objects`; return a None for each of these, to assign to their names."""
        self._prepared.clear()
        self._updates.clear()
        self.gradient_state.forget_windows()
        self._micro_batches.forget_blocks()
        released = device_memory.release_memory(*objects)
        gc.collect()
        return list(released)

    clear = free_memory

    # Processes.

    distributed_type: DistributedType = _shown(
        "state.distributed_type", "The way in which processes work together: `NO`, `MULTI_CPU` or `MULTI_GPU`."
    )
    num_processes: int = _shown("state.num_processes", "Number of processes that train together.")
    process_index: int = _shown("state.process_index", "This process's rank.")
    local_process_index: int = _shown("state.local_process_index", "This process's rank on its machine.")
    device: torch.device = _shown("state.device", "The device that this process computes on.")
    is_main_process: bool = _shown("state.is_main_process", "True on rank 0.")
    is_local_main_process: bool = _shown("state.is_local_main_process", "True on the first rank of each machine.")
    is_last_process: bool = _shown("state.is_last_process", "True on the last rank.")
    use_distributed: bool = _shown("state.use_distributed", "True if more than one process trains.")

    @property
    def multi_device(self) -> bool:
        """True if several processes have a GPU each."""
        return self.use_distributed and self.device.type != "cpu"

    data_parallel_rank: int = _shown(
        "_layout.data_rank", "This rank's number among the ranks that read different data."
    )

    @property
    def data_parallel_shard_rank(self) -> int:
        """This rank's number among the ranks that share one model out; 0 if models are not sharded."""
        return self._layout.rank_in("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """This rank's number among the ranks that split one model's tensors; 0 without tensor parallelism."""
        return self._layout.rank_in("tp")

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Make a function do nothing on every rank but the first."""
        return self.state.on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Make a function do nothing on every rank but the first of each machine."""
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: Callable[..., Any]) -> Any:
        """Make a function do nothing on every rank but the last."""
        return self.state.on_last_process(function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Make a function do nothing on every rank but one."""
        return self.state.on_process(function, process_index=process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Make a function do nothing on every rank but one of each machine."""
        return self.state.on_local_process(function, local_process_index=local_process_index)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let rank 0 go through the block before the others."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let each machine's first rank go through the block before the others."""
        return self.state.local_main_process_first()

    def wait_for_everyone(self) -> None:
        """Wait until all ranks are here."""
        self.state.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on each machine's first rank."""
        self.state.print(*args, **kwargs)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """Give each rank its part of a list, tuple, dictionary or tensor, as `with ... as part:`."""
        return self.state.split_between_processes(inputs, apply_padding=apply_padding)

    def set_trigger(self) -> None:
        """Raise this rank's flag; see `check_trigger`."""
        self.flag_tensor = torch.ones(1, device=self.device)

    def check_trigger(self) -> bool:
        """Return True if any rank has raised its flag, and lower all flags; every rank must call this."""
        flag = torch.zeros(1, device=self.device) if self.flag_tensor is None else self.flag_tensor
        self.flag_tensor = None
        return bool(operations.reduce(flag, reduction="sum").item() > 0)

    # Collectives.

    def gather(self, tensor: Any) -> Any:
        """Return all ranks' tensors, one after the other along dimension 0, on every rank."""
        return operations.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather per-batch results so that every sample of the data set counts once.

        Args:
            input_data: Results of the active loader's batch: tensors with a row for each sample, or objects.
            use_gather_object: True if `input_data` is a list of objects, to be gathered into one list.

        Returns:
            The same structure. Rows of samples that were only there to even ranks out are left out. What has
            no row for each sample, such as a mean loss, is gathered as it is.
        """
        loader = self.gradient_state.active_dataloader
        copies = self._layout.sizes.non_data_parallel_size
        return gather_for_metrics(input_data, loader, use_gather_object=use_gather_object, copies=copies)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the `"sum"`, `"mean"` or `"max"` over ranks, times `scale`, on every rank."""
        return operations.reduce(tensor, reduction=reduction, scale=scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad dimension `dim` to the longest of all ranks with `pad_index`, so that `gather` can be called."""
        return operations.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Return one rank's tensors on every rank."""
        return operations.broadcast(tensor, from_process=from_process)

    # Checkpoints.

    project_dir: str | None = _shown("project_configuration.project_dir", "The folder of the project.")
    logging_dir: str | None = _shown("project_configuration.logging_dir", "The folder that trackers write to.")
    save_iteration: int = _shown(
        "project_configuration.iteration", "The number of the next automatically named checkpoint."
    )
    should_save_model: bool = _shown(
        "state.is_local_main_process",
        "True on the rank of each machine that writes models, for code that writes them itself.",
    )

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object to a file, once, and whole or not at all."""
        on_each_node = bool(self.project_configuration.save_on_each_node)
        checkpoints.save(obj, f, save_on_each_node=on_each_node, safe_serialization=safe_serialization)

    def save_model(
        self,
        model: Any,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights under Hugging Face's file names.

        Args:
            model: As `prepare` returned it, or not.
            save_directory: The folder.
            max_shard_size: Largest size of a file, in bytes or as `"200MB"`; a larger tensor gets a file of its own.
            safe_serialization: safetensors; False: `torch.save`.
        """
        with context.activity(context.SAVING):
            checkpoints.save_model(unwrapping.unwrap_model(model), save_directory, max_shard_size, safe_serialization)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        state_dict_type: str | None = None,
        **save_model_func_kwargs: Any,
    ) -> Any:
        """Write everything that training needs to continue; a crash at any moment leaves a whole checkpoint.

        Every rank must call it.

        Args:
            output_dir: The folder; None: the next one by `ProjectConfiguration(automatic_checkpoint_naming=True)`.
            safe_serialization: Models as safetensors; False: by `torch.save`.
            state_dict_type: Layout of sharded models and their optimizers: `"FULL_STATE_DICT"`, whole tensors that
                pass through rank 0 one at a time, or `"SHARDED_STATE_DICT"`, a file for each rank. Both load with any
                number of ranks. None: the layout of `fsdp_plugin`, else whole up to 10 GB.
            save_model_func_kwargs: Those of DeepSpeed's `save_checkpoint`, accepted and without effect.

        Returns:
            The folder.

        Raises:
            TypeError: An argument is unknown.
        """
        own = ("output_dir", "safe_serialization", "state_dict_type")
        check_keywords("save_state()", save_model_func_kwargs, (*own, *SAVE_KEYWORDS))
        if state_dict_type is None and self._layout.plugin is not None:
            state_dict_type = self._layout.plugin.checkpoint_layout
        with context.activity(context.SAVING):
            folder = save_state(
                self._stateful_objects(),
                self.state,
                self.project_configuration,
                output_dir,
                safe=safe_serialization,
                rank_check=self.rank_check,
                state_dict_type=state_dict_type,
            )
            context.note_checkpoint(str(folder), is_writer=self.is_main_process)
            return folder

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> Any:
        """Load what `save_state` wrote, also with another number of ranks; everything is checked first.

        Every rank must call it.

        Args:
            input_dir: The folder; None: the newest by automatic naming. In a run with `resume="checkpoint"` None is the
                newest that this run has saved, and nothing before the first.
            load_kwargs: For the loading of objects that `register_for_checkpointing` was given.
            load_model_func_kwargs: For `load_state_dict` of the models.

        Returns:
            The folder; None if nothing was to be loaded.

        Raises:
            TypeError: An argument is unknown.
        """
        check_keywords("load_state()", load_model_func_kwargs, ("input_dir", "load_kwargs", *LOAD_KEYWORDS))
        return load_state(
            self._stateful_objects(),
            self.state,
            self.project_configuration,
            input_dir,
            load_kwargs,
            saved=context.saved_checkpoints(),
            **load_model_func_kwargs,
        )

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these objects too.

        Where an object's state differs between ranks, each rank's is saved, and loaded by the same rank. Loaded with
        fewer ranks, those of the others are left out; with more, the new ranks begin with rank 0's. A line says so.

        Raises:
            ValueError: An object lacks `state_dict` or `load_state_dict`; the message lists which.
        """
        check_custom_objects(objects)
        self._prepared.custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` before models are saved; it may remove weights and save them."""
        return register_hook(self._prepared.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call `hook(models, input_dir)` before models are loaded; it may remove models that it loads itself."""
        return register_hook(self._prepared.load_hooks, hook)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """Return a prepared model's weights, by the names that the model itself gives them.

        Of a sharded model every rank must call it: rank 0 gets all weights on the CPU, and the others an empty dict.

        Args:
            model: As `prepare` returned it, or not.
            unwrap: False: names and wrappers stay as they are.
        """
        bare = unwrapping.unwrap_model(model, keep_torch_compile=False) if unwrap else model
        return gather_state_dict(bare)

    # Metrics and profiles.

    trackers: list[Any] = _shown("_trackers.trackers", "The trackers that `init_trackers` started.")
    log_with: list[Any] = _shown("_trackers.log_with", "The classes and instances that `log_with` named.")

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Start the trackers that `log_with` names.

        Args:
            project_name: The name of the run.
            config: Hyperparameters to store with it.
            init_kwargs: Arguments for each tracker by its name.
        """
        self._trackers.init_trackers(project_name, config, init_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name, with `unwrap` its client's object; off the main process, one that does nothing."""
        return self._trackers.get_tracker(name, unwrap=unwrap)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Log metrics to all trackers and, from every rank, to the launcher's live view.

        The view also gets `learning_rate`, and `grad_norm` where gradients are clipped, unless they are among them.
        """
        self._trackers.log(values, step, log_kwargs or {})

    def log_images(self, values: dict[str, Any], step: int | None = None) -> None:
        """Log images, by name one or a list, to the trackers that take images, and to the launcher's live view.

        An image is an array of shape (H, W, C), a tensor of shape (C, H, W), an image of Pillow or a figure.
        """
        self._trackers.log_images(values, step)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Log a table, as `columns` and rows of `data` or as a frame of pandas, to the run and the trackers.

        The main process's table is shown in the monitor and in the run's picture, and kept as CSV in the run's folder.
        Of the trackers `"jsonl"` writes a CSV file beside its metrics, `"tensorboard"` a text; aim, dvclive, swanlab
        and trackio take none.

        Raises:
            ValueError: There is no table, or a row does not fit the columns.
        """
        self._trackers.log_table(table_name, columns, data, dataframe, step)

    def end_training(self) -> None:
        """Finish all trackers. The process group stays, because the process that made it ends it."""
        self._trackers.end_training()

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """Profile a block with `torch.profiler`, as `with accelerator.profile() as prof:`."""
        check_instance("profile_handler", profile_handler, ProfileKwargs, "ProfileKwargs(record_shapes=True)")
        return build_profiler(profile_handler or self.profile_handler or ProfileKwargs())

    def maybe_context_parallel(self, *_arguments: Any, **_named: Any) -> AbstractContextManager[None]:
        """Do nothing, as in Accelerate where context parallelism is off; here it always is."""
        return contextlib.nullcontext()

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return True if a part of the model lies on several devices by a `device_map`, and so cannot be trained."""
        return any(len(getattr(module, "hf_device_map", ())) > 1 for module in model.modules())

    def _save_update(self, number: int) -> Any:
        """Save after the update with this number, as the launcher asks, and return the folder."""
        project = self.project_configuration
        if project.automatic_checkpoint_naming and project.project_dir:
            return self.save_state()
        return self.save_state(Path(project.project_dir or ".") / "checkpoints" / f"update_{number}")

    def _stateful_objects(self) -> StatefulObjects:
        """Return what is prepared at this moment."""
        prepared = self._prepared
        return StatefulObjects(
            prepared=prepared,
            models=[unwrapping.unwrap_model(model, keep_torch_compile=False) for model in prepared.models],
            scaler=self._updates.scaling.update(),
            gradient_state=self.gradient_state,
            safepoint=self._safepoint,
            rules=self._rules,
        )

    # Parts that `compat` replaces.

    _resolve_precision = staticmethod(resolving.resolve_precision)

    def _make_accelerator_state(self, settings: Settings, *, cpu: bool) -> AcceleratorState:
        group, chosen = settings.group, settings.mixed_precision or "no"
        return AcceleratorState(cpu=cpu, backend=group.backend, timeout=group.timeout, mixed_precision=chosen)

    def _make_gradient_state(self, plugin: GradientAccumulationPlugin, requests: Safepoint | None) -> GradientState:
        return GradientState(plugin, self._rules, requests)

    # Accelerate's names for the lists, which ported code reads.

    _models: list[Any] = _shown("_prepared.models")
    _optimizers: list[Any] = _shown("_prepared.optimizers")
    _schedulers: list[Any] = _shown("_prepared.schedulers")
    _dataloaders: list[Any] = _shown("_prepared.loaders")
    _custom_objects: list[Any] = _shown("_prepared.custom_objects")

    def __repr__(self) -> str:
        return (
            f"Accelerator(rank {self.process_index} of {self.num_processes} on {self.device}, "
            f"mixed_precision={self.mixed_precision!r}, "
            f"gradient_accumulation_steps={self.gradient_accumulation_steps}; "
            "gradients are means over all that a window held)"
        )


def _refuse(unsupported: dict[str, Any]) -> None:
    for name, value in unsupported.items():
        if name not in UNSUPPORTED_ARGUMENTS:
            known = [*Accelerator.__init__.__annotations__, *UNSUPPORTED_ARGUMENTS]
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]}=?" if close else "help(Accelerator) lists the arguments."
            raise TypeError(f"Accelerator() has no argument {name}=. {hint}")
        if value is not None:
            raise ValueError(f"Accelerator({name}=...): {UNSUPPORTED_ARGUMENTS[name]}")


def lay_out(settings: Settings, process: AcceleratorState) -> Layout:
    """Make the mesh of ranks that the settings ask for, and note it in `process`.

    Raises:
        ValueError: The number of ranks does not fit the sizes, or the device cannot compute in the precision.
    """
    resolving.check_precision(settings.mixed_precision or "no", process.device)
    if settings.zero is not None:
        process.deepspeed_plugin = settings.deepspeed_plugin
    layout = make_layout(
        settings.parallelism_config,
        settings.fsdp_plugin,
        launched=settings.shard,
        num_processes=process.num_processes,
        process_index=process.process_index,
        device=process.device,
    )
    if layout.shards:
        process.distributed_type, process.is_fsdp2 = DistributedType.FSDP, True
        process.fsdp_plugin, process.parallelism_config = layout.plugin, layout.sizes
        if layout.plugin is not None and layout.plugin.dropped:
            context.notify(
                f"FullyShardedDataParallelPlugin: without effect: {', '.join(layout.plugin.dropped)}. Torch's FSDP2 "
                "shards the models, and does that by itself."
            )
    return layout
