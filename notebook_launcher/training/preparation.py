"""Preparation of models, optimizers, schedulers, loaders and leaf tensors for training on all ranks."""

from __future__ import annotations

import collections
import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from notebook_launcher.training import precision
from notebook_launcher.training.accumulation.members import synchronises_itself, wrap
from notebook_launcher.training.accumulation.updates import AcceleratedOptimizer, AcceleratedScheduler, preview
from notebook_launcher.training.data.dispatching import DataLoaderDispatcher
from notebook_launcher.training.data.prepare import prepare_data_loader
from notebook_launcher.training.data.shard import DataLoaderShard
from notebook_launcher.training.operations.checking import collective_device
from notebook_launcher.training.parallelism.sharded_models import reduce_units_by_sums
from notebook_launcher.training.parallelism.unit_order import UnitOrder
from notebook_launcher.training.plugins import check_switch
from notebook_launcher.training.random import draw_apart
from notebook_launcher.training.unwrapping import synced_part
from notebook_launcher.wording import type_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.training.accelerator import Accelerator
    from notebook_launcher.training.accumulation.members import Members
    from notebook_launcher.training.accumulation.updates import Updates
    from notebook_launcher.training.accumulation.windows import GradientState
    from notebook_launcher.training.parallelism.sharded_models import Sharding
    from notebook_launcher.training.process.process_state import ProcessState
    from notebook_launcher.training.resolving import Settings


