"""Random number generators: seeding, equal states on all ranks, keeping and restoring of states."""

from __future__ import annotations

import hashlib
import operator
import os
import random
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_launcher.context import RandomStage, enter_random_stage, newest_seeding, random_stage
from notebook_launcher.wording import unknown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LOWEST, HIGHEST = -(2**63), 2**64 - 1
"""The range of seeds that `torch.manual_seed` takes."""
RNG_TYPES = ("torch", "cuda", "generator")
NO_RANK = 2**63
"""A number that no rank has, for the seed that all ranks share."""


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, NumPy's legacy generator if NumPy is imported, torch, and CUDA on all devices.

    The seeds stay as given: `Accelerator.prepare` then leaves the ranks' random numbers alone.

    Args:
        seed: A whole number from -2**63 to 2**64 - 1. NumPy, which takes 32 bits, gets it modulo 2**32.
        device_specific: True if each rank's seed is `seed` plus its rank.
        deterministic: True if torch may use deterministic algorithms only; an operation that has none
            raises. cuBLAS then needs `CUBLAS_WORKSPACE_CONFIG`, which is set unless you have. It reads the variable at
            its first call, so a matrix product on the GPU before this one raises at the next.

    Raises:
        TypeError: `seed` is not a whole number.
        ValueError: `seed` is out of range.
    """
    number = operator.index(seed)
    if device_specific:
        has_group = dist.is_available() and dist.is_initialized()
        number += dist.get_rank() if has_group else int(os.environ.get("RANK", "0"))
    if not LOWEST <= number <= HIGHEST:
        raise ValueError(f"set_seed({seed!r}): torch takes seeds from -2**63 to 2**64 - 1. Pass a smaller number.")
    _seed_all(number)
    enter_random_stage(None)
    if deterministic:
        # Without it, matrix products on a GPU raise under deterministic algorithms. Set although CUDA may be in use: a
        # rank's device is chosen before the function starts, and torch and cuBLAS read it at the first cuBLAS call.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def _seed_all(number: int) -> None:
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number % 2**32)
    torch.manual_seed(number)


def synchronize_rng_states(rng_types: Iterable[str], generator: torch.Generator | None = None) -> None:
    """Give every rank the states that generators have on rank 0; all ranks call it together.

    Args:
        rng_types: `"torch"` (the CPU's default), `"cuda"` (the current device's), `"generator"`.
        generator: The one that `"generator"` means.

    Raises:
        ValueError: An unknown type, or `"generator"` without one.
    """
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator=generator)


def synchronize_rng_state(rng_type: str | None = None, generator: torch.Generator | None = None) -> None:
    """Give every rank the state that one generator has on rank 0; see `synchronize_rng_states`.

    Raises:
        ValueError: An unknown type, or `"generator"` without one.
    """
    rng_type = str(getattr(rng_type, "value", rng_type))  # an enumeration's member counts as its value
    if rng_type not in RNG_TYPES:
        raise ValueError(unknown("rng_type", rng_type, RNG_TYPES))
    if rng_type == "generator" and generator is None:
        raise ValueError('rng_type="generator" needs one: pass generator=torch.Generator().')
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    if rng_type == "torch":
        torch.set_rng_state(_from_rank_0(torch.get_rng_state()))
    elif rng_type == "cuda":
        torch.cuda.set_rng_state(_from_rank_0(torch.cuda.get_rng_state()))
    else:
        assert generator is not None
        generator.set_state(_from_rank_0(generator.get_state()))


def _from_rank_0(state: torch.Tensor) -> torch.Tensor:
    # NCCL sends only from a GPU, and a state lives on the CPU.
    on_wire = state.cuda() if "nccl" in str(dist.get_backend()) else state
    dist.broadcast(on_wire, src=0)
    return on_wire.cpu()


def capture_rng_states() -> dict[str, Any]:
    """Return the states of this process' generators, by Accelerate's names and in plain types.

    Keys: `random_state`; `numpy_random_seed` if NumPy is imported, with its key as a list of numbers, which
    NumPy takes and `torch.load(weights_only=True)` reads; `torch_manual_seed`; and if CUDA is in use,
    `torch_cuda_manual_seed`, a list by device, and `torch_cuda_device`, the current one.
    """
    states: dict[str, Any] = {"random_state": random.getstate(), "torch_manual_seed": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        name, key, position, has_gauss, cached = numpy.random.get_state()
        states["numpy_random_seed"] = (name, key.tolist(), int(position), int(has_gauss), float(cached))
    if torch.cuda.is_initialized():
        states["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
        states["torch_cuda_device"] = torch.cuda.current_device()
    return states


def restore_rng_states(states: Mapping[str, Any]) -> None:
    """Set this process' generators to what `capture_rng_states`, or Accelerate, kept.

    Generators that the states do not name stay as they are. On a machine with another number of GPUs,
    the current device continues with the state of the device that was current then.
    """
    if "random_state" in states:
        random.setstate(states["random_state"])
    if "numpy_random_seed" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(states["numpy_random_seed"])
    if "torch_manual_seed" in states:
        torch.set_rng_state(states["torch_manual_seed"].cpu())
    if "torch_cuda_manual_seed" in states and torch.cuda.is_available():
        kept, current = states["torch_cuda_manual_seed"], states.get("torch_cuda_device")
        for device, state in zip(range(torch.cuda.device_count()), kept, strict=False):
            torch.cuda.set_rng_state(state.cpu(), device)
        if current is not None and len(kept) != torch.cuda.device_count():
            torch.cuda.set_rng_state(kept[current].cpu())


def derive_rng_states(states: Mapping[str, Any], process_index: int) -> dict[str, Any]:
    """Return states for a rank whose own were not saved, from those of another rank and this rank's number."""
    seed = _derived_seed(states["torch_manual_seed"], process_index)
    before = capture_rng_states()
    try:
        _seed_all(seed)
        return capture_rng_states()
    finally:
        restore_rng_states(before)


def draw_apart(data_rank: int) -> None:
    """Give this rank random numbers of its own, which follow from the state that all ranks share and from `data_rank`.

    Only in a launch whose ranks still draw alike, and not if the user's code has seeded torch: its seeds stay.
    """
    stage = random_stage()
    if stage is None or stage.next_seed is not None or _is_seeded_since(stage):
        return
    state = torch.get_rng_state()
    own = _derived_seed(state, data_rank)
    _seed_all(own)
    enter_random_stage(RandomStage(own, _derived_seed(state, NO_RANK), newest_seeding()))


def draw_alike() -> None:
    """Undo `draw_apart` where another training begins: all ranks draw the same numbers again, new ones."""
    stage = random_stage()
    if stage is not None and stage.next_seed is not None and not _is_seeded_since(stage):
        _seed_all(stage.next_seed)
        enter_random_stage(RandomStage(stage.next_seed, seeding=newest_seeding()))


def _is_seeded_since(stage: RandomStage) -> bool:
    """Return True if the user's code has seeded torch; with CUDA in use, by another number than the stage's."""
    return torch.initial_seed() != stage.seed or newest_seeding() is not stage.seeding


def _derived_seed(state: torch.Tensor, number: int) -> int:
    digest = hashlib.sha256(bytes(state.tolist()) + number.to_bytes(8, "little"))
    return int.from_bytes(digest.digest()[:8], "little")
