"""Tensors that FSDP2 spreads over ranks: gathered whole one at a time, and cut into parts without communication."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import pickle
import warnings
import zipfile
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_launcher.training.accumulation.members import parameters_of
from notebook_launcher.training.checkpoints.folders import (
    ADVICE,
    METADATA,
    CheckpointError,
    FileDigest,
    measure,
    write_object,
)
from notebook_launcher.training.spread_tensors import is_spread, whole_tensor
from notebook_launcher.training.user_warnings import warn_user
from notebook_launcher.wording import format_bytes, unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from notebook_launcher.training.process.process_state import ProcessState


def has_spread(tree: Any) -> bool:
    """Return True if a tensor anywhere in nested dicts and lists is spread over ranks."""
    return any(is_spread(leaf) for leaf in leaves(tree))


def gather_tree(tree: Any, *, keep: bool) -> Any:
    """Return nested dicts and lists with every spread tensor whole, on the CPU; all ranks call it together.

    Args:
        tree: Of a state dict. Without spread tensors it comes back as it is, and no rank waits for another.
        keep: True if this rank wants the whole tensors; the others get None in their place.
    """
    if is_spread(tree):
        whole = whole_tensor(tree)
        return whole.cpu() if keep else None
    if not has_spread(tree):
        return tree
    if isinstance(tree, dict):
        return {name: gather_tree(value, keep=keep) for name, value in tree.items()}
    return type(tree)(gather_tree(value, keep=keep) for value in tree)


def leaves(tree: Any) -> Iterable[Any]:
    """Yield what nested dicts, lists and tuples hold, in their order."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from leaves(value)
    else:
        yield tree


def share_out(tensors: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors cut to this rank's parts: each as the tensor of the same name in `state` is spread."""
    return {name: spread_like(state[name], whole) if name in state else whole for name, whole in tensors.items()}


def share_out_state(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with its whole tensors spread as the parameters are."""
    spread = dict(state["state"])
    for at, parameter in enumerate(parameters_of(optimizer)):
        if is_spread(parameter) and at in spread:
            spread[at] = {name: spread_like(parameter, value) for name, value in spread[at].items()}
    return {**state, "state": spread}


def spread_like(model: Any, whole: Any) -> Any:
    """Return this rank's part of a whole tensor of the model's shape, in memory of its own; all else as it is.

    No rank waits for another, because every rank has the whole tensor, or its file in the address space.
    """
    if not is_spread(model) or not isinstance(whole, torch.Tensor) or whole.is_meta or whole.shape != model.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    options: dict[str, Any] = {}
    if "src_data_rank" in inspect.signature(distribute_tensor).parameters:  # since torch 2.7
        options["src_data_rank"] = None
    part = distribute_tensor(whole, model.device_mesh, model.placements, **options).to_local()
    return from_local_part(part.to(model.device, copy=True), model)


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    part: torch.Tensor = tensor.to_local() if is_spread(tensor) else tensor
    return part


def from_local_part(part: torch.Tensor, model: Any) -> torch.Tensor:
    """Return the tensor that a rank's part belongs to, spread as `model` is."""
    if not is_spread(model):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )


# --------------------------------------------------------------------------------------------------------------------
# Files of the sharded layout: each rank writes its parts of the tensors, and any number of ranks reads them.
#
# `torch.distributed.checkpoint` writes and reads them. A folder holds a file for each rank that had something to
# write, and `.metadata` with the place of every part of every tensor.
#
# torch's module is imported by the functions that need it: it takes 1.2 s of processor time (DTensor and SymPy come
# with it), which every program with an Accelerator would pay.


def write_shards(folder: Path, tensors: Mapping[str, Any]) -> bool:
    """Write this rank's parts of tensors; all ranks call it together.

    Args:
        folder: Made if it does not exist; all ranks see the same one.
        tensors: Tensors by nested names. A plain tensor is written by a rank that has it.

    Returns:
        False if another rank failed, which the caller has to exchange.

    Raises:
        Exception: Error of this rank.
    """
    import torch.distributed.checkpoint as dcp

    try:
        with _quiet():
            dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder), no_dist=not _is_distributed())
    except dcp.CheckpointException as error:
        mine = error.failures.get(dist.get_rank() if _is_distributed() else 0)
        if mine is not None:
            raise mine[0] from None
        return False
    return True


