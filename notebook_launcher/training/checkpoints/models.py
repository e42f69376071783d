"""A model's weights in files, as Hugging Face's libraries name and read them."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch

from notebook_launcher import files
from notebook_launcher.training.checkpoints import folders, sharded
from notebook_launcher.training.checkpoints.folders import ADVICE, CheckpointError, FileDigest
from notebook_launcher.training.checkpoints.objects import read_object
from notebook_launcher.training.checkpoints.writers import gather_outcomes, on_all_ranks, run_each, writes_here
from notebook_launcher.training.process.arrivals import meet
from notebook_launcher.training.unwrapping import unwrap_model
from notebook_launcher.wording import class_name, one_line, type_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

# --------------------------------------------------------------------------------------------------------------------
# `save_model` and `load_model`: a model's weights as Hugging Face's libraries read them.


WEIGHT_FILES = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
"""Names of all files that a save of a model may consist of."""
CANDIDATES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


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
    spread, leads = sharded.has_spread(state), writes_here()
    if spread:
        meet("save_model")
    elif not leads:
        return
    check_tensors(state, safe=safe_serialization)
    plan = plan_files(state, max_size, safe=safe_serialization)
    if spread:  # Rank 0 plans, because another rank's part of a tensor may be empty, which hides that it is tied.
        plan = gather_outcomes("plan the files", lambda: plan)[0]
    together = on_all_ranks if spread else lambda _doing, step: step()
    stage = together("begin the files", lambda: folders.open_stage(target) if leads else None)

    def publish() -> None:
        if stage is not None:
            before = folders.contents(target) if target.exists() else set()
            earlier = {name for name in before if WEIGHT_FILES.fullmatch(name)}
            stale = earlier - folders.contents(stage)
            folders.publish(stage, target, last=plan.last, stale=stale, replaceable=before == earlier)

    try:
        steps: list[Callable[[], Any]] = []
        for file, names in plan.files.items():
            wanted = set(names)
            part = {name: state[name] for name in state if name in wanted}
            path = None if stage is None else stage / file
            steps.append(functools.partial(write_weights, path, part, safe=safe_serialization))
        if plan.index is not None and stage is not None:
            text = json.dumps(plan.index, indent=2, sort_keys=True) + "\n"
            steps.append(functools.partial(folders.write_text, stage / plan.last, text))
        together("write the model", lambda: run_each(steps))
        together("put the model in place", publish)
    except BaseException:
        if stage is not None:
            shutil.rmtree(stage, ignore_errors=True)
        raise


@dataclasses.dataclass(frozen=True, slots=True)
class FilePlan:
    """The files of a model."""

    files: dict[str, list[str]]
    """The names of the tensors in each file, tied ones by all their names."""
    index: dict[str, Any] | None
    """The index of several files, in Hugging Face's form; None for a single file."""
    last: str
    """The file that readers begin with."""


def gather_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """Return a model's state dict; of a sharded one, on rank 0 whole and on the CPU, and on the others empty."""
    if not hasattr(model, "state_dict"):
        raise TypeError(f"get_state_dict({class_name(model)}): pass a model.")
    state: dict[str, Any] = model.state_dict()
    if not sharded.has_spread(state):
        return state
    meet("get_state_dict")
    whole = sharded.gather_tree(state, keep=writes_here())
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
    folders.settle(target)
    first = next((target / name for name in CANDIDATES if (target / name).exists()), None)
    bare = unwrap_model(model, keep_torch_compile=False)
    shards = target / folders.MODEL_SHARDS.format(0)
    if first is None and (shards / folders.METADATA).exists():
        return load_shards(bare, shards, strict=strict)
    if first is None:
        raise CheckpointError(f"{target} holds no weights: none of {', '.join(CANDIDATES)} is there. Check the path.")
    tensors = read_weights(bare, read_index(first) if first.suffix == ".json" else [first], strict=strict)
    return bare.load_state_dict(sharded.share_out(tensors, bare.state_dict()), strict=strict)


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
    if sharded.has_spread(obj):
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
        write = functools.partial(write_weights, state=obj, safe=True)
        write_part = write if safe_serialization else lambda path: folders.write_object(path, obj)
        files.replace_file(Path(f), write_part, in_own_folder=True)
        folders.sync_folder(Path(os.path.realpath(f)).parent)
    elif safe_serialization:
        check_tensors(obj, safe=True)
        f.write(safetensors.torch.save(*split_tied(obj)))
    else:
        torch.save(obj, f)


