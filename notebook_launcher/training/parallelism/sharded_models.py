"""The sharding of a model by torch's `fully_shard`: its units, with rank 0's weights, from the inner ones outwards."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_launcher.training.parallelism.initial_weights import (
    broadcast_from_first,
    initialise_on_first,
    materialise,
)
from notebook_launcher.training.parallelism.sums import check_sums, reduce_by_sums
from notebook_launcher.training.parallelism.tensor_parallel import apply_plan
from notebook_launcher.training.parallelism.unit_changes import (
    check_dtypes,
    checkpoint_units,
    keep_in_float32,
    merge_tied,
    return_own_tensors,
)
from notebook_launcher.training.parallelism.unused_parameters import reduce_unused
from notebook_launcher.training.parallelism.wrapping import find_ignored, find_units
from notebook_launcher.training.precision import DTYPES
from notebook_launcher.training.spread_tensors import is_spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.training.parallelism.fsdp_plugin import FullyShardedDataParallelPlugin
    from notebook_launcher.training.parallelism.mesh import Layout
    from notebook_launcher.training.parallelism.replacements import Replacements
    from notebook_launcher.training.plugins import DistributedDataParallelKwargs

__all__ = ["Sharding"]

REDUCED_IN = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The precision of reductions by DDP's communication hook."""


@dataclasses.dataclass(kw_only=True)
class Sharding:
    """Shards the models that an Accelerator prepares."""

    layout: Layout
    device: torch.device
    computes_in: str
    """Precision of the forward: `"no"`, `"fp16"` or `"bf16"`."""
    replacements: Replacements
    """The sharded parameters in the place of the whole ones."""

    @property
    def plugin(self) -> FullyShardedDataParallelPlugin:
        """The settings."""
        assert self.layout.plugin is not None
        return self.layout.plugin

    def shard(
        self, model: torch.nn.Module, ddp: DistributedDataParallelKwargs, dynamo_backend: str | None
    ) -> list[torch.nn.Parameter]:
        """Shard a model in place; every rank calls this together, and rank 0's weights count.

        Args:
            model: A module that no rank has changed in a way of its own.
            ddp: Its communication hook gives the precision of reductions; `find_unused_parameters` holds as well.
            dynamo_backend: The backend that compiles each unit; None, and `"no"`: nothing is compiled.

        Returns:
            The parameters that stay whole on each rank: those of `ignored_modules`, and those without dimensions.

        Raises:
            RuntimeError: This torch cannot shard on CPUs.
            ValueError: The model shares parameters with one that was sharded before, or a setting does not fit it.
        """
        self._check(model, ddp)
        before = _places(model)
        policy = self._precision_policy(str(ddp.comm_hook))
        if policy.param_dtype is not None:
            keep_in_float32(model)
        if self.layout.sizes.tp_enabled:
            assert self.layout.mesh is not None
            mesh, plan = self.layout.mesh["tp"], self.layout.sizes.tp_plan
            apply_plan(model, mesh, plan, settle=lambda module: self._settle_weights([module]))
        ignored = find_ignored(model, self.plugin)
        units = merge_tied(model, find_units(model, self.plugin, ignored))
        if self.plugin.activation_checkpointing:
            units = checkpoint_units(model, units)
        if dynamo_backend not in (None, "no"):
            for unit in [member for group in units for member in group] or [model]:
                unit.compile(backend=dynamo_backend)
        options = self._options()
        # Outputs come back in `output_dtype` from the model alone: inside of it, the next unit wants `param_dtype`.
        inner = dataclasses.replace(policy, output_dtype=None)
        for group in units:
            self._shard_unit(group, ignored, {**options, "mp_policy": inner})
        self._shard_unit([model], ignored, {**options, "mp_policy": policy})
        if ddp.find_unused_parameters:
            reduce_unused(model)
        pairs = [(parameter, module._parameters[name]) for module, name, parameter in before]  # noqa: SLF001
        self.replacements.add((old, new) for old, new in pairs if new is not None and new is not old)
        return [parameter for parameter in model.parameters() if parameter in ignored]

    def _check(self, model: torch.nn.Module, ddp: DistributedDataParallelKwargs) -> None:
        if self.device.type == "cpu":
            check_sums()
        if any(self.replacements.has(parameter) for parameter in model.parameters()):
            raise ValueError(
                f"prepare(): {type(model).__name__} shares parameters with a model that was sharded before, and would "
                "train copies of them. Put both into one module, and prepare that."
            )
        if str(ddp.comm_hook) not in REDUCED_IN:
            raise ValueError(
                f"comm_hook={str(ddp.comm_hook)!r} compresses what DDP sends, and sharded models are reduced by FSDP2. "
                "Use 'bf16', 'fp16' or 'no'."
            )

    def _options(self) -> dict[str, Any]:
        """Return the arguments of `fully_shard` for every unit."""
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        offload = CPUOffloadPolicy(pin_memory=self.device.type != "cpu") if self.plugin.cpu_offload else OffloadPolicy()
        return {
            "mesh": self.layout.shard_mesh,
            "offload_policy": offload,
            # By default torch keeps the outermost unit until its backward, which comes first.
            **({} if self.plugin.reshard_after_forward else {"reshard_after_forward": False}),
        }

    def _precision_policy(self, hook: str) -> Any:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if self.plugin.mixed_precision_policy is not None:
            return self.plugin.mixed_precision_policy
        reduced_in = REDUCED_IN[hook]
        if self.computes_in == "no":
            return MixedPrecisionPolicy(reduce_dtype=None if hook == "no" else reduced_in)
        return MixedPrecisionPolicy(
            param_dtype=DTYPES[self.computes_in], reduce_dtype=reduced_in, output_dtype=torch.float32
        )

    def _shard_unit(
        self, group: Sequence[torch.nn.Module], ignored: set[torch.nn.Parameter], options: dict[str, Any]
    ) -> None:
        """Give modules rank 0's weights, and shard them together."""
        from torch.distributed.fsdp import fully_shard

        tensors = self._settle_weights(group)
        # Again, because those of the meta device were made just now.
        ignored |= {tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter) and not tensor.ndim}
        for parameter in ignored.intersection(tensors):
            parameter.data = parameter.data.to(self.device)
        check_dtypes(group, ignored)
        for unit in group:
            return_own_tensors(unit)
        if ignored:
            options = {**options, "ignored_params": ignored}
        fully_shard(list(group) if len(group) > 1 else group[0], **options)
        if self.device.type == "cpu":
            reduce_by_sums(group[0])

    def _settle_weights(self, group: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
        """Give modules rank 0's weights, as far as they are whole, and return all their tensors."""
        modules = [module for unit in group for module in unit.modules()]
        made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        if dist.get_rank() == 0:
            for module in modules:
                if any(
                    tensor.is_meta for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]
                ):
                    initialise_on_first(module, self.device, self.plugin.param_init_fn, made)
        materialise(modules, self.device, made)
        tensors = {id(tensor): tensor for unit in group for tensor in [*unit.parameters(), *unit.buffers()]}
        # Parts of inner units are there already, and have been broadcast.
        broadcast_from_first((tensor for tensor in tensors.values() if not is_spread(tensor)), self.device)
        return list(tensors.values())


def _places(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """Return every parameter with the module that has it and its name there, a tied one once for each of its places."""
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()  # noqa: SLF001 - `named_parameters` leaves duplicates out
        if parameter is not None
    ]
