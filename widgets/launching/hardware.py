"""This machine's hardware in words, and the choices of a launch that it rules out."""

from __future__ import annotations

import collections
import contextlib
import inspect
import sys
from typing import TYPE_CHECKING, Any

from notebook_launcher.machine.allocation import rank_limit
from notebook_launcher.wording import format_bytes, plural

if TYPE_CHECKING:
    from collections.abc import Iterable

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.kernel.plan import Plan
    from notebook_launcher.machine.devices import GPU, Machine

ARITHMETIC = {"fp16": (5, 3), "bf16": (8, 0)}
"""Lowest compute capability with arithmetic in this precision (CUDA C++ Programming Guide)."""


def describe_machine(machine: Machine) -> str:
    """Return one clause: cores and GPUs."""
    kinds = collections.Counter(gpu.name for gpu in machine.gpus)
    gpus = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    return f"{_cores(machine)}, {machine.why_no_gpu or gpus}"


def describe_gpu(at: int, gpu: GPU) -> str:
    """Return one line: the index, the name, and the memory that is free and used now."""
    free, used = format_bytes(gpu.free_memory), format_bytes(gpu.total_memory - gpu.free_memory)
    return f"{at}: {gpu.name}, {free} free, {used} used"


def processes_hint(machine: Machine, plan: Plan | None) -> str:
    """Return a hint: the number of processes for an empty field, and the largest number."""
    most = f"{rank_limit(machine.num_cores)} at most"
    if plan is not None and plan.use_gpu:
        return f"Automatic: {len(plan.config.devices or machine.gpus)}, one for each GPU; {most}"
    return f"{most} on {_cores(machine)}"


def misfits(machine: Machine, config: LaunchConfig) -> dict[str, str]:
    """Return the options that the machine cannot satisfy, each with what to do instead; none for other machines."""
    if config.engine is not None:
        return {}
    found, num, limit = {}, config.num_processes or 1, rank_limit(machine.num_cores)
    chosen = config.devices if isinstance(config.devices, tuple) else ()
    missing = [at for at in chosen if at >= len(machine.gpus)]
    if num > limit:
        found["num_processes"] = f"Enter {limit} or less: this machine has {_cores(machine)}."
    if chosen and machine.why_no_gpu:
        found["devices"] = f"Choose CPU: {machine.why_no_gpu}."
    elif missing:
        found["devices"] = f"Choose among the GPUs of this machine: there is no GPU {missing[0]}."
    elif "nccl" in (config.backend or ""):
        num_gpus = 0 if config.backend in unfit_backends(machine, config) else len(chosen or machine.gpus)
        need = f"{config.backend} needs a GPU for each process"
        if not num_gpus:
            found["backend"] = f"Choose auto or gloo: {need} ({machine.why_no_gpu or 'CPU is chosen'})."
        elif num > num_gpus:
            found.setdefault("num_processes", f"Enter {num_gpus} or less, or choose gloo as backend: {need}.")
    return found


def _cores(machine: Machine) -> str:
    return plural(machine.num_cores, "CPU core")


def unfit_precisions(machine: Machine, config: LaunchConfig) -> dict[str, str]:
    """Return the precisions that the chosen devices do not support well, each with the reason."""
    if config.engine is not None:
        return {}
    if machine.why_no_gpu or config.devices == "cpu":
        # Measured on a Xeon with AVX-512: a 768 x 768 matrix product takes 19 times as long in fp16 as in float32.
        return {"fp16": "fp16 needs a GPU: on a CPU it is slower than full precision. bf16 works on both."}
    unfit = {}
    chosen = config.devices if isinstance(config.devices, tuple) else range(len(machine.gpus))
    for gpu in (gpu for at, gpu in enumerate(machine.gpus) if at in chosen):
        for precision, least in ARITHMETIC.items():
            if gpu.capability is not None and gpu.capability < least:
                have, need = (".".join(map(str, capability)) for capability in (gpu.capability, least))
                unfit[precision] = f"{precision} needs compute capability {need}; {gpu.name} has {have}."
    return unfit


def unfit_backends(machine: Machine, config: LaunchConfig) -> dict[str, str]:
    """Return the backends that do not work here, each with the reason."""
    why = machine.why_no_gpu or ("no GPU is chosen" if config.devices == "cpu" else "")
    return dict.fromkeys(("nccl", "cpu:gloo,cuda:nccl"), why) if why and config.engine is None else {}


# --------------------------------------------------------------------------------------------------------------------
# Hint of the field that shards models: what it saves on each process, and what it costs in traffic.


def sharding_hint(num_processes: int, shard: int, num_steps: int, num_bytes: int) -> str:
    """Return what a launch with `shard` saves and costs, against one without; 0 bytes of parameters: not known.

    The traffic follows from the algorithms: whole models are all-reduced once for each update; a shard gathers
    parameters twice and reduces gradients once in each micro-batch; replicas all-reduce their shards once for each
    update.
    """
    if num_processes == 1:
        return "With one process, sharding has no effect"
    plain, replicas = 2 * (num_processes - 1) / num_processes, num_processes // shard
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
    return (
        f"Each process holds {format_bytes(num_bytes // shard)} of parameters instead of {format_bytes(num_bytes)}; "
        f"gradients and optimizer state shrink alike. An update sends {format_bytes(round(sharded * num_bytes))} a "
        f"process instead of {format_bytes(round(plain * num_bytes))}."
    )


def parameter_bytes(function: Any, arguments: Iterable[Any]) -> int:
    """Return the bytes of the models that a call names: among its arguments, else in the function's own variables.

    A model that the function makes is unknown before it runs; then this is 0.
    """
    if (nn := sys.modules.get("torch.nn")) is None:
        return 0  # Without torch in the kernel, no value is a model.
    models = [value for value in arguments if isinstance(value, nn.Module)]
    if not models:
        # It may be no Python function, or a variable around it may have no value yet.
        with contextlib.suppress(TypeError, ValueError):
            names = inspect.getclosurevars(inspect.unwrap(function))
            models = [value for value in {**names.globals, **names.nonlocals}.values() if isinstance(value, nn.Module)]
    tensors = {tensor for model in models for tensor in model.parameters()}
    return sum(tensor.nbytes for tensor in tensors)
