"""The files of one checkpoint on one rank: states are collected, hooks may remove some, and the rest is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher import context
from notebook_launcher.training.checkpoints.checkpoint_error import CheckpointError
from notebook_launcher.training.checkpoints.folders import durable_files, file_names, staging
from notebook_launcher.training.checkpoints.folders.checkpoint_folders import keep_newest
from notebook_launcher.training.checkpoints.folders.manifest import MANIFEST, Manifest, read_manifest, write_manifest
from notebook_launcher.training.checkpoints.layouts.distributed_files import measure_shards, write_shards
from notebook_launcher.training.checkpoints.layouts.sharded import gather_tree, has_spread
from notebook_launcher.training.checkpoints.layouts.streaming import stream_object
from notebook_launcher.training.checkpoints.models.packing import check_tensors
from notebook_launcher.training.checkpoints.models.weights import write_weights
from notebook_launcher.training.checkpoints.objects import digest_of, unsafe_types
from notebook_launcher.training.checkpoints.training_state.optimizer_states import parameter_names, split_state
from notebook_launcher.training.checkpoints.training_state.window import capture_window
from notebook_launcher.training.checkpoints.writers import Writers, run_each
from notebook_launcher.training.random import capture_rng_states
from notebook_launcher.training.user_warnings import warn_user

if TYPE_CHECKING:
    from pathlib import Path

    from notebook_launcher.training.checkpoints.folders.durable_files import FileDigest
    from notebook_launcher.training.checkpoints.training_state.stateful_objects import StatefulObjects
    from notebook_launcher.training.plugins import ProjectConfiguration
    from notebook_launcher.training.process.process_state import ProcessState

__all__ = ["CheckpointWriter"]


class CheckpointWriter:
    """The writer of one checkpoint on one rank.

    Args:
        stateful: The objects whose states are saved.
        process: This process among its peers.
        writers: The ranks that share the folder.
        stage: The folder in which the files are written, before they are put in place.
        safe: Models as safetensors; False: by `torch.save`.
    """

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
        self.digests: dict[str, FileDigest] = {}
        """The files that this rank has written, for the manifest."""
        self.window: dict[str, Any] | None = None
        """This rank's part of the open window; None if none is open."""

    def collect(self) -> dict[str, str]:
        """Collect the state of every object; on every rank, because some objects synchronise in `state_dict()`.

        Returns:
            Digests of the states that may differ between ranks, by file name.
        """
        stateful = self.stateful
        self.weights = [model.state_dict() for model in stateful.models]
        self.optimizers = [optimizer.state_dict() for optimizer in stateful.optimizers]
        states: dict[str, Any] = {}
        for at, loader in enumerate(stateful.dataloaders):
            states[file_names.loader(at)] = gather_tree(loader.state_dict(), keep=self.leads)
        if stateful.leaves:
            states[file_names.LEAVES] = [leaf.detach() for leaf in stateful.leaves]
        if stateful.scaler is not None:
            states[file_names.SCALER] = stateful.scaler.state_dict()
        self.objects = states if self.leads else {}
        self.window = capture_window(stateful)
        for name, objects in (
            (file_names.scheduler, stateful.schedulers),
            (file_names.custom_object, stateful.custom_objects),
        ):
            self._states.update({name(at): obj.state_dict() for at, obj in enumerate(objects)})
        if self.num_processes == 1:
            return {}
        return {name: digest_of(state) for name, state in self._states.items()}

    def keep_states(self, digests: list[dict[str, str]]) -> None:
        """Keep the leader's state of each object, and each rank's where they differ; all ranks call it together.

        Args:
            digests: What `collect` has returned on each rank.
        """
        for name, state in self._states.items():
            differs = len({of_rank.get(name) for of_rank in digests}) > 1
            whole = gather_tree(state, keep=self.leads or differs)
            if self.leads:
                self.objects[name] = whole
            elif differs:
                self.objects[file_names.of_rank(name, self.rank)] = whole
            self.has_states_by_rank |= differs

    def run_hooks(self) -> list[tuple[int | None, list[str]]]:
        """Let hooks write files and remove weights; return number and names of the weights that are left."""
        self.collected = list(self.weights)
        for hook in self.stateful.save_hooks:
            hook(list(self.stateful.models), self.weights, str(self.stage))
        numbers = [next((at for at, mine in enumerate(self.collected) if mine is left), None) for left in self.weights]
        for number, left in zip(numbers, self.weights, strict=True):
            if number is None and has_spread(left):
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
        if self.sharded and has_spread(state):
            check_tensors(state, safe=True)
            self._write_shards(file_names.model_shards(at), "model", state)
            return
        name = file_names.model(at, safe=self.safe)
        self._note(name, write_weights(self.stage / name if self.leads else None, state, safe=self.safe))

    def _write_optimizer(self, at: int, names: dict[int, str]) -> None:
        state = self.optimizers[at]
        if self.sharded:
            state, tensors = split_state(self.stateful.optimizers[at], state, names)
            if tensors:
                self._write_shards(file_names.optimizer_shards(at), "optimizer", tensors)
        name = file_names.optimizer(at)
        self._note(name, stream_object(self.stage / name if self.leads else None, state))

    def _write_shards(self, folder: str, kind: str, tensors: dict[str, Any]) -> None:
        if not write_shards(self.stage / folder, {kind: tensors}):
            return
        written = measure_shards(self.stage / folder, self.rank)
        self.digests.update({f"{folder}/{name}": digest for name, digest in written.items()})

    def _note(self, name: str, digest: FileDigest | None) -> None:
        if digest is not None:
            self.digests[name] = digest

    def write(self) -> dict[str, FileDigest]:
        """Write this rank's other files, and return sizes and digests of all of its files."""
        digests = dict(self.digests)
        mine = dict(self.objects)
        if self.window is not None:
            mine[file_names.window(self.rank)] = self.window
        # Last, since hooks and states of the user's objects may draw numbers.
        windows = self.stateful.gradient_state.state_dict().get("windows", [])
        step = windows[0]["num_batches"] if windows else 0
        mine[file_names.random_states(self.rank)] = {"step": step, **capture_rng_states()}
        for name, obj in mine.items():
            digests[name] = durable_files.write_object(self.stage / name, obj)
        if self.leads:
            self._warn_of_types()
        return digests

    def _warn_of_types(self) -> None:
        """Warn now of types that `load_state` would refuse later."""
        for name in [*self.objects, *(file_names.optimizer(at) for at in range(len(self.optimizers)))]:
            found = unsafe_types(self.stage / name)
            if found:
                warn_user(
                    f"{name} holds {', '.join(found)}: load_state will refuse it without load_kwargs="
                    '{"weights_only": False}. Let state_dict() return plain numbers, text, lists, dicts and tensors.'
                )

    def publish(self, target: Path, digests: dict[str, FileDigest], config: ProjectConfiguration) -> None:
        """On the leader, write the manifest, put the checkpoint in place, and remove older ones."""
        if not self.leads:
            return
        new = staging.contents(self.stage)
        from_hooks = new - set(digests)
        digests.update({name: durable_files.measure(self.stage / name, sync=True) for name in from_hooks})
        write_manifest(
            self.stage,
            Manifest(
                num_processes=self.num_processes,
                objects=self.stateful.counts,
                files=digests,
                format=3 if self.has_states_by_rank else 2 if self.sharded else 1,
            ),
        )
        is_new = not target.exists()
        before = set() if is_new else staging.contents(target)
        if is_new:
            context.announce_checkpoint(str(target))
        earlier = before & _earlier(target, before)
        staging.publish(
            self.stage, target, last=MANIFEST, stale=earlier - new - {MANIFEST}, replaceable=before == earlier
        )
        keep_newest(config, target)


def _earlier(target: Path, before: set[str]) -> set[str]:
    """Return the files of the checkpoint that the folder holds."""
    try:
        manifest = read_manifest(target)
    except CheckpointError:
        manifest = None
    if manifest is not None:
        return {MANIFEST, *manifest.files}
    # A checkpoint of Accelerate has no manifest, and always has this file.
    if file_names.random_states(0) not in before:
        return set()
    return {MANIFEST, *filter(file_names.is_checkpoint_file, before)}
