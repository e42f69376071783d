"""`load_state`: everything is read and checked before anything changes."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.training.accumulation.members import parameters_of
from notebook_launcher.training.checkpoints import folders
from notebook_launcher.training.checkpoints.folders import (
    ADVICE,
    METADATA,
    CheckpointError,
    check_file,
    contents,
    continue_after,
    folder_to_load,
    newest_of,
    read_manifest,
)
from notebook_launcher.training.checkpoints.models import (
    check_names_and_shapes,
    fill_in,
    find_shards,
    load_shards,
    read_weights,
)
from notebook_launcher.training.checkpoints.objects import read_object
from notebook_launcher.training.checkpoints.saving import join_state, merge_windows, restore_window, tensor_names
from notebook_launcher.training.checkpoints.sharded import (
    local_part,
    read_outline,
    read_shards,
    share_out,
    share_out_state,
)
from notebook_launcher.training.checkpoints.writers import Writers, gather_outcomes, on_all_ranks
from notebook_launcher.training.process.arrivals import meet
from notebook_launcher.training.random import derive_rng_states, restore_rng_states
from notebook_launcher.training.spread_tensors import is_spread
from notebook_launcher.training.user_warnings import warn_user
from notebook_launcher.wording import rank_list

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from notebook_launcher.training.checkpoints.folders import Manifest
    from notebook_launcher.training.checkpoints.saving import StatefulObjects
    from notebook_launcher.training.plugins import ProjectConfiguration
    from notebook_launcher.training.process.process_state import ProcessState


MAP_LOCATIONS = (None, "cpu", "on_device")


def load_state(
    stateful: StatefulObjects,
    process: ProcessState,
    config: ProjectConfiguration,
    input_dir: str | os.PathLike[str] | None = None,
    load_kwargs: dict[str, Any] | None = None,
    *,
    saved: Sequence[str] | None = None,
    **load_model_func_kwargs: Any,
) -> Path | None:
    """Load what `save_state` wrote, also with another number of ranks; every rank calls it.

    All files are compared with the manifest and read before anything changes. Checkpoints of Accelerate have no
    manifest, and are loaded unverified. With another number of ranks, the window's gradients are shared out, and the
    random states of new ranks are derived from rank 0's.

    Args:
        stateful: The objects whose states are loaded: as many of each kind as were saved, in the same order.
        process: This process among its peers.
        config: Folder and naming of checkpoints.
        input_dir: The folder; None: the newest by automatic naming.
        saved: Folders of the checkpoints that this run has saved, the newest last: without `input_dir` the newest of
            them is loaded, and nothing if there is none. None: the folder is chosen by `input_dir` or `config`.
        load_kwargs: For `torch.load`. `{"weights_only": False}` lets files construct anything, which can run
            any code.
        load_model_func_kwargs: For the models' `load_state_dict`, such as `strict=False`; and `map_location`,
            `"cpu"` or `"on_device"`: where files are read to.

    Returns:
        The folder; None if nothing was to be loaded.

    Raises:
        ValueError: No folder was given and naming is not automatic, or `map_location` is unknown.
        CheckpointError: A file is missing, damaged, or does not fit; nothing was loaded.
    """
    map_location = load_model_func_kwargs.pop("map_location", None)
    if map_location not in MAP_LOCATIONS:
        raise ValueError(f"map_location={map_location!r} is unknown. It can be 'cpu', 'on_device' or None.")
    strict = bool(load_model_func_kwargs.get("strict", True))
    writers = Writers.of(process, on_each_node=config.save_on_each_node)
    meet("load_state")

    def find() -> Path | None:
        if not writers.leads:
            return None
        return folder_to_load(config, input_dir) if input_dir is not None or saved is None else newest_of(saved)

    folder = gather_outcomes("find the checkpoint", find)[writers.leader]
    if folder is None:
        return None
    device = process.device if map_location == "on_device" else "cpu"
    reader = on_all_ranks("read the manifest", lambda: Reader(folder, process, device, dict(load_kwargs or {})))
    on_all_ranks("verify the checkpoint", lambda: reader.verify(writers))
    states = on_all_ranks("read the checkpoint", lambda: reader.read(stateful))
    models = list(stateful.models)
    if stateful.load_hooks:  # Hooks may remove models from the list: only the files of those that are left are read.
        on_all_ranks("run the hooks", lambda: [hook(models, str(folder)) for hook in stateful.load_hooks])
    weights = on_all_ranks("read the models", lambda: reader.read_models(models, strict=strict))
    # After the models, whose shapes explain better why a window's gradients do not fit.
    window = on_all_ranks("read the window", lambda: reader.read_window(stateful))
    optimizers = on_all_ranks(
        "read what is sharded",
        lambda: [
            reader.read_optimizer_shards(at, optimizer, state)
            for at, (optimizer, state) in enumerate(zip(stateful.optimizers, states.optimizers, strict=True))
        ],
    )
    for remark in reader.remarks if process.is_main_process else ():
        warn_user(remark)

    def apply() -> None:
        for at, (model, tensors) in enumerate(zip(models, weights, strict=True)):
            if reader.has_shards(shards := folders.model_shards(at)):
                load_shards(model, folder / shards, strict=strict)
            else:
                model.load_state_dict(share_out(tensors, model.state_dict()), **load_model_func_kwargs)
        _apply(stateful, states, optimizers, window)

    on_all_ranks("load the checkpoint", apply)
    continue_after(config, folder)
    return folder


def _apply(
    stateful: StatefulObjects, states: ObjectStates, optimizers: list[dict[str, Any]], window: dict[str, Any] | None
) -> None:
    """Load everything but the models."""
    with torch.no_grad():
        for leaf, tensor in zip(stateful.leaves, states.leaves, strict=True):
            leaf.copy_(tensor)
    pairs = [
        *zip(stateful.optimizers, map(with_counters_on_cpu, optimizers), strict=True),
        *zip(stateful.schedulers, states.schedulers, strict=True),
        *zip(stateful.dataloaders, states.dataloaders, strict=False),
        *zip(stateful.custom_objects, states.custom_objects, strict=True),
    ]
    for stateful_object, state in pairs:
        stateful_object.load_state_dict(state)
    for loader in stateful.dataloaders:
        if not loader.use_stateful_dataloader and (loader.was_evaluation or not stateful.loaders_resume):
            loader.restart_epoch(draws_on=stateful.loaders_resume)
    if stateful.scaler is not None and states.scaler is not None:
        stateful.scaler.load_state_dict(states.scaler)
    restore_window(stateful, window)
    if stateful.safepoint is not None:
        stateful.safepoint.continue_after(states.num_updates)
    # Last, since states of the user's objects may draw numbers.
    restore_rng_states(states.rng)


def with_counters_on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with the parameters' step counters on the CPU.

    Optimizers read them at each step, which would wait for the GPU once for each parameter. Those that want them on the
    GPU (`fused`, `capturable`) move them there when they load them.
    """

    def moved(its_state: Any) -> Any:
        step = its_state.get("step") if isinstance(its_state, dict) else None
        return {**its_state, "step": step.cpu()} if isinstance(step, torch.Tensor) else its_state

    if not isinstance(state.get("state"), dict):
        return state
    return {**state, "state": {key: moved(its_state) for key, its_state in state["state"].items()}}


