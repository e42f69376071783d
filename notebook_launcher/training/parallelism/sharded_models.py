"""The sharding of a model by torch's `fully_shard`: its units, with rank 0's weights, from the inner ones outwards."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from notebook_launcher.training.parallelism import wrapping
from notebook_launcher.training.parallelism.tensor_parallel import apply_plan
from notebook_launcher.training.parallelism.unit_order import reduce_unused
from notebook_launcher.training.precision import DTYPES
from notebook_launcher.training.spread_tensors import is_spread
from notebook_launcher.wording import class_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from notebook_launcher.training.parallelism.fsdp_plugin import FullyShardedDataParallelPlugin
    from notebook_launcher.training.parallelism.mesh import Layout
    from notebook_launcher.training.plugins import DistributedDataParallelKwargs


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
        before = wrapping.places_of(model)
        policy = self._precision_policy(str(ddp.comm_hook))
        if policy.param_dtype is not None:
            wrapping.keep_in_float32(model)
        if self.layout.sizes.tp_enabled:
            assert self.layout.mesh is not None
            mesh, plan = self.layout.mesh["tp"], self.layout.sizes.tp_plan
            apply_plan(model, mesh, plan, settle=lambda module: self._settle_weights([module]))
        ignored = wrapping.find_ignored(model, self.plugin)
        units = wrapping.merge_tied(model, wrapping.find_units(model, self.plugin, ignored))
        if self.plugin.activation_checkpointing:
            units = wrapping.checkpoint_units(model, units)
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
                f"prepare(): {class_name(model)} shares parameters with a model that was sharded before, and would "
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
        for unit in group:
            wrapping.return_own_tensors(unit)
        if ignored:
            options = {**options, "ignored_params": ignored}
        fully_shard(list(group) if len(group) > 1 else group[0], **options)
        if self.device.type == "cpu":
            sharded: Any = group[0]
            sharded.set_force_sum_reduction_for_comms(True)

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


# --------------------------------------------------------------------------------------------------------------------
# The initial weights of a sharded model: rank 0's, on every rank.
#
# `fully_shard` communicates nothing, and ranks may draw numbers of their own: without this, a sharded model would be
# a mosaic of every rank's own initial weights.


LOADING = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
"""The variables at which `from_pretrained` of transformers leaves the weights of all ranks but the first on meta."""
SET_BY_US = "NOTEBOOK_LAUNCHER_SET_FSDP_LOADING"
"""Names the variables that this process has set itself, so that a later Accelerator does not take them for a wish."""


def load_on_first(on: bool) -> None:  # a switch
    """Let rank 0 alone read pretrained weights from now on, or let all ranks, unless the user set the variables."""
    for name in os.environ.pop(SET_BY_US, "").split():
        os.environ.pop(name, None)
    missing = [name for name in LOADING if name not in os.environ] if on else []
    if missing:
        os.environ.update({name: LOADING[name] for name in missing}, **{SET_BY_US: " ".join(missing)})


Made = dict[torch.nn.Parameter, torch.nn.Parameter]
"""Parameters with memory, by the parameter on the meta device that each replaces: one that several modules have."""


def materialise(modules: Iterable[torch.nn.Module], device: torch.device, made: Made) -> None:
    """Give the modules' own parameters and buffers that are on the meta device memory, with arbitrary values.

    `made` holds tensors that were made before; it grows.
    """
    for module in modules:
        for name, parameter in module._parameters.items():  # noqa: SLF001 - `named_parameters` leaves duplicates out
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[parameter] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[parameter]  # noqa: SLF001
        for name, buffer in module._buffers.items():  # noqa: SLF001
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)  # noqa: SLF001


def initialise_on_first(
    module: torch.nn.Module, device: torch.device, initialise: Callable[[torch.nn.Module], Any] | None, made: Made
) -> None:
    """Initialise a module whose own tensors are on the meta device on rank 0 as well, by its own rule.

    Raises:
        ValueError: The values with which the module begins are unknown.
    """
    reset = getattr(module, "reset_parameters", None)
    if initialise is None and not callable(reset):
        raise ValueError(
            f"prepare(): parameters of {type(module).__name__} are on the meta device on rank 0 too, and it has no "
            "reset_parameters(). Load the weights on rank 0 before prepare(), or pass "
            "FullyShardedDataParallelPlugin(param_init_fn=...)."
        )
    materialise([module], device, made)
    if initialise is not None:
        initialise(module)
    elif callable(reset):
        reset()


def broadcast_from_first(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Replace the values of tensors by rank 0's, one after the other; `device` is where ranks communicate."""
    with torch.no_grad():
        for tensor in tensors:
            # Contiguous, as collectives want it; a tensor that is there already is not copied.
            sent = tensor.detach().to(device).contiguous()
            dist.broadcast(sent, src=0)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent)


