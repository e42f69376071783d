"""`save_state`: everything that training needs to continue, whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import socket
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher import context
from notebook_launcher.training.accumulation.members import has_held, parameter_groups, parameters_of
from notebook_launcher.training.checkpoints import folders, models, sharded
from notebook_launcher.training.checkpoints.folders import MANIFEST, CheckpointError, Manifest
from notebook_launcher.training.checkpoints.objects import unsafe_types
from notebook_launcher.training.checkpoints.writers import Writers, gather_outcomes, on_all_ranks, run_each
from notebook_launcher.training.fingerprints import digest_of
from notebook_launcher.training.process.arrivals import meet
from notebook_launcher.training.random import capture_rng_states
from notebook_launcher.training.spread_tensors import is_spread
from notebook_launcher.training.user_warnings import warn_user

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from notebook_launcher.training.accumulation.windows import GradientState
    from notebook_launcher.training.plugins import ProjectConfiguration, Rules
    from notebook_launcher.training.preparation import Prepared
    from notebook_launcher.training.process.process_state import ProcessState
    from notebook_launcher.training.rank_check.check import RankCheck
    from notebook_launcher.training.requests import Safepoint


def save_state(
    stateful: StatefulObjects,
    process: ProcessState,
    config: ProjectConfiguration,
    output_dir: str | os.PathLike[str] | None,
    *,
    safe: bool,
    rank_check: RankCheck | None,
    state_dict_type: str | None = None,
) -> Path:
    """Write everything that training needs to continue, as `Accelerator.save_state` says, and return the folder.

    A checkpoint has the states of models, leaf tensors, optimizers, schedulers, the scaler, loaders and registered
    objects and, of each rank, of its random number generators and of an open window. The state of a scheduler or
    registered object is rank 0's and, where it differs between ranks, each rank's. The files are written to a
    stage, a folder beside the target, which takes the target's name once it is complete and has a manifest. Until
    then, an earlier checkpoint of that name stays whole, even if a process is killed. Hooks get the stage, so that
    their files become part of the checkpoint; files in the target that do not belong to an earlier checkpoint stay.
    """
    on_each_node = bool(config.save_on_each_node)
    sharded.check_layout(state_dict_type, on_each_node=on_each_node)
    writers = Writers.of(process, on_each_node=on_each_node)
    meet("save_state")
    if rank_check is not None:
        rank_check.compare_now("save_state", lambda mine: gather_outcomes("compare the ranks", lambda: mine))
    with _open_stage(writers, config, output_dir) as (target, stage):
        if writers.spans_machines:
            on_all_ranks("reach the folder of the checkpoint", lambda: _check_reach(stage, process.process_index))
        writer = CheckpointWriter(stateful, process, writers, stage, safe=safe)
        digests_of_states = gather_outcomes("collect its part of the checkpoint", writer.collect)
        on_all_ranks("collect its part of the checkpoint", lambda: writer.keep_states(digests_of_states))
        states = [*writer.weights, *writer.optimizers]
        writer.sharded = sharded.choose_sharded(states, state_dict_type, process, on_each_node=on_each_node)
        writer.keep_weights(gather_outcomes("run the hooks", writer.run_hooks)[writers.leader])
        on_all_ranks("write its part of the checkpoint", writer.write_spread)
        written = gather_outcomes("write its part of the checkpoint", lambda: (writers.leader, writer.write()))
        digests = {
            name: each for leader, of_rank in written if leader == writers.leader for name, each in of_rank.items()
        }
        on_all_ranks("put the checkpoint in place", lambda: writer.publish(target, digests, config))
    config.iteration += 1
    return target


@contextlib.contextmanager
def _open_stage(
    writers: Writers, config: ProjectConfiguration, output_dir: str | os.PathLike[str] | None
) -> Iterator[tuple[Path, Path]]:
    """Yield the checkpoint's folder and its stage, which the leader makes, and removes if the block fails."""

    def begin() -> tuple[Path, Path] | None:
        if not writers.leads:
            return None
        target = folders.folder_to_save(config, output_dir)
        return target, folders.open_stage(target)

    places = gather_outcomes("begin the checkpoint", begin)[writers.leader]
    assert places is not None
    try:
        yield places
    except BaseException:
        if writers.leads:
            shutil.rmtree(places[1], ignore_errors=True)
        raise


