"""The GPUs that `CUDA_VISIBLE_DEVICES` leaves visible, by the rules of CUDA and of torch.

The list ends at the first entry that names no GPU or is of another kind than the first, and a GPU that is named twice
hides all of them (`torch.cuda._parse_visible_devices`). An entry is an index, a UUID or the beginning of one, or a
slice of a partitioned GPU (MIG) by its UUID.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["CUDA_VARIABLE", "GPU", "SLICE_PREFIX", "Choice", "choose_visible"]

CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"
SLICE_PREFIX = "MIG-"


@dataclasses.dataclass(frozen=True, slots=True)
class GPU:
    """One GPU, or one slice of a partitioned GPU (MIG)."""

    index: int
    """Number by which NVML knows it; of a slice, its place in `CUDA_VISIBLE_DEVICES`."""
    name: str
    total_memory: int
    """Bytes."""
    free_memory: int
    """Bytes."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability, such as (9, 0); None: unknown."""
    uuid: str = ""
    """Empty: unknown."""
    selector: str = ""
    """Name under which ranks get it in `CUDA_VISIBLE_DEVICES`: as the user wrote it there, else the UUID. CUDA may
    count other than NVML does (the fastest card first), so an index of NVML's would be another card to it."""

    @property
    def is_slice(self) -> bool:
        """True for a slice of a partitioned GPU."""
        return self.selector.startswith(SLICE_PREFIX)

    @property
    def key(self) -> int | str:
        """Index or UUID, by which `nvml.Library` finds it."""
        return self.selector if self.is_slice else self.index


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The GPUs that are visible."""

    gpus: tuple[GPU, ...]
    problem: str = ""
    """The reason why the variable hides all GPUs, as a clause for the user; empty: it does not, or on purpose."""


def choose_visible(gpus: Sequence[GPU], variable: str | None, find_slice: Callable[[str, int], GPU | None]) -> Choice:
    """Return the visible ones of a machine's GPUs.

    Args:
        gpus: All usable GPUs, in NVML's order.
        variable: Value of `CUDA_VISIBLE_DEVICES`; None: it is not set.
        find_slice: Looks up a slice by its name, for a place in the list; returns None if there is no such slice.
    """
    if variable is None:
        return Choice(tuple(dataclasses.replace(gpu, selector=gpu.uuid or str(gpu.index)) for gpu in gpus))
    chosen: list[GPU] = []
    items = [item.strip() for item in variable.split(",")]
    for item in items:
        if _kind(item) != _kind(items[0]):
            break
        gpu = find_slice(item, len(chosen)) if item.startswith(SLICE_PREFIX) else _find(gpus, item)
        if gpu is None:
            break
        if any(gpu.key == other.key for other in chosen):
            return Choice((), f"{CUDA_VARIABLE}={variable!r} names a GPU twice, which hides all of them")
        chosen.append(gpu)
    if not chosen and gpus and variable.strip() not in ("", "-1"):
        return Choice((), f"{CUDA_VARIABLE}={variable!r} begins with an entry that names no GPU")
    return Choice(tuple(chosen))


def _kind(item: str) -> str:
    return "index" if item.isdecimal() else item[: len(SLICE_PREFIX)]


def _find(gpus: Sequence[GPU], item: str) -> GPU | None:
    if item.isdecimal():
        found = [gpu for gpu in gpus if gpu.index == int(item)]
    else:
        found = [gpu for gpu in gpus if item and gpu.uuid.startswith(item)]
    return dataclasses.replace(found[0], selector=item) if len(found) == 1 else None