# --------------------------------------------------------------------------------------------------------------------
# Packs state dicts into files: each tensor once, and no file larger than asked for.


def find_tied(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the second names of tied tensors, each with the tensor's first name.

    Two tensors are one if they show the same memory in the same way. Views of different parts of one
    storage are different tensors.
    """
    first: dict[tuple[Any, ...], str] = {}
    tied = {}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            continue
        tensor = sharded.local_part(tensor)  # noqa: PLW2901 - a spread tensor has no memory of its own
        if tensor.is_meta or tensor.numel() == 0:
            continue
        view = tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()
        kept = first.setdefault(view, name)
        if kept != name:
            tied[name] = kept
    return tied


def compact(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with every tensor contiguous and in a storage of its own size; tied tensors stay tied.

    `torch.save` writes a view's whole storage, and safetensors refuses tensors that overlap.
    """
    tied = find_tied(state)
    compacted: dict[str, Any] = {}
    for name, value in state.items():
        if name in tied:
            compacted[name] = compacted[tied[name]]
        elif isinstance(value, torch.Tensor):
            compacted[name] = _alone(value.detach())
        else:
            compacted[name] = value
    return compacted


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous()


def parse_size(size: int | str) -> int:
    """Return a size in bytes: `5_000_000`, `"5MB"` (5 * 10**6) or `"5MiB"` (5 * 2**20)."""
    number = size if type(size) is int else 0
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B\s*", str(size).upper())
    if match is not None:
        number = int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " "))
    if number < 1:
        raise ValueError(
            f"max_shard_size={size!r} is not a size. It can be a number of bytes, or text such as '200MB' or '10GB'."
        )
    return number


def plan_files(state: Mapping[str, Any], max_size: int, *, safe: bool) -> FilePlan:
    """Spread tensors over files of at most `max_size` bytes, in their order.

    A tensor that is larger than a file may be gets a file of its own. Tied tensors share a file. With `safe`, their
    second names stand in the metadata of the file alone, and not in the index.
    """
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    tied = find_tied(state)
    groups: list[list[str]] = []
    open_group: list[str] | None = None
    filled = total = 0
    for name in (name for name in state if name not in tied):
        value = state[name]
        size = value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
        total += size
        if size > max_size:
            groups.append([name])
        elif open_group is None or filled + size > max_size:
            open_group, filled = [name], size
            groups.append(open_group)
        else:
            open_group.append(name)
            filled += size
    for name, first in tied.items():
        next(group for group in groups if first in group).append(name)
    if len(groups) < 2:
        name = f"{stem}.{suffix}"
        return FilePlan({name: groups[0] if groups else []}, None, name)
    files = {f"{stem}-{at:05d}-of-{len(groups):05d}.{suffix}": names for at, names in enumerate(groups, 1)}
    places = {name: file for file, names in files.items() for name in names if not (safe and name in tied)}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    return FilePlan(files, index, f"{stem}.{suffix}.index.json")


def check_tensors(state: Mapping[str, Any], *, safe: bool) -> None:
    """Raise CheckpointError if something in a model's state cannot be written."""
    absent = [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]
    if absent:
        raise CheckpointError(
            f"{_some(absent)} on the meta device, which holds no data. Load the weights before saving them."
        )
    others = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if safe and others:
        kind = type(state[others[0]]).__name__
        raise CheckpointError(
            f"{_some(others)} no tensor but {kind}, and safetensors holds only tensors. Pass safe_serialization=False."
        )


def _some(names: Iterable[str]) -> str:
    first, *more = names
    return f"{first!r} and {len(more)} more are" if more else f"{first!r} is"


# --------------------------------------------------------------------------------------------------------------------
# A model's weights in files, by Hugging Face's names, and back into a model.


