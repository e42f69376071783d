"""`save_model` and `load_model`: a model's weights as Hugging Face's libraries read them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch

from notebook_launcher.training.checkpoints import durable_files, staging
from notebook_launcher.training.checkpoints.checkpoint_error import CheckpointError
from notebook_launcher.training.checkpoints.packing import check_tensors, compact, find_tied, parse_size, shard
from notebook_launcher.training.checkpoints.sharded import gather_tree, share_out
from notebook_launcher.training.checkpoints.weights import (
    check_fit,
    fill_in,
    read_index,
    read_weights,
    split_tied,
    write_weights,
)
from notebook_launcher.training.checkpoints.writers import writes_here
from notebook_launcher.training.unwrapping import unwrap_model

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["load_model", "save", "save_model"]

OURS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
"""Names of all files that a save of a model may consist of."""
CANDIDATES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def save_model(
    model: torch.nn.Module,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,  # noqa: FBT001, FBT002 - Accelerate's signature
) -> None:
    """Write a model's weights under Hugging Face's file names; on rank 0, and the others return at once.

    Only of a model that `fully_shard` spreads over ranks do all ranks have to call it.

    `model.safetensors`, or `model-00001-of-0000N.safetensors` with an index if they are more than
    `max_shard_size`. A process that is killed meanwhile leaves the previous save whole. Once the new one
    is in place, weights of an earlier save are removed, whatever their format; other files stay.

    Args:
        model: Any module; DDP and `torch.compile` are seen through.
        save_directory: Made if it does not exist.
        max_shard_size: Bytes of tensors in a file, or a text such as `"200MB"`; a larger tensor has a file of its own.
        safe_serialization: safetensors; False: `pytorch_model.bin`, by `torch.save`.

    Raises:
        ValueError: `max_shard_size` is no size.
        NotADirectoryError: `save_directory` is a file.
        CheckpointError: The model has something that cannot be written.
        OSError: The disk does not take it; what was there before is untouched.
    """
    max_size = parse_size(max_shard_size)
    state = gather_tree(unwrap_model(model, keep_torch_compile=False).state_dict(), keep=writes_here())
    if not writes_here():
        return
    check_tensors(state, safe=safe_serialization)
    target = Path(os.path.realpath(Path(save_directory).expanduser()))
    stage = staging.open_stage(target)
    try:
        last = _write_shards(stage, compact(state), max_size, safe=safe_serialization)
        before = staging.contents(target) if target.exists() else set()
        earlier = {name for name in before if OURS.fullmatch(name)}
        staging.publish(
            stage, target, last=last, stale=earlier - staging.contents(stage), replaceable=before == earlier
        )
    except BaseException:
        staging.discard(stage)
        raise


def _write_shards(stage: Path, state: Mapping[str, torch.Tensor], max_size: int, *, safe: bool) -> str:
    """Write all files, and return the name of the file that readers begin with."""
    tied = find_tied(state) if safe else {}
    kept = {name: tensor for name, tensor in state.items() if name not in tied}
    shards = shard(kept, max_size, "model{}.safetensors" if safe else "pytorch_model{}.bin")
    for file, names in shards.files.items():
        # With their other names, which go into the file's metadata.
        members = {*names, *(name for name, first in tied.items() if first in names)}
        write_weights(stage / file, {name: state[name] for name in state if name in members}, safe=safe)
    if shards.index is None:
        return next(iter(shards.files))
    last = "model.safetensors.index.json" if safe else "pytorch_model.bin.index.json"
    durable_files.write_text(stage / last, json.dumps(shards.index, indent=2, sort_keys=True) + "\n")
    return last


def load_model(
    model: torch.nn.Module,
    directory: str | os.PathLike[str],
    strict: bool = True,  # noqa: FBT001, FBT002 - torch's signature
) -> Any:
    """Load weights that `save_model`, `save_state` or a Hugging Face library wrote.

    Args:
        model: Any module; DDP and `torch.compile` are seen through.
        directory: The folder.
        strict: True if the names must be the model's, all of them.

    Returns:
        What `load_state_dict` returns: the names that were missing, and those that were not expected.

    Raises:
        CheckpointError: There are no weights, they cannot be read, or they do not fit; nothing was loaded then.
    """
    target = Path(os.path.realpath(Path(directory).expanduser()))
    staging.settle(target)
    first = next((target / name for name in CANDIDATES if (target / name).exists()), None)
    if first is None:
        raise CheckpointError(f"{target} holds no weights: none of {', '.join(CANDIDATES)} is there. Check the path.")
    paths = read_index(first) if first.suffix == ".json" else [first]
    bare = unwrap_model(model, keep_torch_compile=False)
    weights = read_weights(paths)
    tensors = fill_in(bare, weights)
    check_fit(bare, tensors, weights.source, strict=strict)
    return bare.load_state_dict(share_out(tensors, bare.state_dict()), strict=strict)


def save(
    obj: Any,
    f: Any,
    save_on_each_node: bool = False,  # noqa: FBT001, FBT002 - Accelerate's signature
    safe_serialization: bool = False,  # noqa: FBT001, FBT002
) -> None:
    """Write an object to a file, once and whole; on rank 0, and the others return at once.

    Args:
        obj: Anything that `torch.save` takes; with `safe_serialization` a dict of tensors.
        f: A path, where the earlier file stays until the new one is complete, or a file that is open for bytes.
        save_on_each_node: True if the first rank of each machine writes.
        safe_serialization: safetensors, with tied tensors under their first name; False: `torch.save`.

    Raises:
        CheckpointError: `safe_serialization`, and `obj` is no dict of tensors.
        OSError: The disk does not take it.
    """
    if not writes_here(on_each_node=save_on_each_node):
        return
    if safe_serialization and not isinstance(obj, dict):
        raise CheckpointError(f"save() got a {type(obj).__name__}, and safetensors holds a dict of tensors.")
    if not hasattr(f, "write"):
        write = (lambda aside: write_weights(aside, obj, safe=True)) if safe_serialization else None
        staging.replace_file(Path(f), write or (lambda aside: durable_files.write_object(aside, obj)))
    elif safe_serialization:
        check_tensors(obj, safe=True)
        f.write(safetensors.torch.save(*split_tied(obj)))
    else:
        torch.save(obj, f)
