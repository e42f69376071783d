"""The sharding of a model by torch's `fully_shard`: its units, with rank 0's weights, bottom-up."""

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
from notebook_launcher.training.parallelism.replacements import Replacements
from notebook_launcher.training.parallelism.wrapping import find_units
from notebook_launcher.training.precision import DTYPES

if TYPE_CHECKING:
    from notebook_launcher.training.parallelism.mesh import Layout

__all__ = ["Sharding"]


@dataclasses.dataclass(kw_only=True)
class Sharding:
    """Shards the models that an Accelerator prepares."""

    layout: Layout
    device: torch.device
    computes_in: str
    """Precision of the forward: `"no"`, `"fp16"` or `"bf16"`."""
    replacements: Replacements = dataclasses.field(default_factory=Replacements)
    """The sharded parameters in place of those before."""

    def shard(self, model: torch.nn.Module) -> torch.nn.Module:
        """Shard a model in place, and return it; every rank calls this together, and rank 0's weights count."""
        plugin = self.layout.plugin
        assert plugin is not None
        before = _named_parameters(model)
        policy = plugin.mixed_precision_policy or self._precision_policy()
        options: dict[str, Any] = {
            "mesh": self.layout.shard_mesh,
            "offload_policy": self._offload_policy(),
            "reshard_after_forward": None if plugin.reshard_after_forward else False,
        }
        # Outputs come back in `output_dtype` from the model alone: inside of it, the next unit wants `param_dtype`.
        inner = dataclasses.replace(policy, output_dtype=None)
        for unit in find_units(model, plugin).values():
            self._shard_unit(unit, {**options, "mp_policy": inner})
        self._shard_unit(model, {**options, "mp_policy": policy})
        pairs = [(parameter, module._parameters[name]) for module, name, parameter in before]  # noqa: SLF001
        self.replacements.add((old, new) for old, new in pairs if new is not None and new is not old)
        return model

    def _shard_unit(self, unit: torch.nn.Module, options: dict[str, Any]) -> None:
        from torch.distributed.fsdp import fully_shard

        modules = list(unit.modules())
        if dist.get_rank() == 0:
            for module in modules:
                own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
                if any(tensor.is_meta for tensor in own):
                    initialise_on_first(module, self.device, self._initialise())
        materialise(modules, self.device)
        whole = [tensor for tensor in [*unit.parameters(), *unit.buffers()] if not hasattr(tensor, "full_tensor")]
        broadcast_from_first(whole, self.device)
        fully_shard(unit, **options)

    def _initialise(self) -> Any:
        return None if self.layout.plugin is None else self.layout.plugin.param_init_fn

    def _precision_policy(self) -> Any:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if self.computes_in == "no":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(
            param_dtype=DTYPES[self.computes_in], reduce_dtype=torch.float32, output_dtype=torch.float32
        )

    def _offload_policy(self) -> Any:
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        if self.layout.plugin is None or not self.layout.plugin.cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.device.type != "cpu")


def _named_parameters(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """Return every parameter with the module that has it and its name there, a tied one once for each of its places."""
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()  # noqa: SLF001 - `named_parameters` leaves duplicates out
        if parameter is not None
    ]