def measure_shards(folder: Path, rank: int) -> dict[str, FileDigest]:
    """Return sizes and digests of the files that a rank wrote into a folder, by their names there."""
    names = [path.name for path in sorted(folder.glob(f"__{rank}_*"))] + ([METADATA] if rank == 0 else [])
    return {name: measure(folder / name, sync=True) for name in names}


def read_outline(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder by name, on the meta device.

    Args:
        folder: Written by `write_shards`.
        kind: The first part of the names, `"model"` or `"optimizer"`, which the names in the result lack.

    Raises:
        CheckpointError: The folder's `.metadata` is missing, cannot be read, or refers to types of other kinds.
    """
    from notebook_launcher.training.checkpoints.shard_reader import ShardReader

    try:
        entries = ShardReader(folder).read_metadata().state_dict_metadata
        return {
            name.removeprefix(f"{kind}."): torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for name, entry in entries.items()
            if name.startswith(f"{kind}.") and hasattr(entry, "properties")
        }
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder / METADATA} cannot be read: {error}. {ADVICE}") from error


def read_shards(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors in place with the saved ones of their names; each rank reads what its parts need, without waiting.

    Raises:
        CheckpointError: A tensor is missing, or has another shape, or a file cannot be read.
    """
    import torch.distributed.checkpoint as dcp

    from notebook_launcher.training.checkpoints.shard_reader import ShardReader

    try:
        with _quiet():
            dcp.load(dict(tensors), storage_reader=ShardReader(folder), no_dist=True)
    except dcp.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{folder} cannot be read: {type(cause).__name__}: {cause}. {ADVICE}") from cause


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from warning in every rank that no ranks are asked, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*in a single process")
        yield


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


# --------------------------------------------------------------------------------------------------------------------
# The two layouts of a checkpoint of sharded models: each tensor whole in one file, or each rank's parts in its own.
#
# The layouts have Accelerate's names, `FULL_STATE_DICT` and `SHARDED_STATE_DICT`.


WHOLE, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
LARGEST_WHOLE = 10 * 10**9
"""Bytes of sharded tensors that are written whole by default. All of them pass through rank 0."""


def check_layout(state_dict_type: str | None, *, on_each_node: bool) -> None:
    """Raise ValueError for a layout that does not exist, or that cannot be written to a folder of each machine."""
    if state_dict_type not in (None, WHOLE, SHARDED):
        raise ValueError(unknown("state_dict_type", state_dict_type, (WHOLE, SHARDED), more=" or None"))
    if state_dict_type == SHARDED and on_each_node:
        raise ValueError(
            f"state_dict_type={SHARDED!r} needs one folder for all machines, and save_on_each_node=True gives each its "
            f"own. Save to a shared disk with save_on_each_node=False, or pass state_dict_type={WHOLE!r}."
        )


def choose_sharded(
    states: Iterable[Any], state_dict_type: str | None, process: ProcessState, *, on_each_node: bool
) -> bool:
    """Return True if tensors that are spread over ranks are written in parts; the same on all ranks.

    Args:
        states: States of models and optimizers.
        state_dict_type: The layout that was asked for; None: by size.
        process: This process among its peers; rank 0 chooses the layout of a large model.
        on_each_node: True if each machine has a folder of its own.
    """
    spread = [leaf for state in states for leaf in leaves(state) if is_spread(leaf)]
    if state_dict_type is not None:
        return state_dict_type == SHARDED and bool(spread)
    total = sum(tensor.numel() * tensor.element_size() for tensor in spread)
    if total <= LARGEST_WHOLE or on_each_node:
        return False
    if process.is_main_process:
        warn_user(
            f"save_state writes {format_bytes(total)} of sharded tensors in the sharded layout, a file for each rank; "
            f"load_state reads it with any number of ranks. For one file: state_dict_type={WHOLE!r}."
        )
    return True


# --------------------------------------------------------------------------------------------------------------------
# Whole files of spread tensors, written one tensor at a time, so that no rank ever holds a whole model.
#
# Every rank calls the functions with a state of the same structure, because each tensor is gathered by all ranks
# together. A rank whose disk fails therefore takes part until the last tensor, and raises then.


DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in a safetensors file."""


class _Postponed:
    """Steps of this rank alone between collectives: the first failure is kept, and later steps are skipped."""

    def __init__(self) -> None:
        self._failure: Exception | None = None

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        if self._failure is not None:
            return None
        try:
            return step(*args)
        except Exception as error:  # raised by finish()
            self._failure = error

    def finish(self) -> None:
        """Raise the failure."""
        if self._failure is not None:
            raise self._failure


def stream_tensors(path: Path | None, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> FileDigest | None:
    """Write tensors as safetensors, gathering one at a time; all ranks call it together.

    The library itself takes all tensors at once. The format is the length of a header, the header in JSON, and the
    bytes of the tensors one after the other.

    Args:
        path: The file; None on ranks that do not write.
        tensors: Dense tensors by name, the same names on all ranks.
        metadata: Texts for the header.

    Raises:
        CheckpointError: safetensors has no name for a dtype; on all ranks.
        OSError: The disk is full or fails.
    """
    # Large items first, as the library does it, so that every tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header = _header(names, tensors, metadata)
    postponed, file = _Postponed(), None
    digest = hashlib.sha256()

    def put(data: Any) -> None:
        assert file is not None
        file.write(data)
        digest.update(data)

    try:
        if path is not None:
            file = postponed.run(path.open, "wb")
            postponed.run(put, header)
        for name in names:
            whole = whole_tensor(tensors[name])
            if path is not None:
                postponed.run(lambda whole=whole: put(_bytes_of(whole)))
        postponed.finish()
        return None if file is None else FileDigest(_close(file), digest.hexdigest())
    finally:
        if file is not None:
            file.close()


def _header(names: Iterable[str], tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"safetensors cannot hold the weights ({name} is of {tensor.dtype}). Pass safe_serialization=False, or "
                "convert them."
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _close(file: IO[bytes]) -> int:
    file.flush()
    os.fsync(file.fileno())
    return file.tell()


def stream_object(path: Path | None, obj: Any) -> FileDigest | None:
    """Write nested dicts and lists as `torch.save` does, gathering one tensor at a time; all ranks call it together.

    The file is written without the tensors' bytes first, and they are put in their places one by one.

    Args:
        path: The file; None on ranks that do not write.
        obj: Of the same structure on all ranks.

    Raises:
        OSError: The disk is full or fails.
    """
    if not has_spread(obj):
        return None if path is None else write_object(path, obj)
    postponed = _Postponed()
    places = None if path is None else postponed.run(_write_frame, path, obj)
    gathered: list[torch.Tensor] = []
    for at, tensor in enumerate(_tensors(obj)):
        whole = whole_tensor(tensor)
        if path is None:
            continue
        if places is None:
            postponed.run(lambda whole=whole: gathered.append(whole.cpu()))
        else:
            postponed.run(_fill, path, places[at], whole)
    postponed.finish()
    if path is None:
        return None
    if places is None:
        return write_object(path, _rebuild(obj, iter(gathered)))
    return measure(path, sync=True)


def _tensors(obj: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(obj) if isinstance(leaf, torch.Tensor)]


def _write_frame(path: Path, obj: Any) -> list[int] | None:
    """Write the file with room for the tensors' bytes; return the place of each, or None if torch does not know it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        frame = _rebuild(obj, (torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in _tensors(obj)))
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(frame, path)
    with FakeTensorMode():
        found = _tensors(torch.load(path, weights_only=False))  # this function wrote the file itself
    places = [getattr(tensor.untyped_storage(), "_checkpoint_offset", None) for tensor in found]  # since torch 2.7
    with zipfile.ZipFile(path) as archive:
        held = sum("/data/" in name for name in archive.namelist())
    # An object of another kind may hold tensors too, whose bytes would be missing.
    return [place for place in places if place is not None] if held == len(places) and None not in places else None


def _fill(path: Path, place: int, whole: torch.Tensor) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(_bytes_of(whole))


def _rebuild(tree: Any, tensors: Any) -> Any:
    """Return nested dicts and lists with other tensors, in their order."""
    if isinstance(tree, torch.Tensor):
        return next(tensors)
    if isinstance(tree, dict):
        return {name: _rebuild(value, tensors) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_rebuild(value, tensors) for value in tree)
    return tree
