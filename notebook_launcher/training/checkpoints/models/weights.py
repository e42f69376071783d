"""A model's weights in files, by Hugging Face's names, and back into a model."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch

from notebook_launcher.training.checkpoints.checkpoint_error import CheckpointError
from notebook_launcher.training.checkpoints.folders.durable_files import FileDigest, write_object, write_tensors
from notebook_launcher.training.checkpoints.folders.file_names import leaves_folder
from notebook_launcher.training.checkpoints.folders.manifest import ADVICE
from notebook_launcher.training.checkpoints.layouts.distributed_files import read_outline, read_shards
from notebook_launcher.training.checkpoints.layouts.sharded import has_spread
from notebook_launcher.training.checkpoints.layouts.streaming import stream_object, stream_tensors
from notebook_launcher.training.checkpoints.models.packing import check_tensors, compact, find_tied, spread_ties
from notebook_launcher.training.checkpoints.objects import read_object

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = [
    "Weights",
    "check_names_and_shapes",
    "fill_in",
    "find_shards",
    "load_shards",
    "read_index",
    "read_weights",
    "split_tied",
    "write_weights",
]


@dataclasses.dataclass(slots=True)
class Weights:
    """The tensors of a model that its files hold."""

    tensors: dict[str, Any]
    aliases: dict[str, str]
    """Second names that tensors had when they were saved, each with the name that the tensor is stored under."""
    source: str
    """File or folder of the tensors, for messages."""


def split_tied(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file for a state; it holds each tensor once.

    A tied tensor stands under its first name; the metadata have the others, each with the first.
    """
    state = compact(state)
    tied = find_tied(state)
    metadata = {**tied, "format": "pt"}
    return {name: tensor for name, tensor in state.items() if name not in tied}, metadata


def write_weights(path: Path | None, state: Mapping[str, Any], *, safe: bool) -> FileDigest | None:
    """Write a model's state, `safe` as safetensors; with spread tensors all ranks call it together.

    Args:
        path: The file; None on ranks that do not write.
        state: Of the same names on all ranks.
        safe: safetensors; False: `torch.save`.

    Raises:
        CheckpointError: The state holds something that cannot be written.
        OSError: The disk is full or fails.
    """
    check_tensors(state, safe=safe)
    if has_spread(state):
        return _stream_weights(path, state, safe=safe)
    if path is None:
        return None
    if not safe:
        return write_object(path, compact(state))
    try:
        return write_tensors(path, *split_tied(state))
    except (KeyError, ValueError) as error:
        # A dtype that it does not know is a KeyError; a sparse tensor a ValueError.
        raise CheckpointError(
            f"safetensors cannot hold the weights ({error}). Pass safe_serialization=False, or convert them."
        ) from error


def _stream_weights(path: Path | None, state: Mapping[str, Any], *, safe: bool) -> FileDigest | None:
    if not safe:
        return stream_object(path, dict(state))
    tied = spread_ties(state)
    kept = {name: tensor for name, tensor in state.items() if name not in tied}
    return stream_tensors(path, kept, {**tied, "format": "pt"})


def read_weights(paths: Iterable[Path], map_location: Any = "cpu", **load_kwargs: Any) -> Weights:
    """Return the tensors of all files together.

    Raises:
        CheckpointError: A file is missing or cannot be read.
    """
    paths = list(paths)
    weights = Weights({}, {}, f"{paths[0]}" if len(paths) == 1 else f"{paths[0].parent}")
    for path in paths:
        if path.suffix == ".safetensors":
            _read_safetensors(path, map_location, weights)
        else:
            weights.tensors.update(read_object(path, map_location, **load_kwargs))
    return weights


def _read_safetensors(path: Path, map_location: Any, weights: Weights) -> None:
    try:
        weights.tensors.update(safetensors.torch.load_file(path, device=str(map_location)))
        with safetensors.safe_open(path, framework="pt") as file:
            weights.aliases.update(file.metadata() or {})
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: it was never saved, or was removed since. Save the model again."
        ) from None
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. {ADVICE}") from error


