"""`load_state`: everything is read and checked before anything changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.training.accumulation.members import parameters_of
from notebook_launcher.training.checkpoints import folders, models, saving, sharded
from notebook_launcher.training.checkpoints.folders import ADVICE, CheckpointError
from notebook_launcher.training.checkpoints.objects import read_object
from notebook_launcher.training.checkpoints.writers import Writers, gather_outcomes, on_all_ranks
from notebook_launcher.training.process.arrivals import meet
from notebook_launcher.training.random import derive_rng_states, restore_rng_states
from notebook_launcher.training.spread_tensors import is_spread
from notebook_launcher.training.user_warnings import warn_user
from notebook_launcher.wording import rank_list

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from pathlib import Path

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
    """Load what `save_state` wrote, as `Accelerator.load_state` says, and return the folder; None if there is none.

    All files are compared with the manifest and read before anything changes. Checkpoints of Accelerate have no
    manifest, and are loaded unverified. With another number of ranks, the window's gradients are shared out, and the
    random states of new ranks are derived from rank 0's. Without a folder the newest of those that this run has `saved`
    is loaded or, where that is None, the newest by automatic naming.

    `load_model_func_kwargs` are for the models' `load_state_dict`, such as `strict=False`; and `map_location`, `"cpu"`
    or `"on_device"`: where files are read to.
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
        if input_dir is None and saved is not None:
            return folders.newest_of(saved)
        return folders.folder_to_load(config, input_dir)

    folder = gather_outcomes("find the checkpoint", find)[writers.leader]
    if folder is None:
        return None
    device = process.device if map_location == "on_device" else "cpu"
    reader = on_all_ranks(
        "read the manifest", lambda: Reader(folder, stateful, process, device, dict(load_kwargs or {}))
    )
    on_all_ranks("verify the checkpoint", lambda: reader.verify(writers))
    on_all_ranks("read the checkpoint", reader.read)
    if hooks := list(stateful.prepared.load_hooks.values()):
        # Hooks may remove models from the list: only the files of those that are left are read.
        on_all_ranks("run the hooks", lambda: [hook(reader.models, str(folder)) for hook in hooks])
    on_all_ranks("read the models", lambda: reader.read_models(strict=strict))
    # After the models, whose shapes explain better why a window's gradients do not fit.
    on_all_ranks("read the window", reader.read_window)
    on_all_ranks("read what is sharded", reader.read_optimizer_shards)
    for remark in reader.remarks if process.is_main_process else ():
        warn_user(remark)
    on_all_ranks("load the checkpoint", lambda: reader.apply(load_model_func_kwargs))
    folders.continue_after(config, folder)
    return folder


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


