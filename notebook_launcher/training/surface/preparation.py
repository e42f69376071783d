"""What `prepare` makes of models, optimizers, schedulers, loaders and leaf tensors."""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils.data import DataLoader

from notebook_launcher.training import precision
from notebook_launcher.training.accumulation.ddp import wrap
from notebook_launcher.training.accumulation.member_kinds import synchronises_itself
from notebook_launcher.training.accumulation.optimizer import AcceleratedOptimizer
from notebook_launcher.training.accumulation.scheduler import AcceleratedScheduler
from notebook_launcher.training.data import DataLoaderDispatcher, DataLoaderShard, prepare_data_loader
from notebook_launcher.training.unwrapping import synced_part

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.training.accumulation.members import Members
    from notebook_launcher.training.accumulation.updates import Updates
    from notebook_launcher.training.plugins import DataLoaderConfiguration, DistributedDataParallelKwargs
    from notebook_launcher.training.rules import Rules

__all__ = ["PreparationMethods"]


class PreparationMethods:
    """`prepare`, and what it does with each kind of object."""

    _rules: ClassVar[Rules]
    _members: Members
    _updates: Updates
    _optimizers: list[AcceleratedOptimizer]
    _schedulers: list[AcceleratedScheduler]
    _dataloaders: list[Any]
    _prepared: dict[int, tuple[Any, Any]]
    device_placement: bool
    dataloader_config: DataLoaderConfiguration
    ddp_handler: DistributedDataParallelKwargs
    dynamo_backend: str | None
    gradient_state: Any
    rng_types: list[str]
    step_scheduler_with_optimizer: bool
    # Properties of the Accelerator.
    device: Any
    mixed_precision: Any
    native_amp: Any
    num_processes: Any
    process_index: Any
    rank_check: Any
    split_batches: Any

    @property
    def _models(self) -> list[Any]:
        return self._members.models

    @property
    def _leaves(self) -> list[torch.Tensor]:
        return [leaf.tensor for leaf in self._members.leaves]

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Make objects fit for training on all ranks.

        Args:
            args: Models, optimizers, data loaders, schedulers and leaf tensors that require grad, in any order.
                Anything else comes back as it is.
            device_placement: For each object, whether it is moved to the device.

        Returns:
            The prepared objects in the same order; one for one.
        """
        placements: list[bool | None] = [None] * len(args) if device_placement is None else list(device_placement)
        if len(placements) != len(args):
            raise ValueError(f"device_placement has {len(placements)} entries for {len(args)} objects.")
        first = [self._prepare_one(one, placed) for one, placed in zip(args, placements, strict=True)]
        # Schedulers last: they follow the optimizers that are prepared by now.
        result = tuple(self.prepare_scheduler(one) if _is_scheduler(one) else one for one in first)
        return result[0] if len(result) == 1 else result

    def _prepare_one(self, one: Any, placed: bool | None) -> Any:  # noqa: FBT001
        if isinstance(one, DataLoader):
            return self.prepare_data_loader(one, device_placement=placed)
        if isinstance(one, torch.nn.Module):
            return self.prepare_model(one, device_placement=placed)
        if isinstance(one, torch.optim.Optimizer):
            return self.prepare_optimizer(one, device_placement=placed)
        if isinstance(one, torch.Tensor) and one.requires_grad and one.is_leaf and self._rules.sync_leaf_tensors:
            return self._prepare_leaf(one, self.device_placement if placed is None else placed)
        return one

    def prepare_model(
        self,
        model: Any,
        device_placement: bool | None = None,  # noqa: FBT001 - Accelerate's signature
        evaluation_mode: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        """Move a model to the device, let it compute in mixed precision and synchronise its gradients.

        Args:
            model: A module. One that `fully_shard` was applied to, or that is DistributedDataParallel, is only noted.
            device_placement: None: the Accelerator's.
            evaluation_mode: Whether the model is only evaluated, so that it has no gradients to synchronise.
        """
        known = self._known(model)
        if known is not None:
            return known
        original = model
        place = self.device_placement if device_placement is None else device_placement
        computes_in = self.mixed_precision if self.native_amp else "no"
        synced = synced_part(model)
        replicated = isinstance(synced, torch.nn.parallel.DistributedDataParallel)
        precision.compute_in(synced.module if replicated else model, self.device.type, computes_in)
        ready_made = replicated or synchronises_itself(model)
        if place and not ready_made and getattr(model, "hf_device_map", None) is None:
            model = model.to(self.device)
        trains = any(parameter.requires_grad for parameter in model.parameters())
        if self.num_processes > 1 and trains and not evaluation_mode and not ready_made:
            model = wrap(model, self.device, self.ddp_handler)
            model.notes.compares = self.rank_check is not None
        if self.dynamo_backend not in (None, "no") and not hasattr(model, "_orig_mod"):
            model = torch.compile(model, backend=self.dynamo_backend)
        self._members.add_model(model)
        self._remember(original, model)
        return model

    def _prepare_leaf(self, tensor: torch.Tensor, place: bool) -> torch.Tensor:  # noqa: FBT001
        if any(leaf.tensor is tensor for leaf in self._members.leaves):
            return tensor
        if place and tensor.device != self.device:
            # In place, so that an optimizer that has the tensor still has it.
            tensor.data = tensor.data.to(self.device)
        if self.num_processes > 1:
            torch.distributed.broadcast(tensor.data, src=0)
        self._members.add_leaf(tensor)
        return tensor

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> AcceleratedOptimizer:  # noqa: FBT001
        """Make an optimizer step only where a window ends."""
        del device_placement  # its state follows its parameters
        if isinstance(optimizer, AcceleratedOptimizer) and self._known(optimizer) is None:
            optimizer = optimizer.optimizer  # prepared by another Accelerator, whose windows are not these
        known: AcceleratedOptimizer | None = self._known(optimizer)
        if known is not None:
            return known
        prepared = AcceleratedOptimizer(optimizer, self._updates)
        self._optimizers.append(prepared)
        self._updates.add(prepared)
        self._members.add_optimizer(optimizer)
        self._remember(optimizer, prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Make a scheduler advance once for each update of its optimizer."""
        if isinstance(scheduler, AcceleratedScheduler) and self._known(scheduler) is None:
            scheduler = scheduler.scheduler
        known: AcceleratedScheduler | None = self._known(scheduler)
        if known is not None:
            return known
        mine = getattr(scheduler, "optimizer", None)
        followed = [one for one in self._optimizers if mine is one or mine is one.optimizer] or self._optimizers
        per_update = self.num_processes if self._rules.scheduler_per_process and not self.split_batches else 1
        prepared = AcceleratedScheduler(
            scheduler,
            followed,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            steps_per_update=per_update,
            gradient_state=self.gradient_state,
        )
        self._schedulers.append(prepared)
        self._remember(scheduler, prepared)
        return prepared

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,  # noqa: FBT001 - Accelerate's signature
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Share a loader's data out among the ranks.

        Args:
            data_loader: A `torch.utils.data.DataLoader`.
            device_placement: Whether its batches are moved to the device; None: the Accelerator's.
            slice_fn_for_dispatch: Where rank 0 reads for all, what cuts a rank's part out of a batch.
        """
        known = self._known(data_loader)
        if known is not None:
            return known
        place = self.device_placement if device_placement is None else device_placement
        prepared = self._adopt_data_loader(data_loader, place)
        if prepared is None:
            prepared = self._share_out(data_loader, place, slice_fn_for_dispatch)
        prepared.stack.gradient_state = weakref.ref(self.gradient_state)
        self._dataloaders.append(prepared)
        self._remember(data_loader, prepared)
        return prepared

    def _adopt_data_loader(self, data_loader: Any, place: bool) -> Any:  # noqa: FBT001
        """Return a loader that was shared out before, for another Accelerator; None for any other."""
        if not isinstance(data_loader, (DataLoaderShard, DataLoaderDispatcher)):
            return None
        if data_loader.num_processes == 1 < self.num_processes:
            return None  # from a process that was alone: it has everything
        if data_loader.num_processes != self.num_processes:
            raise ValueError(
                f"prepare() got a loader that was prepared for {data_loader.num_processes} processes, but this run "
                f"has {self.num_processes}: a share of a share would miss samples. Prepare the original DataLoader."
            )
        adopted = copy.copy(data_loader)
        adopted.stack = self.gradient_state.stack
        adopted.device = self.device if place else data_loader.device
        return adopted

    def _share_out(self, data_loader: Any, place: bool, slice_fn_for_dispatch: Callable[..., Any] | None) -> Any:  # noqa: FBT001
        config = self.dataloader_config
        return prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self.num_processes,
            process_index=self.process_index,
            split_batches=config.split_batches,
            put_on_device=place,
            rng_types=list(self.rng_types),
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            uneven=config.uneven or ("weigh" if self._rules.weigh_uneven else "leave"),
            stack=self.gradient_state.stack,
            check_ranks=self._rules.guards,
        )

    def _known(self, one: Any) -> Any:
        """Return what `one` was prepared to before, or `one` if it is prepared itself."""
        found = self._prepared.get(id(one))
        # In an Accelerator that was pickled, an id can be another object's.
        return found[1] if found is not None and found[0] is one else None

    def _remember(self, original: Any, prepared: Any) -> None:
        # The originals are held so that their ids stay theirs.
        self._prepared[id(original)] = original, prepared
        self._prepared[id(prepared)] = prepared, prepared
        if prepared is not original:
            prepared._is_accelerate_prepared = True  # noqa: SLF001 - Accelerate's mark, which libraries look for


def _is_scheduler(one: Any) -> bool:
    return isinstance(one, (torch.optim.lr_scheduler.LRScheduler, AcceleratedScheduler))
