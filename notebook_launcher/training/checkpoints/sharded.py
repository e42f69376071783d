"""Tensors that FSDP2 spreads over ranks: gathered whole, and cut into parts without communication."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from notebook_launcher.training.accumulation.members import parameters_of
from notebook_launcher.training.checkpoints.folders import ADVICE, METADATA, CheckpointError, FileDigest, measure
from notebook_launcher.training.spread_tensors import is_spread, whole_tensor
from notebook_launcher.training.user_warnings import warn_user
from notebook_launcher.wording import format_bytes, unknown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from notebook_launcher.training.process.process_state import ProcessState


def has_spread(tree: Any) -> bool:
    """Return True if a tensor anywhere in nested dicts and lists is spread over ranks."""
    return any(map(is_spread, tree_leaves(tree)))


def gather_tree(tree: Any, *, keep: bool) -> Any:
    """Return nested dicts and lists with every spread tensor whole, on the CPU; all ranks call it together.

    Ranks that do not keep the whole tensors get None in their place. Without spread tensors the tree comes back as it
    is, and no rank waits for another.
    """

    def gather(tensor: Any) -> Any:
        whole = whole_tensor(tensor)
        return whole.cpu() if keep else None

    return tree_map_only(is_spread, gather, tree) if has_spread(tree) else tree


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


def write_shards(folder: Path, tensors: Mapping[str, Any]) -> dict[str, FileDigest]:
    """Write this rank's parts of tensors by nested names; all ranks call it together.

    Returns sizes and digests of the files that this rank wrote, by their names in the folder. They are empty if another
    rank failed, which the caller has to exchange; this rank's own error is raised.
    """
    import torch.distributed.checkpoint as dcp

    is_distributed = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if is_distributed else 0
    try:
        with _quiet():
            dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder), no_dist=not is_distributed)
    except dcp.CheckpointException as error:
        if rank in error.failures:
            raise error.failures[rank][0] from None
        return {}
    names = [path.name for path in sorted(folder.glob(f"__{rank}_*"))] + ([METADATA] if rank == 0 else [])
    return {name: measure(folder / name, sync=True) for name in names}


def read_outline(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder of `write_shards` by name, on the meta device.

    The names lack their first part, the kind: `"model"` or `"optimizer"`.
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
    """Fill tensors in place with the saved ones of their names; each rank reads what it needs, and waits for none."""
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
    """Return True if tensors that are spread over ranks are written in parts: as asked for, or else by their size."""
    spread = [leaf for leaf in tree_leaves(list(states)) if is_spread(leaf)]
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
