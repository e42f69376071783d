"""Fingerprints of tensors and digests of objects: equal bits give equal numbers, on every device."""

from __future__ import annotations

import hashlib
import math
import pickle
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from notebook_launcher.training.spread_tensors import is_spread

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

CHUNK = 1 << 20
"""Integers that are multiplied at once, which bounds the memory that a fingerprint takes."""
SMALL = 1 << 12
"""Elements below which tensors are put together first, to save kernels."""
MULTIPLIER = -7046029254386353131
"""2**64 divided by the golden ratio, as a signed number."""
NUM_PROJECTIONS = 8
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Sketch(NamedTuple):
    """A tensor in a few numbers, from which the size of a difference can be estimated."""

    bits: int
    """Fingerprint of the tensor."""
    norm: float
    projections: tuple[float, ...]
    """Sums of its elements times numbers from -1 to 1 that look random, the same on every rank."""
    epsilon: float
    """The relative rounding error of the tensor's dtype."""

    def distance(self, other: Sketch) -> float:
        """Estimate the norm of the difference, relative to this tensor's own; 0.0 if both are not finite."""
        squares = [(mine - theirs) ** 2 for mine, theirs in zip(self.projections, other.projections, strict=True)]
        difference = math.sqrt(3 * sum(squares) / len(squares))
        if math.isnan(difference):
            return 0.0 if math.isnan(self.norm) and math.isnan(other.norm) else math.inf
        return difference / max(self.norm, other.norm, 1e-300)


def is_comparable(tensor: object) -> bool:
    """Return True for a plain tensor that a rank holds as a whole, and not for a part (DTensor) or a subclass."""
    return (
        isinstance(tensor, torch.Tensor)
        and type(tensor.detach()) is torch.Tensor
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and tensor.device.type != "meta"
    )


def fingerprint(tensors: Iterable[torch.Tensor]) -> int:
    """Return 64 bits that depend on every bit of the tensors and on their order."""
    small: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    parts: list[torch.Tensor] = []
    with torch.no_grad():
        for tensor in tensors:
            bits = _bits(tensor)
            if bits.numel() < SMALL:
                small.setdefault((bits.device, bits.dtype), []).append(bits)
            else:
                parts.append(_hash(_as_words(bits)))
        parts += [_hash(_as_words(torch.cat(bits))) for bits in small.values()]
        numbers = _gathered(parts)
        return int(_hash(torch.stack(numbers))) if numbers else 0


def fingerprint_nested(value: Any) -> int | None:
    """Return the fingerprint of the plain tensors in tuples, lists and dicts; None without any."""
    tensors = list(_plain_tensors(value))
    return fingerprint(tensors) if tensors else None


def digest_of(state: Any) -> str:
    """Return a digest of an object, by which ranks compare theirs; a tensor that they share counts for nothing.

    Raises:
        Exception: Something in it cannot be pickled.
    """
    sha256 = hashlib.sha256()
    pickler = _Pickler(types.SimpleNamespace(write=sha256.update), protocol=4)
    pickler.fast = True  # Equal states may share objects in different ways, which must not matter.
    pickler.dump(state)
    return sha256.hexdigest()


class _Pickler(pickle.Pickler):
    """Pickles a fingerprint in the place of a tensor, which may be large or on a GPU."""

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        if is_spread(obj):
            return "spread"
        return (str(obj.dtype), tuple(obj.shape), fingerprint([obj])) if is_comparable(obj) else None


def sketch(tensor: torch.Tensor) -> Sketch:
    """Return the sketch of a tensor."""
    plain = tensor.detach()
    values = torch.view_as_real(plain) if plain.is_complex() else plain
    epsilon = torch.finfo(values.dtype).eps if values.is_floating_point() else 0.0
    square, sums = 0.0, [0.0] * NUM_PROJECTIONS
    for at, chunk in enumerate(values.reshape(-1).split(CHUNK)):
        numbers = chunk.double()
        square += float((numbers * numbers).sum())
        weights = _weights(chunk.numel(), chunk.device) * (2 * at + 1)
        for place in range(NUM_PROJECTIONS):
            weights = weights * MULTIPLIER ^ (weights >> 31)
            sums[place] += float((numbers * weights.double()).sum()) / 2**63
    return Sketch(fingerprint([tensor]), math.sqrt(square), tuple(sums), epsilon)


def _plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    if is_comparable(value):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _plain_tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _plain_tensors(item)


def _gathered(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the same numbers with one copy from each device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for part in parts:
        by_device.setdefault(part.device, []).append(part)
    return [number for numbers in by_device.values() for number in torch.stack(numbers).cpu()]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    return plain.reshape(-1).view(INTEGERS[plain.element_size()])


def _as_words(bits: torch.Tensor) -> torch.Tensor:
    """Return integers as fewer, wider integers where they fit, which takes less time to hash."""
    per_word = 8 // bits.element_size()
    if per_word > 1 and bits.numel() % per_word == 0 and bits.storage_offset() % per_word == 0:
        return bits.view(torch.int64)
    return bits


def _hash(words: torch.Tensor) -> torch.Tensor:
    # Sums of integers wrap around, so their order does not matter.
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    weights = _weights(min(words.numel(), CHUNK), words.device)
    for chunk in words.split(CHUNK):
        total = total * MULTIPLIER + (chunk * weights[: chunk.numel()]).sum()
    return total + words.numel()


def _weights(number: int, device: torch.device) -> torch.Tensor:
    """Return odd numbers that look random."""
    places = torch.arange(1, number + 1, dtype=torch.int64, device=device) * MULTIPLIER
    return (places ^ (places >> 29)) | 1
