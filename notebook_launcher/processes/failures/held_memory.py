"""Memory that frames hold: the tensors that their variables reach."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["gpu_bytes", "tensor_bytes"]

MAX_OBJECTS = 100_000
"""Objects that are looked at, which takes 0.1 s at most."""
ATOMS = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, types.FunctionType)
"""Types of objects that are not followed: they hold no tensor, or belong to everybody."""


def tensor_bytes(frames: Iterable[types.FrameType]) -> int:
    """Return the bytes of all tensors that the variables of these frames reach, each memory counted once.

    Activations that only autograd holds are not seen.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return 0
    sizes: dict[tuple[str, int], int] = {}
    for tensor in _tensors(frames, torch.Tensor):
        with contextlib.suppress(Exception):  # Some tensors have no memory of their own.
            storage = tensor.untyped_storage()
            sizes[str(storage.device), storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def gpu_bytes() -> int | None:
    """Return the bytes that torch has allocated on this process's GPU; None if the process uses no GPU."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.memory_allocated())


def _tensors(frames: Iterable[types.FrameType], kind: Any) -> Iterator[Any]:
    todo: list[Any] = [value for frame in frames for value in frame.f_locals.values()]
    seen: set[int] = set()
    while todo and len(seen) < MAX_OBJECTS:
        value = todo.pop()
        if isinstance(value, ATOMS) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, kind):
            yield value
            todo.append(value.grad if value.is_leaf else None)
        else:
            with contextlib.suppress(Exception):  # A mapping or a sequence of the user's may raise anything.
                todo += _parts(value)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    return list(getattr(value, "__dict__", {}).values())