def _check_reach(stage: Path, rank: int) -> None:
    if not stage.is_dir():
        raise CheckpointError(
            f"{stage.parent} is not on the disks of {socket.gethostname()}, where rank {rank} is. Choose a folder that "
            "all machines share, by project_dir= or output_dir; or let each machine write a checkpoint of its own: "
            "ProjectConfiguration(save_on_each_node=True)."
        )


# --------------------------------------------------------------------------------------------------------------------
# The files of one checkpoint on one rank: states are collected, hooks may remove some, and the rest is written.


class CheckpointWriter:
    """The writer of one checkpoint on one rank, into a stage."""

    def __init__(
        self, stateful: StatefulObjects, process: ProcessState, writers: Writers, stage: Path, *, safe: bool
    ) -> None:
        self.stateful = stateful
        self.rank = process.process_index
        self.num_processes = process.num_processes
        self.leads = writers.leads
        self.stage = stage
        self.safe = safe
        self.sharded = False
        """True if sharded models and their optimizers are written in parts."""
        self.weights: list[dict[str, Any]] = []
        """The weights that are written: hooks may remove models from this list."""
        self.collected: list[dict[str, Any]] = []
        """The weights of all models, as they were before the hooks."""
        self.optimizers: list[dict[str, Any]] = []
        self.objects: dict[str, Any] = {}
        """States that this rank writes, by file name: the leader those of all ranks, and each rank its own."""
        self.has_states_by_rank = False
        """True if some states differ between ranks."""
        self._states: dict[str, Any] = {}
        """States of objects that may differ between ranks, by file name."""
        self.digests: dict[str, folders.FileDigest] = {}
        """The files that this rank has written, for the manifest."""
        self.window: dict[str, Any] | None = None
        """This rank's part of the open window; None if none is open."""

    def collect(self) -> dict[str, str]:
        """Collect the state of every object; on every rank, because some objects synchronise in `state_dict()`.

        Returns digests of the states that may differ between ranks, by file name.
        """
        stateful = self.stateful
        self.weights = [model.state_dict() for model in stateful.models]
        self.optimizers = [optimizer.state_dict() for optimizer in stateful.prepared.optimizers]
        states: dict[str, Any] = {}
        for at, loader in enumerate(stateful.prepared.loaders):
            states[folders.numbered("dataloader", at)] = sharded.gather_tree(loader.state_dict(), keep=self.leads)
        if stateful.prepared.leaves:
            states[folders.LEAVES] = [leaf.detach() for leaf in stateful.prepared.leaves]
        if stateful.scaler is not None:
            states[folders.SCALER] = stateful.scaler.state_dict()
        self.objects = states if self.leads else {}
        self.window = capture_window(stateful)
        for at, scheduler in enumerate(stateful.prepared.schedulers):
            self._states[folders.numbered("scheduler", at)] = scheduler.state_dict()
        for at, obj in enumerate(stateful.prepared.custom_objects):
            self._states[folders.CUSTOM_OBJECT.format(at)] = obj.state_dict()
        if self.num_processes == 1:
            return {}
        return {name: digest_of(state) for name, state in self._states.items()}

    def keep_states(self, digests: list[dict[str, str]]) -> None:
        """Keep the leader's state of each object, and each rank's where they differ; all ranks call it together."""
        for name, state in self._states.items():
            differs = len({of_rank.get(name) for of_rank in digests}) > 1
            whole = sharded.gather_tree(state, keep=self.leads or differs)
            if self.leads:
                self.objects[name] = whole
            elif differs:
                self.objects[folders.of_rank(name, self.rank)] = whole
            self.has_states_by_rank |= differs

    def run_hooks(self) -> list[tuple[int | None, list[str]]]:
        """Let hooks write files and remove weights; return number and names of the weights that are left."""
        self.collected = list(self.weights)
        for hook in list(self.stateful.prepared.save_hooks.values()):
            hook(list(self.stateful.models), self.weights, str(self.stage))
        numbers = [next((at for at, mine in enumerate(self.collected) if mine is left), None) for left in self.weights]
        for number, left in zip(numbers, self.weights, strict=True):
            if number is None and sharded.has_spread(left):
                raise CheckpointError(
                    "A hook of register_save_state_pre_hook replaced a sharded model's weights by a dict of its own, "
                    "which the other ranks cannot gather. Remove entries of the dict instead, or remove the dict."
                )
        return [(number, list(left)) for number, left in zip(numbers, self.weights, strict=True)]

    def keep_weights(self, kept: list[tuple[int | None, list[str]]]) -> None:
        """Keep what the leader's hooks have left, since all ranks gather the weights together."""
        if not self.leads:
            self.weights = [
                {} if number is None else {name: self.collected[number][name] for name in names}
                for number, names in kept
            ]

    def write_spread(self) -> None:
        """Write spread tensors, all ranks together; a failure is raised once no rank waits for this one."""
        names = parameter_names(self.stateful)
        steps = [lambda at=at: self._write_model(at) for at in range(len(self.weights))]
        steps += [lambda at=at: self._write_optimizer(at, names) for at in range(len(self.optimizers))]
        run_each(steps)

    def _write_model(self, at: int) -> None:
        state = self.weights[at]
        if self.sharded and sharded.has_spread(state):
            models.check_tensors(state, safe=True)
            self._write_shards(folders.MODEL_SHARDS.format(at), "model", state)
            return
        name = folders.model(at, safe=self.safe)
        digest = models.write_weights(self.stage / name if self.leads else None, state, safe=self.safe)
        if digest is not None:
            self.digests[name] = digest

    def _write_optimizer(self, at: int, names: dict[int, str]) -> None:
        state = self.optimizers[at]
        if self.sharded:
            state, tensors = split_state(self.stateful.prepared.optimizers[at], state, names)
            if tensors:
                self._write_shards(folders.OPTIMIZER_SHARDS.format(at), "optimizer", tensors)
        whole, name = sharded.gather_tree(state, keep=self.leads), folders.numbered("optimizer", at)
        if self.leads:
            self.digests[name] = folders.write_object(self.stage / name, whole)

    def _write_shards(self, folder: str, kind: str, tensors: dict[str, Any]) -> None:
        written = sharded.write_shards(self.stage / folder, {kind: tensors})
        self.digests.update({f"{folder}/{name}": digest for name, digest in written.items()})

    def write(self) -> dict[str, folders.FileDigest]:
        """Write this rank's other files, and return sizes and digests of all of its files."""
        digests = dict(self.digests)
        mine = dict(self.objects)
        if self.window is not None:
            mine[folders.WINDOW.format(self.rank)] = self.window
        # Last, since hooks and states of the user's objects may draw numbers.
        windows = self.stateful.gradient_state.state_dict().get("windows", [])
        step = windows[0]["num_batches"] if windows else 0
        safepoint = self.stateful.safepoint
        counts = {"step": step} | ({} if safepoint is None else {"updates": safepoint.last_update})
        mine[folders.RANDOM_STATES.format(self.rank)] = {**counts, **capture_rng_states()}
        for name, obj in mine.items():
            digests[name] = folders.write_object(self.stage / name, obj)
        optimizers = [folders.numbered("optimizer", at) for at in range(len(self.optimizers))]
        for name in [*self.objects, *optimizers] if self.leads else ():
            if found := unsafe_types(self.stage / name):  # What load_state would refuse is said now.
                warn_user(
                    f"{name} holds {', '.join(found)}: load_state will refuse it without load_kwargs="
                    '{"weights_only": False}. Let state_dict() return plain numbers, text, lists, dicts and tensors.'
                )
        return digests

    def publish(self, target: Path, digests: dict[str, folders.FileDigest], config: ProjectConfiguration) -> None:
        """On the leader, write the manifest, put the checkpoint in place, and remove older ones."""
        if not self.leads:
            return
        new = folders.contents(self.stage)
        from_hooks = new - set(digests)
        digests.update({name: folders.measure(self.stage / name, sync=True) for name in from_hooks})
        folders.write_manifest(
            self.stage,
            Manifest(
                num_processes=self.num_processes,
                objects=self.stateful.counts,
                files=digests,
                format=3 if self.has_states_by_rank else 2 if self.sharded else 1,
            ),
        )
        is_new = not target.exists()
        before = set() if is_new else folders.contents(target)
        if is_new:
            context.announce_checkpoint(str(target))
        earlier = before & _earlier(target, before)
        folders.publish(
            self.stage, target, last=MANIFEST, stale=earlier - new - {MANIFEST}, replaceable=before == earlier
        )
        folders.keep_newest(config, target)