@dataclasses.dataclass(kw_only=True)
class Preparation:
    """Prepares objects for training on all ranks, and remembers them in `prepared`.

    Arguments and results are the same as for the Accelerator's methods of the same names.
    """

    process: ProcessState
    prepared: Prepared
    updates: Updates
    gradient_state: GradientState
    settings: Settings
    """The present settings; the Accelerator replaces them where one is set."""
    sharding: Sharding
    _unit_order: UnitOrder | None = dataclasses.field(default=None, init=False)
    """Compares the order in which the ranks run the units of sharded models; None without any."""

    @property
    def _compares(self) -> bool:
        """True if the ranks compare their weights now and then."""
        return bool(self.settings.check_ranks) and self.process.num_processes > 1

    def prepare(self, *args: Any, preparer: Accelerator, device_placement: list[bool] | None = None) -> Any:
        """Carry out `Accelerator.prepare`: `preparer` prepares each object, schedulers after their optimizers."""
        placements = check_placements(device_placement, len(args))
        if self.settings.rules.guards:
            check_objects(args)
        self._check_batch_sizes(args)
        first = [self._prepare_object(obj, preparer, placed) for obj, placed in zip(args, placements, strict=True)]
        result = tuple(preparer.prepare_scheduler(obj) if is_scheduler(obj) else obj for obj in first)
        if self.settings.rules.parts_ranks:  # After the loaders, whose order is drawn from what all ranks share.
            draw_apart(self.sharding.layout.data_rank)
        return result[0] if len(result) == 1 else result

    def _check_batch_sizes(self, args: tuple[Any, ...]) -> None:
        """Raise ValueError for loaders whose batch size differs from DeepSpeed's settings."""
        loaders = [obj for obj in args if isinstance(obj, DataLoader)]
        trains = self.prepared.optimizers or any(isinstance(obj, torch.optim.Optimizer) for obj in args)
        if self.settings.zero is None or not loaders or not trains:
            return
        cut = self.sharding.layout.num_data_ranks if self.settings.loaders.split_batches else 1
        sizes = [getattr(loader, "batch_size", None) for loader in [*self.prepared.loaders, *loaders]]
        self.settings.zero.check_batch_sizes([size // cut for size in sizes if size is not None])

    def _prepare_object(self, obj: Any, preparer: Accelerator, placed: bool | None) -> Any:
        if isinstance(obj, DataLoader):
            return preparer.prepare_data_loader(obj, device_placement=placed)
        if isinstance(obj, torch.nn.Module):
            return preparer.prepare_model(obj, device_placement=placed)
        if isinstance(obj, torch.optim.Optimizer):
            return preparer.prepare_optimizer(obj, device_placement=placed)
        is_trained_leaf = isinstance(obj, torch.Tensor) and obj.requires_grad and obj.is_leaf
        if is_trained_leaf and self.settings.rules.sync_leaf_tensors:
            return self._prepare_leaf(obj, self.settings.device_placement if placed is None else placed)
        return obj

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Carry out `Accelerator.prepare_model`."""
        known = self.prepared.find(model)
        if known is not None:
            return known
        original = model
        place = self.settings.device_placement if device_placement is None else device_placement
        synced = synced_part(model)
        replicated = isinstance(synced, torch.nn.parallel.DistributedDataParallel)
        ready_made = replicated or synchronises_itself(model)
        if self.sharding.layout.shards and not evaluation_mode and not ready_made:
            return self._shard(model)
        if ready_made and not replicated and self.process.device.type == "cpu":
            reduce_units_by_sums(model)
        precision.compute_in(
            synced.module if replicated else model, self.process.device.type, self.sharding.computes_in
        )
        if place and not ready_made and getattr(model, "hf_device_map", None) is None:
            model = model.to(self.process.device)
        trains = any(parameter.requires_grad for parameter in model.parameters())
        if self.process.num_processes > 1 and trains and not evaluation_mode and not ready_made:
            model = wrap(model, self.process.device, self.settings.ddp, compares=self._compares)
        if self.settings.dynamo_backend not in (None, "no") and not hasattr(model, "_orig_mod"):
            model = torch.compile(model, backend=self.settings.dynamo_backend)
        self.prepared.members.add_model(model)
        self.prepared.remember(original, model)
        return model

    def _shard(self, model: torch.nn.Module) -> torch.nn.Module:
        """Share a model out among the ranks, and let optimizers that are prepared already update its shards."""
        # Beside the precision of its units, for buffers in float32: any model that runs whole also runs sharded.
        precision.compute_in(model, self.process.device.type, self.sharding.computes_in)
        for parameter in self.sharding.shard(model, self.settings.ddp, self.settings.dynamo_backend):
            if parameter.requires_grad:
                self.prepared.members.add_leaf(parameter)
        for prepared in self.prepared.optimizers:
            self.sharding.replacements.apply(prepared.optimizer)
        self.prepared.members.add_model(model)
        if self._compares:
            ranks = torch.distributed.get_process_group_ranks(self.sharding.layout.shard_group)
            self._unit_order = self._unit_order or UnitOrder(ranks, lambda: self.updates.steps_made)
            self._unit_order.add(model, reduces_all=self.settings.ddp.find_unused_parameters)
        if self.settings.ddp.broadcast_buffers:
            self.prepared.members.share_buffers(model)
        self.prepared.remember(model, model)
        return model

    def _prepare_leaf(self, tensor: torch.Tensor, place: bool) -> torch.Tensor:
        if any(leaf.tensor is tensor for leaf in self.prepared.members.leaves):
            return tensor
        if place and tensor.device != self.process.device:
            # In place, so that an optimizer that has the tensor still has it.
            tensor.data = tensor.data.to(self.process.device)
        if self.process.num_processes > 1:
            wire = tensor.data if tensor.is_cuda else tensor.data.to(collective_device(tensor.device))
            torch.distributed.broadcast(wire, src=0)
            if wire is not tensor.data:  # NCCL takes nothing from the CPU.
                tensor.data.copy_(wire)
        self.prepared.members.add_leaf(tensor)
        return tensor

    def prepare_optimizer(self, optimizer: Any) -> AcceleratedOptimizer:
        """Carry out `Accelerator.prepare_optimizer`."""
        if isinstance(optimizer, AcceleratedOptimizer) and self.prepared.find(optimizer) is None:
            optimizer = optimizer.optimizer  # prepared by another Accelerator, whose windows are not these
        known: AcceleratedOptimizer | None = self.prepared.find(optimizer)
        if known is not None:
            return known
        self.sharding.replacements.apply(optimizer)
        prepared = AcceleratedOptimizer(optimizer, self.updates)
        self.prepared.optimizers.append(prepared)
        self.updates.optimizers.add(prepared)
        self.prepared.members.add_optimizer(optimizer)
        self.prepared.remember(optimizer, prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Carry out `Accelerator.prepare_scheduler`."""
        if isinstance(scheduler, AcceleratedScheduler) and self.prepared.find(scheduler) is None:
            scheduler = scheduler.scheduler
        if not hasattr(scheduler, "step") or hasattr(scheduler, "param_groups"):
            raise TypeError(f"prepare_scheduler({type(scheduler).__name__}): pass a learning-rate scheduler.")
        known: AcceleratedScheduler | None = self.prepared.find(scheduler)
        if known is not None:
            return known
        mine = getattr(scheduler, "optimizer", None)
        optimizers = self.prepared.optimizers
        followed = [ours for ours in optimizers if mine is ours or mine is ours.optimizer] or optimizers
        prepared = AcceleratedScheduler(
            scheduler,
            followed,
            step_with_optimizer=self.settings.step_scheduler_with_optimizer,
            steps_per_update=self._steps_per_update,
            gradient_state=self.gradient_state,
        )
        self.prepared.schedulers.append(prepared)
        self.prepared.remember(scheduler, prepared)
        return prepared

    @property
    def _steps_per_update(self) -> int:
        """Steps of a prepared scheduler for each update."""
        per_process = self.settings.rules.scheduler_per_process and not self.settings.loaders.split_batches
        return self.sharding.layout.num_data_ranks if per_process else 1

    def preview(self, scheduler: Any, updates: int | None, group: int) -> list[float]:
        """Carry out `Accelerator.preview`."""
        if isinstance(scheduler, AcceleratedScheduler):
            return preview(scheduler.scheduler, updates, group, steps_per_update=scheduler.steps_per_update)
        return preview(scheduler, updates, group, steps_per_update=self._steps_per_update)

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Carry out `Accelerator.prepare_data_loader`."""
        known = self.prepared.find(data_loader)
        if known is not None:
            return known
        place = self.settings.device_placement if device_placement is None else device_placement
        prepared = self._loader_shared_out_before(data_loader, place)
        if prepared is None:
            config, rules, layout = self.settings.loaders, self.settings.rules, self.sharding.layout
            prepared = prepare_data_loader(
                data_loader,
                self.process.device,
                layout.num_data_ranks,
                layout.data_rank,
                put_on_device=place,
                split_batches=config.split_batches,
                dispatch_batches=self._dispatches(),
                even_batches=config.even_batches,
                uneven=config.uneven or ("weigh" if rules.weigh_uneven else "leave"),
                slice_fn_for_dispatch=slice_fn_for_dispatch,
                rng_types=self.settings.rng_types,
                use_seedable_sampler=config.use_seedable_sampler,
                data_seed=config.data_seed,
                non_blocking=config.non_blocking,
                use_stateful_dataloader=config.use_stateful_dataloader,
                check_ranks=rules.guards,
                keeps_shares=rules.keeps_shares,
                stack=self.gradient_state.active_loaders,
            )
        # In `compat`, several states share the loaders, and the one that had them may be gone.
        prepared.active_loaders.belong_to(self.gradient_state)
        self.prepared.loaders.append(prepared)
        self.prepared.remember(data_loader, prepared)
        return prepared

    def _loader_shared_out_before(self, data_loader: Any, place: bool) -> Any:
        """Return a loader that was shared out before, for another Accelerator; None for any other."""
        if not isinstance(data_loader, (DataLoaderShard, DataLoaderDispatcher)):
            return None
        if data_loader.num_processes == 1 < self.sharding.layout.num_data_ranks:
            return None  # from a process that was alone: it has everything
        if data_loader.num_processes != self.sharding.layout.num_data_ranks:
            raise ValueError(
                f"prepare() got a loader that was prepared for {data_loader.num_processes} processes, but this run "
                f"has {self.sharding.layout.num_data_ranks}: a share of a share would miss samples. Prepare the "
                "original DataLoader."
            )
        loader = copy.copy(data_loader)
        loader.active_loaders = self.gradient_state.active_loaders
        loader.device = self.process.device if place else data_loader.device
        return loader

    def _dispatches(self) -> bool | None:
        """Return True if rank 0 reads for all, None to let the kind of data decide."""
        tp_size, asked = self.sharding.layout.sizes.tp_size or 1, self.settings.loaders.dispatch_batches
        if tp_size == 1:
            return asked
        if asked:
            raise ValueError(
                f"dispatch_batches=True with tp_size={tp_size}: rank 0 would give each rank a batch of its own, but "
                "ranks of a group need the same one. Write DataLoaderConfiguration(dispatch_batches=False)."
            )
        return False


# --------------------------------------------------------------------------------------------------------------------
# Checks of the arguments of `Accelerator.prepare`.


_PREPARED_KINDS = (torch.nn.Module, torch.optim.Optimizer, DataLoader)


def check_placements(device_placement: list[bool] | None, number: int) -> list[bool | None]:
    """Return the placement of each object; raise ValueError if their numbers differ."""
    if device_placement is None:
        return [None] * number
    if len(device_placement) != number:
        raise ValueError(
            f"device_placement has {len(device_placement)} entries for {number} objects. Pass True or False for each "
            "object, or omit device_placement."
        )
    for placed in device_placement:
        check_switch("device_placement", placed, or_none=True)
    return list(device_placement)


def check_objects(args: tuple[Any, ...]) -> None:
    """Raise for objects that `prepare` would return unprepared, although they look like objects that it prepares."""
    for obj in args:
        held = list(obj.values()) if isinstance(obj, dict) else obj if isinstance(obj, (list, tuple)) else ()
        found = next((each for each in held if isinstance(each, _PREPARED_KINDS) or is_scheduler(each)), None)
        if found is not None:
            raise TypeError(
                f"prepare() got {type_of(obj)} that holds {type_of(found)}, and would return it unprepared. Pass the "
                "objects one by one: prepare(*objects)."
            )
        if isinstance(obj, torch.Tensor) and obj.requires_grad and not obj.is_leaf:
            raise ValueError(
                f"prepare() got a tensor that was computed ({type(obj.grad_fn).__name__}); gradients gather in leaf "
                "tensors only. Pass the tensor that it was computed from, or tensor.detach().requires_grad_()."
            )


def is_scheduler(obj: Any) -> bool:
    """Return True for a learning-rate scheduler, prepared or not."""
    return isinstance(obj, (torch.optim.lr_scheduler.LRScheduler, AcceleratedScheduler))


# --------------------------------------------------------------------------------------------------------------------
# The registry of an Accelerator: everything that was prepared or registered, in order.


class Prepared:
    """Models, leaf tensors, optimizers, schedulers, loaders, registered objects and hooks of one Accelerator."""

    def __init__(self, members: Members) -> None:
        self.members = members
        """Models and leaf tensors."""
        self.optimizers: list[AcceleratedOptimizer] = []
        self.schedulers: list[AcceleratedScheduler] = []
        self.loaders: list[Any] = []
        self.custom_objects: list[Any] = []
        """Objects that `register_for_checkpointing` was given."""
        self.save_hooks: collections.OrderedDict[int, Callable[..., Any]] = collections.OrderedDict()
        self.load_hooks: collections.OrderedDict[int, Callable[..., Any]] = collections.OrderedDict()
        self._known: dict[int, tuple[Any, Any]] = {}
        """By id: an object, and the result of its preparation. Holding the object keeps its id from another object."""

    @property
    def models(self) -> list[Any]:
        """The models, as `prepare` returned them."""
        return self.members.models

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The leaf tensors."""
        return [leaf.tensor for leaf in self.members.leaves]

    def find(self, obj: Any) -> Any:
        """Return what an object was prepared to before, or the object if it is prepared itself; None otherwise."""
        found = self._known.get(id(obj))
        # In an Accelerator that was pickled, an id can be another object's.
        return found[1] if found is not None and found[0] is obj else None

    def remember(self, original: Any, prepared: Any) -> None:
        """Note the result of an object's preparation."""
        self._known[id(original)] = original, prepared
        self._known[id(prepared)] = prepared, prepared
        if prepared is not original:
            prepared._is_accelerate_prepared = True  # noqa: SLF001 - Accelerate's mark, which libraries look for

    def clear(self) -> None:
        """Release everything that was prepared; registered objects and hooks stay."""
        self.members.clear()
        self.optimizers.clear()
        self.schedulers.clear()
        self.loaders.clear()
        self._known.clear()


def register_hook(hooks: collections.OrderedDict[int, Callable[..., Any]], hook: Callable[..., Any]) -> RemovableHandle:
    """Add a hook, and return the handle that removes it."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
