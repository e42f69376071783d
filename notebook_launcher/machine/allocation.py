"""Ranks and GPUs that a launch takes of a machine: as asked for, else as many as make sense."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from notebook_launcher.errors import ConfigError
from notebook_launcher.messaging.board_layout import MAX_RANKS
from notebook_launcher.wording.counts import plural, plural_verb

if TYPE_CHECKING:
    from notebook_launcher.machine.devices import Machine

__all__ = ["MAX_RANKS_PER_CORE", "MIN_RANK_LIMIT", "SHARING_VARIABLE", "Allocation", "allocate", "rank_limit"]

DEFAULT_CPU_RANKS = 4
"""At most so many CPU ranks where the number is left open: more rarely help, and each takes memory."""
MAX_RANKS_PER_CORE = 16
MIN_RANK_LIMIT = 64
SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Variable with which NCCL 2.30 and newer accepts several ranks on one GPU, if it is 1; found in its `init.cc`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Part of a machine that a launch takes."""

    num_processes: int
    gpus: tuple[int, ...]
    """Positions among the visible GPUs; empty: the ranks use the CPU."""
    backend: str | None
    """Backend of the default process group; None: no group is started."""


def allocate(
    machine: Machine,
    *,
    num_processes: int | None,
    devices: tuple[int, ...] | str | None,
    backend: str | None,
    nccl_shares: bool = False,
) -> Allocation:
    """Return what a launch with these fields of `LaunchConfig` takes; raise `ConfigError` if the machine has less.

    Args:
        machine: The machine.
        num_processes: The field.
        devices: The field.
        backend: The field.
        nccl_shares: True if the ranks get `SHARING_VARIABLE`, so that NCCL may be chosen for ranks that share a GPU.
    """
    gpus = _choose_gpus(devices, machine)
    num_processes = num_processes or len(gpus) or min(DEFAULT_CPU_RANKS, machine.num_cores)
    _check_number(num_processes, machine)
    return Allocation(
        num_processes=num_processes,
        gpus=gpus,
        backend=_choose_backend(backend, num_processes, gpus, machine, nccl_shares=nccl_shares),
    )


def rank_limit(machine: Machine) -> int:
    """Return the largest number of ranks that a launch may have on a machine."""
    return min(max(MIN_RANK_LIMIT, MAX_RANKS_PER_CORE * machine.num_cores), MAX_RANKS)


def _choose_gpus(devices: tuple[int, ...] | str | None, machine: Machine) -> tuple[int, ...]:
    if devices is None:
        return tuple(range(len(machine.gpus))) if not machine.why_no_gpu else ()
    if isinstance(devices, str):
        return ()
    if machine.why_no_gpu:
        raise ConfigError(
            f"devices={list(devices)!r}: {machine.why_no_gpu}. Use devices='cpu', or omit devices.", field="devices"
        )
    for index in devices:
        if index >= len(machine.gpus):
            have = ", ".join(f"{at}: {gpu.name}" for at, gpu in enumerate(machine.gpus))
            raise ConfigError(
                f"devices={list(devices)!r}: there is no GPU {index}. Visible are {have}.", field="devices"
            )
    return devices


def _check_number(num_processes: int, machine: Machine) -> None:
    limit = rank_limit(machine)
    if num_processes > limit:
        raise ConfigError(
            f"num_processes={num_processes} is too many for this machine: it has {plural(machine.num_cores, 'core')}, "
            f"and {limit} ranks are the limit. Omit num_processes to let the launcher choose.",
            field="num_processes",
        )


def _choose_backend(
    backend: str | None, num_processes: int, gpus: tuple[int, ...], machine: Machine, *, nccl_shares: bool
) -> str | None:
    num_gpus = len(gpus)
    has_enough = num_gpus >= num_processes or (nccl_shares and num_gpus > 0)
    if backend == "auto":
        # NCCL refuses two ranks on one GPU ("Duplicate GPU detected") unless told otherwise, and slices may be of one.
        has_slices = num_processes > 1 and any(machine.gpus[at].is_slice for at in gpus)
        return "nccl" if has_enough and (nccl_shares or not has_slices) else "gloo"
    if backend is not None and "nccl" in backend:
        if not num_gpus:
            why = machine.why_no_gpu or "devices='cpu' excludes every GPU"
            raise ConfigError(
                f"backend={backend!r} needs a GPU for each rank: {why}. Use backend='gloo' or 'auto'.", field="backend"
            )
        if not has_enough:
            raise ConfigError(
                f"num_processes={num_processes} with backend={backend!r}: NCCL needs a GPU for each rank, and "
                f"there {plural_verb('is', num_gpus)} {num_gpus}. Use num_processes={num_gpus}, or "
                f"backend='gloo' to let ranks share. (NCCL 2.30 and newer shares a GPU with {SHARING_VARIABLE}=1.)",
                field="num_processes",
            )
    return backend
