"""This machine's hardware in words, and the choices of a launch that it rules out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher.machine.allocation import rank_limit
from notebook_launcher.wording.counts import plural
from notebook_launcher.wording.units import format_bytes

if TYPE_CHECKING:
    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.kernel.plan import Plan
    from notebook_launcher.machine.devices import GPU, Machine

__all__ = ["describe_gpu", "describe_machine", "misfits", "processes_hint", "unfit_backends", "unfit_precisions"]

ARITHMETIC = {"fp16": (5, 3), "bf16": (8, 0)}
"""Lowest compute capability with arithmetic in this precision (CUDA C++ Programming Guide)."""


def describe_machine(machine: Machine) -> str:
    """Return one clause: cores and GPUs."""
    cores = _cores(machine)
    if machine.why_no_gpu:
        return f"{cores}, {machine.why_no_gpu}"
    kinds = {gpu.name: 0 for gpu in machine.gpus}
    for gpu in machine.gpus:
        kinds[gpu.name] += 1
    return f"{cores}, {', '.join(f'{count} x {name}' for name, count in kinds.items())}"


def describe_gpu(at: int, gpu: GPU) -> str:
    """Return one line: the index, the name, and the memory that is free and used now."""
    free, used = format_bytes(gpu.free_memory), format_bytes(gpu.total_memory - gpu.free_memory)
    return f"{at}: {gpu.name}, {free} free, {used} used"


def processes_hint(machine: Machine, plan: Plan | None) -> str:
    """Return a hint: the number of processes for an empty field, and the largest number."""
    most = f"{rank_limit(machine)} at most"
    if plan is not None and plan.use_gpu:
        return f"Automatic: {len(plan.config.devices or machine.gpus)}, one for each GPU; {most}"
    return f"{most} on {_cores(machine)}"


def misfits(machine: Machine, config: LaunchConfig) -> dict[str, str]:
    """Return the options that the machine cannot satisfy, each with what to do instead; none for other machines."""
    if config.engine is not None:
        return {}
    found, num, limit = {}, config.num_processes or 1, rank_limit(machine)
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
        if not num_gpus:
            why = machine.why_no_gpu or "CPU is chosen"
            found["backend"] = f"Choose auto or gloo: {config.backend} needs a GPU for each process ({why})."
        elif num > num_gpus:
            need = f"{config.backend} needs a GPU for each process"
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
    chosen = range(len(machine.gpus)) if config.devices is None else config.devices
    unfit = {}
    for precision, least in ARITHMETIC.items():
        for at in chosen:
            gpu = machine.gpus[int(at)] if int(at) < len(machine.gpus) else None
            if gpu is not None and gpu.capability is not None and gpu.capability < least:
                have, need = (".".join(map(str, capability)) for capability in (gpu.capability, least))
                unfit[precision] = f"{precision} needs compute capability {need}; {gpu.name} has {have}."
    return unfit


def unfit_backends(machine: Machine, config: LaunchConfig) -> dict[str, str]:
    """Return the backends that do not work here, each with the reason."""
    if config.engine is not None:
        return {}
    if machine.why_no_gpu:
        return dict.fromkeys(("nccl", "cpu:gloo,cuda:nccl"), machine.why_no_gpu)
    if config.devices == "cpu":
        return dict.fromkeys(("nccl", "cpu:gloo,cuda:nccl"), "no GPU is chosen")
    return {}
