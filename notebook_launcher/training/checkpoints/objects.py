"""Objects in files: states of optimizers and other objects, read without running code that they hold."""

from __future__ import annotations

import datetime as dt
import os
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.files import check_plain
from notebook_launcher.training.checkpoints.folders import ADVICE, CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

PLAIN = (dt.date, dt.datetime, dt.time, dt.timedelta, dt.timezone, frozenset, range, slice)
"""Types beside torch's own list whose construction runs no code; NumPy's are added if NumPy is imported."""


def read_object(
    path: Path,
    map_location: Any = "cpu",
    *,
    trust: str = 'load_kwargs={"weights_only": False} to load_state',
    **load_kwargs: Any,
) -> Any:
    """Return the object in a file of `torch.save`, made of plain types: numbers, text, containers, tensors, arrays.

    `trust` is the argument that allows any type, and its function, for the error.
    """
    options: dict[str, Any] = {"weights_only": True, **load_kwargs}
    try:
        if isinstance(path, str | os.PathLike):
            check_plain(Path(path))
        with _plain_types():
            return torch.load(path, map_location=map_location, **options)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing. Load another checkpoint, or prepare what was prepared then."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}. {ADVICE}") from error
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError) as error:
        found = unsafe_types(path)
        if options["weights_only"] and found:
            raise CheckpointError(
                f"{path} holds {', '.join(found)}, which is not loaded without permission: constructing it can run any "
                f"code. If you trust the folder, pass {trust}; or let state_dict() return plain numbers, text, lists, "
                "dicts and tensors."
            ) from error
        raise CheckpointError(f"{path} cannot be read: {error}. {ADVICE}") from error


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Return the object in a file of `save` or `torch.save`, made of tensors, NumPy arrays and plain types.

    Args:
        f: A path, or a file that is open for bytes.
        map_location: Device for tensors, as for `torch.load`; None: where they were.
        kwargs: For `torch.load`. `weights_only=False` lets the file construct anything, which can run any code.

    Raises:
        CheckpointError: The file is missing or damaged, or holds other types.
    """
    return read_object(f, map_location, trust="weights_only=False to load", **kwargs)


def unsafe_types(path: Path) -> list[str]:
    """Return the names of the types in a file that `read_object` refuses; none if the file is damaged."""
    with _plain_types():
        try:
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        except Exception:  # a damaged file fails in any way
            return []


def check_custom_objects(objects: Iterable[Any]) -> None:
    """Raise ValueError, listing them, if objects lack `state_dict` or `load_state_dict`."""
    bad = [
        f"\n\t- Item at index {index}, `{getattr(obj, '__name__', None) or type(obj).__name__}`"
        for index, obj in enumerate(objects)
        if not (callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None)))
    ]
    if bad:
        raise ValueError(
            "register_for_checkpointing takes objects with the methods state_dict() and load_state_dict(state). These "
            f"lack one:{''.join(bad)}"
        )


def _plain_types() -> AbstractContextManager[Any]:
    """Allow `torch.load` to read the plain types inside a block; what the user has allowed stays allowed after it."""
    kinds: list[Any] = list(PLAIN)
    if (numpy := sys.modules.get("numpy")) is not None:
        core = numpy._core if hasattr(numpy, "_core") else numpy.core  # noqa: SLF001 - numpy._core since NumPy 2
        kinds += [core.multiarray._reconstruct, core.multiarray.scalar]  # noqa: SLF001 - what NumPy's pickles name
        kinds += [numpy.ndarray, numpy.dtype, *(kind for kind in vars(numpy.dtypes).values() if isinstance(kind, type))]
    known = torch.serialization.get_safe_globals()
    return torch.serialization.safe_globals([kind for kind in kinds if kind not in known])
