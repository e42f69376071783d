"""The initial weights of a sharded model: rank 0's, on every rank.

`fully_shard` communicates nothing, and ranks may draw numbers of their own: without this, a sharded model would be a
mosaic of every rank's own initial weights.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["broadcast_from_first", "initialise_on_first", "load_on_first", "materialise"]

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
    """Give parameters and buffers that are on the meta device memory on `device`, with arbitrary values.

    Args:
        modules: The modules; their own tensors alone, not the tensors of modules inside of them.
        device: Device on which the tensors get memory.
        made: Tensors that were made before; it grows.
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