def read_index(path: Path) -> list[Path]:
    """Return the files that an index names.

    Raises:
        CheckpointError: The index does not parse, or names a file outside its folder.
    """
    try:
        names = set(json.loads(path.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: it does not parse ({error!r}). Save the model again.") from error
    if outside := [name for name in names if leaves_folder(name)]:
        raise CheckpointError(f"{path} is damaged: {outside[0]!r} is outside the folder. Save the model again.")
    return [path.parent / name for name in sorted(names)]


def fill_in(model: torch.nn.Module, weights: Weights) -> dict[str, Any]:
    """Return the tensors by name, tied tensors also by their other names in the model or the file."""
    state = model.state_dict()
    tied = find_tied(state)
    filled = dict(weights.tensors)
    for name in state:
        if name not in filled:
            first = tied.get(name, name)
            mates = [weights.aliases.get(name), first, *(other for other, owner in tied.items() if owner == first)]
            known = next((mate for mate in mates if mate in weights.tensors), None)
            if known is not None:
                filled[name] = weights.tensors[known]
    return filled


def check_names_and_shapes(
    model: torch.nn.Module, tensors: Mapping[str, Any], source: str, *, strict: bool = True, always: bool = False
) -> None:
    """Raise CheckpointError, before anything is loaded, if names or shapes are not the model's.

    Args:
        model: Not wrapped.
        tensors: From `fill_in`.
        source: Origin of the weights, in words.
        strict: True if names must agree; shapes always must.
        always: True if the tensors do not pass the hooks of `load_state_dict`.
    """
    hooks = [hook for module in model.modules() for hook in module._load_state_dict_pre_hooks.values()]  # noqa: SLF001 - no public name
    # `fully_shard` registers a hook, and it renames nothing.
    if not always and any("_fully_shard" not in getattr(hook, "__module__", "") for hook in hooks):
        return  # such a module may rename or reshape tensors while it loads them
    state = model.state_dict()
    lines = []
    if strict:
        lines += [_listed("Missing", set(state) - set(tensors)), _listed("Unexpected", set(tensors) - set(state))]
    for name in sorted(set(state) & set(tensors)):
        mine, theirs = _shape(state[name]), _shape(tensors[name])
        if mine != theirs and mine is not None:
            lines.append(f"\n\tsize mismatch for {name}: {theirs} in the file, {mine} in the model.")
    if any(lines):
        raise CheckpointError(
            f"{source} does not fit {type(model).__name__}; nothing was loaded:{''.join(lines)}\nBuild the model as it "
            "was when it was saved."
        )


def load_shards(model: torch.nn.Module, folder: Path, *, strict: bool = True) -> Any:
    """Load a model from a folder of the sharded layout; return the missing and the unexpected names.

    Raises:
        CheckpointError: The folder does not fit the model or cannot be read; nothing was loaded if it does not fit.
    """
    outline = find_shards(model, folder, strict=strict)
    state = model.state_dict()
    with torch.no_grad():
        read_shards(folder, {f"model.{name}": tensor for name, tensor in state.items() if name in outline})
    missing, unexpected = sorted(set(state) - set(outline)), sorted(set(outline) - set(state))
    return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)  # noqa: SLF001 - what load_state_dict returns


def find_shards(model: torch.nn.Module, folder: Path, *, strict: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder of the sharded layout, on the meta device, after checking that they fit."""
    outline = read_outline(folder, "model")
    check_names_and_shapes(model, outline, f"{folder}", strict=strict, always=True)
    return outline


def _listed(what: str, names: set[str]) -> str:
    return f"\n\t{what} key(s) in state_dict: {', '.join(map(repr, sorted(names)))}." if names else ""


def _shape(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
        return None
    return tuple(value.shape)