def split_tied(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file for a state; it holds each tensor once.

    A tied tensor stands under its first name; the metadata have the others, each with the first.
    """
    state = compact(state)
    tied = find_tied(state)
    metadata = {**tied, "format": "pt"}
    return {name: tensor for name, tensor in state.items() if name not in tied}, metadata


def write_weights(path: Path | None, state: Mapping[str, Any], *, safe: bool) -> FileDigest | None:
    """Write a model's state, `safe` as safetensors; spread tensors are gathered, and all ranks call it together.

    The path is None on ranks that do not write. The state has the same names on all ranks.
    """
    check_tensors(state, safe=safe)
    tied = find_tied(state)
    whole = sharded.gather_tree(state, keep=path is not None)
    if path is None:
        return None
    whole = {**whole, **{name: whole[first] for name, first in tied.items()}}
    if not safe:
        return folders.write_object(path, compact(whole))
    try:
        return folders.write_tensors(path, *split_tied(whole))
    except (KeyError, ValueError) as error:
        # A dtype that it does not know is a KeyError; a sparse tensor a ValueError.
        raise CheckpointError(
            f"safetensors cannot hold the weights ({error}). Pass safe_serialization=False, or convert them."
        ) from error


def read_weights(
    model: torch.nn.Module, paths: Sequence[Path], map_location: Any = "cpu", *, strict: bool = True, **load_kwargs: Any
) -> dict[str, Any]:
    """Return the tensors of all files by name, tied tensors also by their other names in the model or the files.

    A file that is missing or cannot be read, and names or shapes that are not the model's, are a CheckpointError.
    """
    stored: dict[str, Any] = {}
    aliases: dict[str, str] = {}  # Second names that tensors had when they were saved.
    for path in paths:
        if path.suffix != ".safetensors":
            stored.update(read_object(path, map_location, **load_kwargs))
            continue
        try:
            files.check_plain(path)
            stored.update(safetensors.torch.load_file(path, device=str(map_location)))
            with safetensors.safe_open(path, framework="pt") as file:
                aliases.update(file.metadata() or {})
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing: it was never saved, or was removed since. Save the model again."
            ) from None
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}. {ADVICE}") from error
    state = model.state_dict()
    tied = find_tied(state)
    filled = dict(stored)
    for name in state:
        if name not in filled:
            first = tied.get(name, name)
            mates = [aliases.get(name), first, *(other for other, owner in tied.items() if owner == first)]
            known = next((mate for mate in mates if mate in stored), None)
            if known is not None:
                filled[name] = stored[known]
    source = f"{paths[0] if len(paths) == 1 else paths[0].parent}"
    check_names_and_shapes(model, filled, source, strict=strict)
    return filled


def read_index(path: Path) -> list[Path]:
    """Return the files that an index names, none of which may be outside its folder."""
    try:
        names = set(json.loads(files.read_text(path, folders.MAX_TEXT))["weight_map"].values())
    except (*folders.DAMAGE, OSError) as error:
        why = one_line(repr(error))
        raise CheckpointError(f"{path} is damaged: it does not parse ({why}). Save the model again.") from error
    if outside := [name for name in names if folders.leaves_folder(name)]:
        raise CheckpointError(f"{path} is damaged: {outside[0]!r} is outside the folder. Save the model again.")
    return [path.parent / name for name in sorted(names)]


def check_names_and_shapes(
    model: torch.nn.Module, tensors: Mapping[str, Any], source: str, *, strict: bool = True, always: bool = False
) -> None:
    """Raise CheckpointError, before anything is loaded, if names (only with `strict`) or shapes are not the model's.

    A model whose hooks of `load_state_dict` may rename tensors is not compared, but with `always`.
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
            f"{source} does not fit {class_name(model)}; nothing was loaded:{''.join(lines)}\nBuild the model as it "
            "was when it was saved."
        )


def load_shards(model: torch.nn.Module, folder: Path, *, strict: bool = True) -> Any:
    """Load a model from a folder of the sharded layout; return the missing and the unexpected names."""
    outline = find_shards(model, folder, strict=strict)
    state = model.state_dict()
    with torch.no_grad():
        sharded.read_shards(folder, {f"model.{name}": tensor for name, tensor in state.items() if name in outline})
    missing, unexpected = sorted(set(state) - set(outline)), sorted(set(outline) - set(state))
    return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)  # noqa: SLF001 - what load_state_dict returns


def find_shards(model: torch.nn.Module, folder: Path, *, strict: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder of the sharded layout, on the meta device, after checking that they fit."""
    outline = sharded.read_outline(folder, "model")
    check_names_and_shapes(model, outline, f"{folder}", strict=strict, always=True)
    return outline


def _listed(what: str, names: set[str]) -> str:
    return f"\n\t{what} key(s) in state_dict: {', '.join(map(repr, sorted(names)))}." if names else ""


def _shape(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
        return None
    return tuple(value.shape)