def _earlier(target: Path, before: set[str]) -> set[str]:
    """Return the files of the checkpoint that the folder holds."""
    try:
        manifest = folders.read_manifest(target)
    except CheckpointError:
        manifest = None
    if manifest is not None:
        return {MANIFEST, *manifest.files}
    # A checkpoint of Accelerate has no manifest, and always has this file.
    if folders.RANDOM_STATES.format(0) not in before:
        return set()
    return {MANIFEST, *filter(folders.is_checkpoint_file, before)}


# --------------------------------------------------------------------------------------------------------------------
# The objects of an Accelerator whose states belong in a checkpoint.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StatefulObjects:
    """The objects, in the order in which they were prepared or registered."""

    prepared: Prepared
    models: list[torch.nn.Module]
    """The models without the wrappers of `prepare`, so that weights have the models' own names."""
    scaler: Any
    """The gradient scaler of fp16; None in other precisions."""
    gradient_state: GradientState
    """Holds the open windows."""
    safepoint: Safepoint | None
    """Counts the updates; None outside of a launch."""
    rules: Rules

    @property
    def counts(self) -> dict[str, int]:
        """Number of objects of each kind."""
        return {
            "models": len(self.models),
            "leaves": len(self.prepared.leaves),
            "optimizers": len(self.prepared.optimizers),
            "schedulers": len(self.prepared.schedulers),
            "dataloaders": len(self.prepared.loaders),
            "custom_objects": len(self.prepared.custom_objects),
        }

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield everything that may have a gradient, with a name that is the same in every run."""
        for index, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                yield f"{index}.{name}", parameter
        for index, leaf in enumerate(self.prepared.leaves):
            yield f"leaf.{index}", leaf


# --------------------------------------------------------------------------------------------------------------------
# States of optimizers in two parts: the spread tensors by their parameters' names, and all else.
#
# An optimizer numbers its parameters. In the sharded layout, its tensors have the names of the parameters, as
# `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` gives them. That function itself is not called,
# because it steps an optimizer that has no state yet, and Adam's count of steps would begin with 1.


STORED = "stored_as"
"""Key of the entry that stands for a tensor which is in the folder of the sharded layout."""


def parameter_names(stateful: StatefulObjects) -> dict[int, str]:
    """Return the name of each parameter by its `id`; with one model, they are the model's own names."""
    alone = len(stateful.models) == 1 and not stateful.prepared.leaves
    return {id(tensor): name.partition(".")[2] if alone else name for name, tensor in stateful.parameters()}