# --------------------------------------------------------------------------------------------------------------------
# Sharded parameters in the place of the whole parameters that optimizers were made with, found by identity.


class Replacements:
    """The sharded parameter of each parameter that was sharded."""

    def __init__(self) -> None:
        # Weakly, so that a whole parameter which no optimizer has any more is freed.
        self._sharded: Any = WeakIdKeyDictionary()

    def add(self, pairs: Iterable[tuple[torch.nn.Parameter, torch.nn.Parameter]]) -> None:
        """Note the parameters before and after sharding."""
        for before, after in pairs:
            self._sharded[before] = after

    def has(self, parameter: torch.Tensor) -> bool:
        """Return True if a parameter was sharded."""
        return parameter in self._sharded

    def present(self, given: Any, *, trains: bool = False) -> Any:
        """Return given parameters with the sharded ones in place of whole ones that a list from before still holds.

        Args:
            given: A parameter, or several, also as pairs of a name and a parameter.
            trains: An optimizer is to train them: one that was unfrozen through the list is unfrozen.
        """

        def one(parameter: Any) -> Any:
            if not isinstance(parameter, torch.Tensor):
                return parameter  # torch names it in its error.
            after = self._sharded.get(parameter, parameter)
            return after.requires_grad_() if trains and parameter.requires_grad else after

        if not len(self._sharded) or isinstance(given, set):  # torch refuses a set, which has no order.
            return given
        if isinstance(given, torch.Tensor):
            return one(given)
        return [(each[0], one(each[1])) if isinstance(each, tuple) else one(each) for each in given]

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer update the sharded parameters; a state that it has already is shared out."""
        state: Any = optimizer.state
        for group in optimizer.param_groups:
            for at, before in enumerate(group["params"]):
                after = self._sharded.get(before)
                if after is None:
                    continue
                group["params"][at] = after
                if before in state:
                    state[after] = _spread(state.pop(before), before, after)
            kinds = {is_spread(parameter) for parameter in group["params"]}
            if len(kinds) > 1 and group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = False  # Torch's multi-tensor functions refuse whole and sharded ones together.

    def __reduce__(self) -> tuple[type[Replacements], tuple[()]]:
        return Replacements, ()  # Ids of another process.


def _spread(state: Mapping[str, Any], before: torch.Tensor, after: Any) -> dict[str, Any]:
    """Return the state of a parameter with every tensor of its shape shared out as the parameter is."""
    from torch.distributed.tensor import distribute_tensor

    def spread(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape != before.shape:
            return value
        return distribute_tensor(value.to(after.device), after.device_mesh, after.placements)

    return {name: spread(value) for name, value in state.items()}


# --------------------------------------------------------------------------------------------------------------------
# Sums in the place of means when sharded gradients are reduced on CPUs.
#
# Up to torch 2.8, gloo's reduce-scatter takes AVG and returns the sum: gradients would be too large by the number of
# ranks. FSDP2 can ask for sums and divide them itself, which gives the same numbers with every torch.


def sums_on_request() -> bool:
    """Return True if FSDP2 can be asked for sums, as it can since torch 2.8."""
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "set_force_sum_reduction_for_comms")


def check_sums() -> None:
    """Raise `RuntimeError` if this torch cannot be asked for sums."""
    if not sums_on_request():
        raise RuntimeError(
            f"sharding on CPUs needs torch 2.8 or newer, and this is torch {torch.__version__}. "
            "Install a newer torch, or launch without sharding."
        )


def reduce_units_by_sums(model: torch.nn.Module) -> None:
    """Let FSDP2 reduce by sums, and divide them itself, in a model that the user's own code has sharded on CPUs.

    Raises:
        RuntimeError: This torch cannot be asked for sums.
    """
    from torch.distributed.fsdp import FSDPModule

    units: list[Any] = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
    if units:
        check_sums()
    for unit in units:
        unit.set_force_sum_reduction_for_comms(True)
