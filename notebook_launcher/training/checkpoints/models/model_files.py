"""`save_model` and `load_model`: a model's weights as Hugging Face's libraries read them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch

from notebook_launcher.training.checkpoints.checkpoint_error import CheckpointError
from notebook_launcher.training.checkpoints.folders import durable_files, file_names, staging
from notebook_launcher.training.checkpoints.folders.file_names import METADATA
from notebook_launcher.training.checkpoints.layouts.sharded import gather_tree, has_spread, share_out
from notebook_launcher.training.checkpoints.models.packing import (
    Shards,
    check_tensors,
    compact,
    find_tied,
    parse_size,
    shard,
)
from notebook_launcher.training.checkpoints.models.weights import (
    check_names_and_shapes,
    fill_in,
    load_shards,
    read_index,
    read_weights,
    split_tied,
    write_weights,
)
from notebook_launcher.training.checkpoints.writers import gather_outcomes, on_all_ranks, run_each, writes_here
from notebook_launcher.training.process.arrivals import meet
from notebook_launcher.training.unwrapping import unwrap_model
from notebook_launcher.wording.text import type_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["gather_state_dict", "load_model", "save", "save_model"]

WEIGHT_FILES = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
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
    safe_serialization: bool = True,
) -> None:
    """Write a model's weights under Hugging Face's file names; on rank 0, and the others return at once.

    All ranks have to call it only if `fully_shard` spreads the model over them.

    `model.safetensors`, or `model-00001-of-0000N.safetensors` with an index if they are more than
    `max_shard_size`. A process that is killed meanwhile leaves the previous save whole. Once the new one
    is in place, weights of an earlier save are removed, whatever their format; other files stay.

    Args:
        model: Any module; DDP and `torch.compile` are seen through.
        save_directory: Made if it does not exist.
        max_shard_size: Bytes of tensors in a file, or a text such as `"200MB"`; a larger tensor has a file of its own.
        safe_serialization: safetensors; False: `pytorch_model.bin`, by `torch.save`.

    Raises:
        ValueError: `max_shard_size` is not a size.
        NotADirectoryError: `save_directory` is a file.
        CheckpointError: The model has something that cannot be written.
        OSError: The disk is full or fails; what was there before is untouched.
    """
    max_size = parse_size(max_shard_size)
    target = Path(os.path.realpath(Path(save_directory).expanduser()))
    state = unwrap_model(model, keep_torch_compile=False).state_dict()
    if has_spread(state):
        meet("save_model")
        _save_spread(state, target, max_size, safe=safe_serialization)
        return
    if not writes_here():
        return
    check_tensors(state, safe=safe_serialization)
    stage = staging.open_stage(target)
    try:
        plan = _plan_files(compact(state), max_size, safe=safe_serialization)
        for step in _writes(stage, state, plan, safe=safe_serialization):
            step()
        _publish(stage, target, plan)
    except BaseException:
        staging.discard(stage)
        raise


def _save_spread(state: Mapping[str, Any], target: Path, max_size: int, *, safe: bool) -> None:
    """Write a model that is spread over ranks; all ranks gather one tensor at a time."""
    leads = writes_here()
    check_tensors(state, safe=safe)
    # Rank 0 plans, because another rank's part of a tensor may be empty, which hides that it is tied.
    plan = gather_outcomes("plan the files", lambda: _plan_files(state, max_size, safe=safe) if leads else None)[0]
    stage = on_all_ranks("begin the files", lambda: staging.open_stage(target) if leads else None)
    assert plan is not None

    def place() -> None:
        if stage is not None:
            _publish(stage, target, plan)

    try:
        steps = _writes(stage, state, plan, safe=safe)
        on_all_ranks("write the model", lambda: run_each(steps))
        on_all_ranks("put the model in place", place)
    except BaseException:
        if stage is not None:
            staging.discard(stage)
        raise


@dataclasses.dataclass(frozen=True, slots=True)
class _FilePlan:
    """The files of a model."""

    shards: Shards
    """The names of the tensors in each file."""
    tied: dict[str, str]
    """Second names of tied tensors, which stand in the metadata of a safetensors file alone."""
    last: str
    """The file that readers begin with."""


def _plan_files(state: Mapping[str, Any], max_size: int, *, safe: bool) -> _FilePlan:
    tied = find_tied(state) if safe else {}
    kept = {name: tensor for name, tensor in state.items() if name not in tied}
    shards = shard(kept, max_size, "model{}.safetensors" if safe else "pytorch_model{}.bin")
    if shards.index is None:
        return _FilePlan(shards, tied, next(iter(shards.files)))
    return _FilePlan(shards, tied, "model.safetensors.index.json" if safe else "pytorch_model.bin.index.json")


def _writes(stage: Path | None, state: Mapping[str, Any], plan: _FilePlan, *, safe: bool) -> list[Callable[[], Any]]:
    """Return a step for each file."""
    steps: list[Callable[[], Any]] = []
    for file, names in plan.shards.files.items():
        # With their other names, which go into the file's metadata.
        in_file = {*names, *(name for name, first in plan.tied.items() if first in names)}
        part = {name: state[name] for name in state if name in in_file}
        path = None if stage is None else stage / file
        steps.append(lambda path=path, part=part: write_weights(path, part, safe=safe))  # type: ignore[misc]
    if plan.shards.index is not None and stage is not None:
        text = json.dumps(plan.shards.index, indent=2, sort_keys=True) + "\n"
        steps.append(lambda: durable_files.write_text(stage / plan.last, text))
    return steps


def _publish(stage: Path, target: Path, plan: _FilePlan) -> None:
    before = staging.contents(target) if target.exists() else set()
    earlier = {name for name in before if WEIGHT_FILES.fullmatch(name)}
    staging.publish(
        stage, target, last=plan.last, stale=earlier - staging.contents(stage), replaceable=before == earlier
    )


def gather_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """Return a model's state dict; of a sharded one, on rank 0 whole and on the CPU, and on the others empty.

    Raises:
        TypeError: The object has no state dict.
    """
    if not hasattr(model, "state_dict"):
        raise TypeError(f"get_state_dict({type(model).__name__}): pass a model.")
    state: dict[str, Any] = model.state_dict()
    if not has_spread(state):
        return state
    meet("get_state_dict")
    whole = gather_tree(state, keep=writes_here())
    return dict(whole) if writes_here() else {}


def load_model(
    model: torch.nn.Module,
    directory: str | os.PathLike[str],
    strict: bool = True,
) -> Any:
    """Load weights that `save_model`, `save_state` or a Hugging Face library wrote.

    Args:
        model: Any module; DDP and `torch.compile` are seen through.
        directory: The folder.
        strict: True if the names must be the model's, all of them.

    Returns:
        What `load_state_dict` returns: the names that were missing, and those that were not expected.

    Raises:
        CheckpointError: Weights are missing, cannot be read, or do not fit; nothing was loaded then.
    """
    target = Path(os.path.realpath(Path(directory).expanduser()))
    staging.settle(target)
    first = next((target / name for name in CANDIDATES if (target / name).exists()), None)
    bare = unwrap_model(model, keep_torch_compile=False)
    shards = target / file_names.model_shards(0)
    if first is None and (shards / METADATA).exists():
        return load_shards(bare, shards, strict=strict)
    if first is None:
        raise CheckpointError(f"{target} holds no weights: none of {', '.join(CANDIDATES)} is there. Check the path.")
    paths = read_index(first) if first.suffix == ".json" else [first]
    weights = read_weights(paths)
    tensors = fill_in(bare, weights)
    check_names_and_shapes(bare, tensors, weights.source, strict=strict)
    return bare.load_state_dict(share_out(tensors, bare.state_dict()), strict=strict)


def save(
    obj: Any,
    f: Any,
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Write an object to a file, once and whole; on rank 0, and the others return at once.

    Args:
        obj: Anything that `torch.save` takes; with `safe_serialization` a dict of tensors.
        f: A path, where the earlier file stays until the new one is complete, or a file that is open for bytes.
        save_on_each_node: True if the first rank of each machine writes.
        safe_serialization: safetensors, with tied tensors under their first name; False: `torch.save`.

    Raises:
        CheckpointError: `safe_serialization`, and `obj` is not a dict of tensors; or `obj` holds sharded tensors.
        OSError: The disk is full or fails.
    """
    if has_spread(obj):
        raise CheckpointError(
            "save() got tensors of which each rank has a part, and would write this rank's part alone. Pass "
            "accelerator.get_state_dict(model), called on every rank, or use save_model or save_state."
        )
    if not writes_here(on_each_node=save_on_each_node):
        return
    if safe_serialization and not isinstance(obj, dict):
        raise CheckpointError(
            f"save() got {type_of(obj)}, and safetensors holds a dict of tensors. Pass a dict of tensors, or "
            "safe_serialization=False."
        )
    if not hasattr(f, "write"):
        write = (lambda path: write_weights(path, obj, safe=True)) if safe_serialization else None
        staging.replace_file(Path(f), write or (lambda path: durable_files.write_object(path, obj)))
    elif safe_serialization:
        check_tensors(obj, safe=True)
        f.write(safetensors.torch.save(*split_tied(obj)))
    else:
        torch.save(obj, f)