# --------------------------------------------------------------------------------------------------------------------
# Reader of a checkpoint: verifies the files, and that they are complete and fit, before anything changes.


@dataclasses.dataclass(slots=True, kw_only=True)
class ObjectStates:
    """The states of the objects as they were read; the models' weights are read apart."""

    leaves: list[torch.Tensor]
    """The leaf tensors; empty without any."""
    optimizers: list[dict[str, Any]]
    """The optimizers' states; in the sharded layout with references in the place of tensors, until those are read."""
    schedulers: list[dict[str, Any]]
    dataloaders: list[dict[str, Any]]
    """The loaders' states; empty if other loaders were saved."""
    custom_objects: list[Any]
    scaler: dict[str, Any] | None
    """The gradient scaler's state; None if there is no scaler here, or none was saved."""
    rng: dict[str, Any]
    """The states of this rank's random number generators."""
    num_updates: int
    """Updates that the training had made; 0 if that is unknown."""


class Reader:
    """Reads one checkpoint on one rank.

    Args:
        folder: The checkpoint's folder.
        process: This process among its peers.
        device: The device of the tensors that are read, as `torch.load` takes it.
        load_kwargs: Further arguments of `torch.load`.

    Raises:
        CheckpointError: The manifest is damaged.
    """

    def __init__(self, folder: Path, process: ProcessState, device: Any, load_kwargs: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest: Manifest | None = read_manifest(folder)
        self.files = contents(folder) if self.manifest is None else set(self.manifest.files)
        self.remarks: list[str] = []
        """Remarks for the user."""
        self._rank, self._num_processes = process.process_index, process.num_processes
        self._device = device
        self._load_kwargs = load_kwargs
        if self.manifest is None:
            self.remarks.append(
                f"{folder} has no manifest, because Accelerate writes none: its files cannot be verified, and it "
                "holds no positions of loaders."
            )

    def verify(self, writers: Writers) -> None:
        """Compare this rank's share of the files with the manifest; the writers together check all of them.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        if self.manifest is None:
            return
        digests = self.manifest.files
        by_size = sorted(digests, key=lambda name: (-digests[name].bytes, name))
        for name in by_size[writers.index :: writers.size]:
            check_file(self.folder, name, digests[name])

    def read(self, stateful: StatefulObjects) -> ObjectStates:
        """Return the contents of all files, except for the models.

        Raises:
            CheckpointError: Other objects were prepared, or a file cannot be read.
        """
        self._check_counts(stateful)
        optimizers = [self._read_optimizer(at, optimizer) for at, optimizer in enumerate(stateful.optimizers)]
        for at, (optimizer, state) in enumerate(zip(stateful.optimizers, optimizers, strict=True)):
            _check_groups(self.folder / folders.numbered("optimizer", at), optimizer, state)
        rng, num_updates = self._read_rng()
        return ObjectStates(
            leaves=self._read_leaves(stateful),
            optimizers=optimizers,
            schedulers=self._read_states(functools.partial(folders.numbered, "scheduler"), stateful.schedulers),
            dataloaders=self._read_loaders(stateful),
            custom_objects=self._read_states(folders.custom_object, stateful.custom_objects),
            scaler=self._read_scaler(stateful),
            rng=rng,
            num_updates=num_updates,
        )

    def read_models(self, models: list[torch.nn.Module], *, strict: bool) -> list[dict[str, Any]]:
        """Return the tensors of each model.

        Raises:
            CheckpointError: A file cannot be read, or does not fit its model.
        """
        found: list[dict[str, Any]] = []
        for at, model in enumerate(models):
            if self.has_shards(shards := folders.model_shards(at)):
                found.append(find_shards(model, self.folder / shards, strict=strict))
                continue
            safe, pickled = folders.model(at, safe=True), folders.model(at, safe=False)
            name = pickled if pickled in self.files and safe not in self.files else safe
            weights = read_weights([self.folder / name], self._device, **self._load_kwargs)
            tensors = fill_in(model, weights)
            check_names_and_shapes(model, tensors, weights.source, strict=strict)
            found.append(tensors)
        return found

    def read_optimizer_shards(self, at: int, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with this rank's parts of the tensors that it refers to.

        Raises:
            CheckpointError: A tensor is missing, or a file cannot be read.
        """
        names = tensor_names(state)
        if not names:
            return share_out_state(optimizer, state)
        folder = self.folder / folders.optimizer_shards(at)
        outline = read_outline(folder, "optimizer")
        if missing := names - set(outline):
            raise CheckpointError(
                f"{folder} lacks {', '.join(sorted(missing))}, which the optimizer's file refers to; nothing was "
                f"loaded. {ADVICE}"
            )
        state, tensors = join_state(optimizer, state, outline)
        read_shards(folder, {f"optimizer.{name}": tensor for name, tensor in tensors.items()})
        return state

    def has_shards(self, folder: str) -> bool:
        """Return True if a folder inside of the checkpoint is in the sharded layout."""
        return f"{folder}/{METADATA}" in self.files

    def _read_optimizer(self, at: int, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state; where parameters are spread, with tensors that stay in the file until used."""
        spread = any(is_spread(parameter) for parameter in parameters_of(optimizer))
        options = {"mmap": True} if spread and str(self._device) == "cpu" else {}
        state: dict[str, Any] = self._load(folders.numbered("optimizer", at), **options)
        return state

    def _load(self, name: str, **options: Any) -> Any:
        return read_object(self.folder / name, self._device, **{**options, **self._load_kwargs})

    def _check_counts(self, stateful: StatefulObjects) -> None:
        saved = folders.count_objects(self.files) if self.manifest is None else self.manifest.objects
        for kind, number in stateful.counts.items():
            if kind == "dataloaders" or (kind == "models" and self.manifest is None and stateful.load_hooks):
                continue
            there = saved.get(kind, number)
            if there != number:
                verb = "registered" if kind == "custom_objects" else "prepared"
                raise CheckpointError(
                    f"{self.folder} holds {there} {kind.replace('_', ' ')}, and {number} are {verb} here; nothing was "
                    "loaded. Prepare and register the same objects in the same order as when it was saved. For the "
                    f"weights alone: load_model(model, {str(self.folder)!r})."
                )

    def _read_leaves(self, stateful: StatefulObjects) -> list[torch.Tensor]:
        if not stateful.leaves:
            return []
        leaves: list[torch.Tensor] = self._load(folders.LEAVES)
        for at, (mine, theirs) in enumerate(zip(stateful.leaves, leaves, strict=True)):
            if mine.shape != theirs.shape:
                raise CheckpointError(
                    f"{self.folder / folders.LEAVES}: leaf tensor {at} has shape {tuple(theirs.shape)} in the file, "
                    f"and {tuple(mine.shape)} here; nothing was loaded. Prepare tensors of the same shapes, in "
                    "the same order, as when it was saved."
                )
        return leaves

    def _read_loaders(self, stateful: StatefulObjects) -> list[dict[str, Any]]:
        if self.manifest is None:
            return []
        saved, mine = self.manifest.objects.get("dataloaders", 0), len(stateful.dataloaders)
        if saved != mine:
            self.remarks.append(
                f"{self.folder} holds the positions of {saved} loaders, and {mine} are prepared here: they start "
                "from the beginning."
            )
            return []
        return [self._load(folders.numbered("dataloader", at)) for at in range(mine)]

    def _read_states(self, name: Callable[[int], str], objects: list[Any]) -> list[Any]:
        """Return the states of objects: this rank's where they differed between ranks, else rank 0's."""
        saved = 0 if self.manifest is None else self.manifest.num_processes
        states = []
        for at, obj in enumerate(objects):
            shared, mine = name(at), folders.of_rank(name(at), self._rank)
            by_rank = {folders.of_rank(shared, rank) for rank in range(saved)} & self.files
            states.append(self._load(mine if mine in by_rank else shared))
            if by_rank and saved != self._num_processes:
                fewer = self._num_processes < saved
                others = rank_list(list(range(*sorted((saved, self._num_processes)))))
                self.remarks.append(
                    f"{self.folder} holds a state of {type(obj).__name__} ({shared}) for each of {saved} ranks, and "
                    f"{self._num_processes} load it: "
                    + (f"the states of {others} are left out." if fewer else f"{others} got rank 0's.")
                )
        return states

    def _read_scaler(self, stateful: StatefulObjects) -> dict[str, Any] | None:
        if stateful.scaler is None:
            return None
        if folders.SCALER not in self.files:
            self.remarks.append(
                f"{self.folder} was not saved in fp16: the gradient scaler begins with its initial scale."
            )
            return None
        scaler: dict[str, Any] = self._load(folders.SCALER)
        return scaler

    def read_window(self, stateful: StatefulObjects) -> dict[str, Any] | None:
        """Return this rank's part of the open window; None if none was open.

        Raises:
            CheckpointError: The gradients are of a model that was sharded in another way.
        """
        saved = 0 if self.manifest is None else self.manifest.num_processes
        ranks = [self._rank] if saved == self._num_processes else range(saved)
        windows: list[dict[str, Any]] = [
            self._load(folders.window(rank)) for rank in ranks if folders.window(rank) in self.files
        ]
        if not windows:
            return None
        parameters = dict(stateful.parameters())
        way_out = "nothing was loaded. Save where a window ends, or load with the same sharding and as many ranks."
        if saved != self._num_processes and any(map(is_spread, parameters.values())):
            raise CheckpointError(
                f"{self.folder} holds a window's gradients of a sharded model on {saved} ranks, which "
                f"{self._num_processes} cannot share; {way_out}"
            )
        for name, gradient in ((name, each) for window in windows for name, each in window["gradients"].items()):
            if name in parameters and gradient.shape != local_part(parameters[name]).shape:
                raise CheckpointError(
                    f"{self.folder} holds a window's gradients of a model that was sharded in another way: {name} has "
                    f"{list(gradient.shape)} on a rank there and {list(local_part(parameters[name]).shape)} here; "
                    f"{way_out}"
                )
        if saved == self._num_processes:
            return windows[0]
        return merge_windows(windows, num_processes=self._num_processes, nominal_divisor=stateful.nominal_divisor)

    def _read_rng(self) -> tuple[dict[str, Any], int]:
        """Return the states of this rank's random number generators, and the number of updates beside them."""
        new = [rank for rank in range(self._num_processes) if folders.random_states(rank) not in self.files]
        if new and folders.random_states(0) in self.files:
            self.remarks.append(
                f"{self.folder} was saved by fewer ranks: the random number generators of "
                f"{rank_list(new)} start from states derived from rank 0's."
            )
        is_new = self._rank in new
        states: dict[str, Any] = self._load(folders.random_states(0 if is_new else self._rank))
        num_updates = int(states.get("updates", 0))
        return derive_rng_states(states, self._rank) if is_new else states, num_updates


def _check_groups(path: Path, optimizer: Any, state: dict[str, Any]) -> None:
    """Raise CheckpointError if the optimizer has other parameter groups."""
    mine = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in state["param_groups"]]
    if mine != theirs:
        raise CheckpointError(
            f"{path} is of an optimizer whose groups have {theirs} parameters; the groups of this one have {mine}; "
            "nothing was loaded. Build the optimizer as it was when it was saved."
        )