def split_state(optimizer: Any, state: Mapping[str, Any], names: Mapping[int, str]) -> tuple[dict[str, Any], Any]:
    """Return an optimizer's state with a reference in place of each spread tensor, and these tensors by name."""
    parameters = parameters_of(optimizer)
    tensors: dict[str, torch.Tensor] = {}

    def split(value: Any, name: str) -> Any:
        if is_spread(value):
            tensors[name] = value.detach()
            return {STORED: name}
        return {key: split(item, f"{name}.{key}") for key, item in value.items()} if isinstance(value, dict) else value

    slots = {
        at: split(slot, f"state.{names.get(id(parameters[at]), at)}" if isinstance(at, int) else f"state.{at}")
        for at, slot in state["state"].items()
    }
    return {**state, "state": slots}, tensors


def tensor_names(state: Any) -> set[str]:
    """Return the names of the tensors that a state refers to."""
    if not isinstance(state, dict):
        return set()
    if set(state) == {STORED}:
        return {state[STORED]}
    return {name for value in state.values() for name in tensor_names(value)}


def join_state(
    optimizer: Any, state: Mapping[str, Any], outline: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a state with an empty tensor in place of each reference, and these tensors by name, to be filled.

    The optimizer's parameters show how tensors of their shape are spread; the outline has shapes and dtypes.
    """
    parameters = parameters_of(optimizer)
    tensors: dict[str, torch.Tensor] = {}

    def join(value: Any, parameter: torch.Tensor) -> Any:
        if not isinstance(value, dict):
            return value
        if set(value) != {STORED}:
            return {key: join(item, parameter) for key, item in value.items()}
        shape = outline[value[STORED]]
        is_alike = is_spread(parameter) and parameter.shape == shape.shape
        like = parameter.detach() if is_alike else torch.empty(shape.shape)
        return tensors.setdefault(value[STORED], torch.empty_like(like, dtype=shape.dtype))

    slots = {
        at: join(slot, parameters[at] if isinstance(at, int) else torch.empty(0)) for at, slot in state["state"].items()
    }
    return {**state, "state": slots}, tensors


# --------------------------------------------------------------------------------------------------------------------
# An open window: the gradients that each rank has gathered since the last update, and their weights.


def capture_window(stateful: StatefulObjects) -> dict[str, Any] | None:
    """Return this rank's part of the window, or None if none is open."""
    if not stateful.gradient_state.has_open_window:
        return None
    if any(has_held(parameter_groups(model)) for model in stateful.models):
        raise CheckpointError(
            "save_state() inside a window cannot save a sharded model's gradients that are not reduced yet, because "
            "torch keeps them to itself (sync_each_batch=False, or replicas of a sharded model). Save where a window "
            "ends: if accelerator.sync_gradients: accelerator.save_state(...)."
        )
    gradients = {
        name: sharded.local_part(tensor.grad) for name, tensor in stateful.parameters() if tensor.grad is not None
    }
    return {"state": stateful.gradient_state.state_dict(), "gradients": gradients}


def merge_windows(windows: Sequence[dict[str, Any]], *, num_processes: int, nominal_divisor: bool) -> dict[str, Any]:
    """Return the part of a window for each of another number of ranks; all ranks get the same part.

    What is applied where the window ends stays the same. Where gradients are divided by what the window held, the
    ranks' gradients are added up in the end, so their sum is kept; where they are averaged over ranks
    (`nominal_divisor`), their mean.
    """
    sums: dict[str, torch.Tensor] = {}
    for window in windows:
        for name, gradient in window["gradients"].items():
            wide = gradient.double() if gradient.is_floating_point() else gradient
            sums[name] = wide if name not in sums else sums[name] + wide
    shares = len(windows) if nominal_divisor else num_processes
    dtypes = {name: gradient.dtype for window in windows for name, gradient in window["gradients"].items()}
    state = dict(windows[0]["state"])
    state["windows"] = [
        {**counts, "weight": sum(window["state"]["windows"][at]["weight"] for window in windows) / num_processes}
        for at, counts in enumerate(state["windows"])
    ]
    return {"state": state, "gradients": {name: (sums[name] / shares).to(dtypes[name]) for name in sums}}


def restore_window(stateful: StatefulObjects, window: dict[str, Any] | None) -> None:
    """Restore the window; with None, close all windows and clear the gradients."""
    gradients = {} if window is None else window["gradients"]
    for name, tensor in stateful.parameters():
        gradient = gradients.get(name)
        if gradient is not None:
            gradient = sharded.from_local_part(gradient.to(tensor.device, tensor.dtype), tensor)
        tensor.grad = gradient
    stateful.gradient_state.restore(None if window is None else window["state"])
