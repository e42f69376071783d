"""Hint of the field that shards models: what it saves on each process, and what it costs in traffic."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

from notebook_launcher.wording.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["parameter_bytes", "sharding_hint"]


def sharding_hint(num_processes: int, shard: int, num_steps: int, num_bytes: int) -> str:
    """Return what a launch with `shard` saves and costs, against one without.

    The traffic follows from the algorithms: whole models are all-reduced once for each update; a shard gathers
    parameters twice and reduces gradients once in each micro-batch; replicas all-reduce their shards once for each
    update.

    Args:
        num_processes: The processes of the launch.
        shard: Number of ranks that share a model out.
        num_steps: Micro-batches for each update.
        num_bytes: The bytes of the model's parameters; 0 if they are unknown.
    """
    if num_processes == 1:
        return "With one process, sharding has no effect"
    plain = 2 * (num_processes - 1) / num_processes
    replicas = num_processes // shard
    sharded = 3 * num_steps * (shard - 1) / shard + 2 * (replicas - 1) / replicas / shard
    whole = f"{format_bytes(num_bytes)} of parameters" if num_bytes else "all parameters"
    if shard == 1:
        better = f"enter {num_processes} to keep 1/{num_processes} on each process"
        return f"Each process has {whole}, gradients and optimizer state; {better}."
    if not num_bytes:
        return (
            f"1/{shard} of parameters, gradients and optimizer state on each process. An update sends "
            f"{sharded / plain:.2g} times as much."
        )
    part = format_bytes(num_bytes // shard)
    return (
        f"Each process holds {part} of parameters instead of {format_bytes(num_bytes)}; gradients and optimizer state "
        "shrink alike. "
        f"An update sends {format_bytes(round(sharded * num_bytes))} a process instead of "
        f"{format_bytes(round(plain * num_bytes))}."
    )


def parameter_bytes(function: Any, arguments: Iterable[Any]) -> int:
    """Return the bytes of the models that a call names: among its arguments, else in the function's own variables.

    A model that the function makes is unknown before it runs; then this is 0.
    """
    models = [value for value in arguments if _is_model(value)] or [
        value for value in _variables_of(function) if _is_model(value)
    ]
    tensors = {id(tensor): tensor for model in models for tensor in model.parameters()}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _is_model(value: Any) -> bool:
    torch = sys.modules.get("torch")  # without torch in the kernel, no value is a model
    module = getattr(getattr(torch, "nn", None), "Module", None)
    return module is not None and isinstance(value, module)


def _variables_of(function: Any) -> list[Any]:
    """Return the values of the notebook's variables that a function names."""
    try:
        names = inspect.getclosurevars(inspect.unwrap(function))
    except (TypeError, ValueError):  # it is not a Python function, or a variable around it has no value yet
        return []
    return [*names.nonlocals.values(), *names.globals.values()]
