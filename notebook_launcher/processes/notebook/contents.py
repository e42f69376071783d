"""Fingerprints of values, by which the notebook knows if a variable, or a cell's value, is the same on all ranks."""

from __future__ import annotations

import hashlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["PLAIN", "fingerprint_of", "is_abridged"]

PLAIN = (bool, int, float, complex, str, bytes, type(None), tuple, list, dict, set, frozenset, range)
"""Types whose contents are compared by their `repr`."""
MAX_COMPARED = 1_000_000_000
"""Bytes of tensors above which a variable is not compared: a second of reading."""


def fingerprint_of(value: Any, max_bytes: int = MAX_COMPARED) -> str | None:
    """Return a word that is equal for equal contents; None if the contents cannot be compared.

    Args:
        value: Any object.
        max_bytes: Size of tensors and arrays above which they are not compared.
    """
    if (tensors := _tensors(value)) is not None:
        from notebook_launcher.training.fingerprints import fingerprint, is_comparable

        tensors = list(tensors)
        if not all(map(is_comparable, tensors)) or sum(tensor.nbytes for tensor in tensors) > max_bytes:
            return None
        shapes = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
        return f"{fingerprint(tensors)} {shapes}"
    if type(value).__module__ == "numpy" and getattr(value, "nbytes", max_bytes) < max_bytes:
        return f"{_digest(value.tobytes())} {getattr(value, 'shape', '')} {value.dtype}"
    if isinstance(value, types.FunctionType):
        return _fingerprint_of_function(value)
    return _digest(repr(value).encode()) if _is_plain(value) else None


def is_abridged(value: Any) -> bool:
    """Return True for values whose text need not show all of their contents: tensors, models and arrays."""
    return _tensors(value) is not None or type(value).__module__ == "numpy"


def _fingerprint_of_function(function: types.FunctionType) -> str | None:
    """Return a word for the code, the defaults and the captured values; None if these cannot be compared."""
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    parts = [fingerprint_of(value) for value in (function.__defaults__, function.__kwdefaults__, *held)]
    if None in parts:
        return None
    return _digest(f"{_text_of_code(function.__code__)} {parts}".encode())


def _text_of_code(code: types.CodeType) -> str:
    """Return a text that is equal for equal code; the `repr` of a function inside it has an address."""
    constants = [
        _text_of_code(constant) if isinstance(constant, types.CodeType) else repr(constant)
        for constant in code.co_consts
    ]
    return f"{code.co_code!r} {code.co_names} {code.co_freevars} {constants}"


def _tensors(value: Any) -> Iterable[Any] | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(value, torch.Tensor):
        return [value]
    return value.state_dict().values() if isinstance(value, torch.nn.Module) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.keys())) and all(map(_is_plain, value.values()))
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(map(_is_plain, value))
    return type(value) in PLAIN


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