class Reader:
    """Reads one checkpoint on one rank; raises `CheckpointError` for what is damaged or does not fit.

    `device` and `load_kwargs` are for `torch.load`.
    """

    def __init__(
        self, folder: Path, stateful: StatefulObjects, process: ProcessState, device: Any, load_kwargs: dict[str, Any]
    ) -> None:
        self.folder = folder
        self.stateful = stateful
        self.models = list(stateful.models)
        """The models that are loaded: hooks may remove some."""
        self.remarks: list[str] = []
        """Remarks for the user."""
        self._manifest = folders.read_manifest(folder)
        self._files = folders.contents(folder) if self._manifest is None else set(self._manifest.files)
        self._saved = 0 if self._manifest is None else self._manifest.num_processes
        self._rank, self._num_processes = process.process_index, process.num_processes
        self._device = device
        self._load_kwargs = load_kwargs
        self._weights: list[dict[str, Any]] = []
        """The tensors of each model."""
        self._optimizers: list[dict[str, Any]] = []
        """The optimizers' states; in the sharded layout with references in the place of tensors, until those are
        read."""
        self._leaves: list[torch.Tensor] = []
        self._others: list[tuple[Any, Any]] = []
        """Schedulers, loaders, the user's objects and the scaler, each with its state."""
        self._window: dict[str, Any] | None = None
        self._rng: dict[str, Any] = {}
        self._num_updates = 0
        if self._manifest is None:
            self.remarks.append(
                f"{folder} has no manifest, because Accelerate writes none: its files cannot be verified, and it "
                "holds no positions of loaders."
            )

    def verify(self, writers: Writers) -> None:
        """Compare this rank's share of the files with the manifest; the writers together check all of them."""
        digests = {} if self._manifest is None else self._manifest.files
        by_size = sorted(digests, key=lambda name: (-digests[name].bytes, name))
        for name in by_size[writers.index :: writers.size]:
            folders.check_file(self.folder, name, digests[name])

    def read(self) -> None:
        """Read all files, except for the models, the window and what is sharded."""
        stateful = self.stateful
        self._check_counts()
        for at, optimizer in enumerate(stateful.prepared.optimizers):
            # Where parameters are spread, with tensors that stay in the file until used.
            spread = any(is_spread(parameter) for parameter in parameters_of(optimizer))
            options = {"mmap": True} if spread and str(self._device) == "cpu" else {}
            name = folders.numbered("optimizer", at)
            state = self._load(name, **options)
            groups = optimizer.param_groups, state["param_groups"]
            mine, theirs = ([len(group["params"]) for group in each] for each in groups)
            if mine != theirs:
                raise CheckpointError(
                    f"{self.folder / name} is of an optimizer whose groups have {theirs} parameters; the groups of "
                    f"this one have {mine}; nothing was loaded. Build the optimizer as it was when it was saved."
                )
            self._optimizers.append(state)
        self._read_rng()
        self._read_leaves()
        for at, scheduler in enumerate(stateful.prepared.schedulers):
            self._read_state(folders.numbered("scheduler", at), scheduler)
        self._read_loaders()
        for at, obj in enumerate(stateful.prepared.custom_objects):
            self._read_state(folders.CUSTOM_OBJECT.format(at), obj)
        if stateful.scaler is not None and folders.SCALER in self._files:
            self._others.append((stateful.scaler, self._load(folders.SCALER)))
        elif stateful.scaler is not None:
            self.remarks.append(
                f"{self.folder} was not saved in fp16: the gradient scaler begins with its initial scale."
            )

    def read_models(self, *, strict: bool) -> None:
        """Read the tensors of each model; of one in the sharded layout, their shapes."""
        for at, model in enumerate(self.models):
            if folder := self._shards_of(at):
                self._weights.append(models.find_shards(model, folder, strict=strict))
                continue
            safe, pickled = folders.model(at, safe=True), folders.model(at, safe=False)
            name = pickled if pickled in self._files and safe not in self._files else safe
            paths = [self.folder / name]
            self._weights.append(models.read_weights(model, paths, self._device, strict=strict, **self._load_kwargs))

    def read_optimizer_shards(self) -> None:
        """Give each optimizer's state this rank's parts of the tensors that it refers to."""
        for at, optimizer in enumerate(self.stateful.prepared.optimizers):
            state = self._optimizers[at]
            names = saving.tensor_names(state)
            if not names:
                self._optimizers[at] = sharded.share_out_state(optimizer, state)
                continue
            folder = self.folder / folders.OPTIMIZER_SHARDS.format(at)
            outline = sharded.read_outline(folder, "optimizer")
            if missing := names - set(outline):
                raise CheckpointError(
                    f"{folder} lacks {', '.join(sorted(missing))}, which the optimizer's file refers to; nothing was "
                    f"loaded. {ADVICE}"
                )
            self._optimizers[at], tensors = saving.join_state(optimizer, state, outline)
            sharded.read_shards(folder, {f"optimizer.{name}": tensor for name, tensor in tensors.items()})

    def apply(self, load_model_kwargs: dict[str, Any]) -> None:
        """Load what was read into the objects."""
        stateful = self.stateful
        for at, (model, tensors) in enumerate(zip(self.models, self._weights, strict=True)):
            if folder := self._shards_of(at):
                models.load_shards(model, folder, strict=bool(load_model_kwargs.get("strict", True)))
            else:
                model.load_state_dict(sharded.share_out(tensors, model.state_dict()), **load_model_kwargs)
        with torch.no_grad():
            for leaf, tensor in zip(stateful.prepared.leaves, self._leaves, strict=True):
                leaf.copy_(tensor)
        for optimizer, state in zip(stateful.prepared.optimizers, self._optimizers, strict=True):
            optimizer.load_state_dict(with_counters_on_cpu(state))
        for obj, state in self._others:
            obj.load_state_dict(state)
        for loader in stateful.prepared.loaders:
            if not loader.use_stateful_dataloader and (loader.was_evaluation or not stateful.rules.loaders_resume):
                loader.restart_epoch(draws_on=stateful.rules.loaders_resume)
        saving.restore_window(stateful, self._window)
        if stateful.safepoint is not None:
            stateful.safepoint.continue_after(self._num_updates)
        # Last, since states of the user's objects may draw numbers.
        restore_rng_states(self._rng)

    def _shards_of(self, at: int) -> Path | None:
        """Return the folder of a model in the sharded layout; None if it is in a file."""
        name = folders.MODEL_SHARDS.format(at)
        return self.folder / name if f"{name}/{folders.METADATA}" in self._files else None

    def _load(self, name: str, **options: Any) -> Any:
        return read_object(self.folder / name, self._device, **{**options, **self._load_kwargs})

    def _check_counts(self) -> None:
        saved = folders.count_objects(self._files) if self._manifest is None else self._manifest.objects
        hooks_load = self._manifest is None and bool(self.stateful.prepared.load_hooks)
        for kind, number in self.stateful.counts.items():
            there = saved.get(kind, number)
            if there != number and kind != "dataloaders" and not (kind == "models" and hooks_load):
                verb = "registered" if kind == "custom_objects" else "prepared"
                raise CheckpointError(
                    f"{self.folder} holds {there} {kind.replace('_', ' ')}, and {number} are {verb} here; nothing was "
                    "loaded. Prepare and register the same objects in the same order as when it was saved. For the "
                    f"weights alone: load_model(model, {str(self.folder)!r})."
                )

    def _read_leaves(self) -> None:
        if self.stateful.prepared.leaves:
            self._leaves = self._load(folders.LEAVES)
        for at, (mine, theirs) in enumerate(zip(self.stateful.prepared.leaves, self._leaves, strict=True)):
            if mine.shape != theirs.shape:
                raise CheckpointError(
                    f"{self.folder / folders.LEAVES}: leaf tensor {at} has shape {tuple(theirs.shape)} in the file, "
                    f"and {tuple(mine.shape)} here; nothing was loaded. Prepare tensors of the same shapes, in "
                    "the same order, as when it was saved."
                )

    def _read_loaders(self) -> None:
        if self._manifest is None:
            return
        loaders, saved = self.stateful.prepared.loaders, self._manifest.objects.get("dataloaders", 0)
        if saved == len(loaders):
            self._others += [
                (loader, self._load(folders.numbered("dataloader", at))) for at, loader in enumerate(loaders)
            ]
        else:
            self.remarks.append(
                f"{self.folder} holds the positions of {saved} loaders, and {len(loaders)} are prepared here: they "
                "start from the beginning."
            )

    def _read_state(self, shared: str, obj: Any) -> None:
        """Read the state of an object: this rank's where it differed between ranks, else rank 0's."""
        by_rank = {folders.of_rank(shared, rank) for rank in range(self._saved)} & self._files
        mine = folders.of_rank(shared, self._rank)
        self._others.append((obj, self._load(mine if mine in by_rank else shared)))
        if by_rank and self._saved != self._num_processes:
            fewer = self._num_processes < self._saved
            others = rank_list(list(range(*sorted((self._saved, self._num_processes)))))
            self.remarks.append(
                f"{self.folder} holds a state of {type(obj).__name__} ({shared}) for each of {self._saved} ranks, and "
                f"{self._num_processes} load it: "
                + (f"the states of {others} are left out." if fewer else f"{others} got rank 0's.")
            )

    def read_window(self) -> None:
        """Read this rank's part of the open window, if one was open."""
        saved = self._saved
        ranks = [self._rank] if saved == self._num_processes else range(saved)
        names = [name for rank in ranks if (name := folders.WINDOW.format(rank)) in self._files]
        windows: list[dict[str, Any]] = [self._load(name) for name in names]
        if not windows:
            return
        parameters = dict(self.stateful.parameters())
        way_out = "nothing was loaded. Save where a window ends, or load with the same sharding and as many ranks."
        if saved != self._num_processes and any(map(is_spread, parameters.values())):
            raise CheckpointError(
                f"{self.folder} holds a window's gradients of a sharded model on {saved} ranks, which "
                f"{self._num_processes} cannot share; {way_out}"
            )
        for name, gradient in ((name, each) for window in windows for name, each in window["gradients"].items()):
            if name in parameters and gradient.shape != sharded.local_part(parameters[name]).shape:
                raise CheckpointError(
                    f"{self.folder} holds a window's gradients of a model that was sharded in another way: {name} has "
                    f"{list(gradient.shape)} on a rank there and {list(sharded.local_part(parameters[name]).shape)} "
                    f"here; {way_out}"
                )
        self._window = windows[0]
        if saved != self._num_processes:
            divides = self.stateful.rules.nominal_divisor
            self._window = saving.merge_windows(windows, num_processes=self._num_processes, nominal_divisor=divides)

    def _read_rng(self) -> None:
        """Read the states of this rank's random number generators, and the number of updates beside them."""
        names = list(map(folders.RANDOM_STATES.format, range(self._num_processes)))
        new = [rank for rank, name in enumerate(names) if name not in self._files]
        if new and 0 not in new:
            self.remarks.append(
                f"{self.folder} was saved by fewer ranks: the random number generators of "
                f"{rank_list(new)} start from states derived from rank 0's."
            )
        is_new = self._rank in new
        states: dict[str, Any] = self._load(names[0 if is_new else self._rank])
        self._num_updates = int(states.get("updates", 0))
        self._rng = derive_rng_states(states, self._rank) if is_new else states
