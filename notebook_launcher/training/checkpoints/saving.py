"""`save_state`: everything that training needs to go on, whole or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.training.checkpoints import files, folders, names
from notebook_launcher.training.checkpoints.agreement import Crew, share, together
from notebook_launcher.training.checkpoints.errors import CheckpointError
from notebook_launcher.training.checkpoints.manifest import MANIFEST, Manifest, read_manifest, write_manifest
from notebook_launcher.training.checkpoints.naming import folder_to_save, keep_newest
from notebook_launcher.training.checkpoints.objects import unsafe_types
from notebook_launcher.training.checkpoints.parts import Parts
from notebook_launcher.training.checkpoints.weights import write_weights
from notebook_launcher.training.checkpoints.window import capture_window
from notebook_launcher.training.plugins import warn_user
from notebook_launcher.training.random import capture_rng_states

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from notebook_launcher.training.checkpoints.files import FileRecord

__all__ = ["save_state"]


def save_state(
    accelerator: Any,
    output_dir: str | os.PathLike[str] | None = None,
    safe_serialization: bool = True,  # noqa: FBT001, FBT002 - Accelerate's signature
    **save_model_func_kwargs: Any,
) -> Path:
    """Write everything that training needs to go on; every rank calls it.

    Models, leaf tensors, optimizers, schedulers, the scaler, the loaders' positions, registered objects and,
    of each rank, its random number generators and the gradients of an open window. All of it goes to a
    folder aside, which takes its name once it is complete, with a manifest of what it consists of. Until
    then an earlier checkpoint of that name is whole, whenever a process is killed.

    Args:
        accelerator: Whose state.
        output_dir: The folder; files in it that are not an earlier checkpoint's stay. None: the next one by
            `ProjectConfiguration(automatic_checkpoint_naming=True)`.
        safe_serialization: Models as safetensors; False: by `torch.save`.
        save_model_func_kwargs: Accepted and without effect.

    Returns:
        The folder.

    Raises:
        ValueError: No folder was given and none can be named, or the automatic name is taken.
        CheckpointError: Something cannot be written, or another rank failed; the earlier checkpoint is whole.
        OSError: The disk does not take it; likewise.
    """
    del save_model_func_kwargs
    crew = Crew.of(accelerator)
    config = accelerator.project_configuration

    def begin() -> tuple[Path, Path] | None:
        if not crew.leads:
            return None
        target = folder_to_save(config, output_dir)
        return target, folders.open_stage(target)

    places = share("begin the checkpoint", begin)[crew.leader]
    assert places is not None
    target, stage = places

    def finish() -> None:
        if crew.leads:
            mates = [one for leader, one in written if leader == crew.leader]
            _publish(stage, target, mates, accelerator)
            keep_newest(config, target)

    try:
        written = share(
            "write its part of the checkpoint",
            lambda: (crew.leader, _write(accelerator, stage, crew, safe=safe_serialization)),
        )
        together("put the checkpoint in place", finish)
    except BaseException:
        if crew.leads:
            folders.discard(stage)
        raise
    config.iteration += 1
    return target


def _write(accelerator: Any, stage: Path, crew: Crew, *, safe: bool) -> dict[str, FileRecord]:
    """Write this rank's files and return what they hold."""
    parts = Parts.of(accelerator)
    weights = [model.state_dict() for model in parts.models]
    for hook in parts.save_hooks:
        hook(list(parts.models), weights, str(stage))
    records: dict[str, FileRecord] = {}

    def write(name: str, obj: Any) -> None:
        records[name] = files.write_object(stage / name, obj)

    if crew.leads:
        for index, state in enumerate(weights):
            name = names.model(index, safe=safe)
            records[name] = write_weights(stage / name, state, safe=safe)
        for name, obj in _shared_objects(parts).items():
            write(name, obj)
        _warn_of_types(stage, parts)
    window = capture_window(parts)
    if window is not None:
        write(names.window(accelerator.process_index), window)
    # Last, since states of the user's objects may draw numbers.
    step = parts.gradient_state.state_dict().get("num_batches", 0)
    write(names.random_states(accelerator.process_index), {"step": step, **capture_rng_states()})
    return records


def _shared_objects(parts: Parts) -> dict[str, Any]:
    """Return what is the same on all ranks and written once, by file name."""
    found: dict[str, Any] = {}
    if parts.leaves:
        found[names.LEAVES] = [leaf.detach() for leaf in parts.leaves]
    found.update({names.optimizer(at): one.state_dict() for at, one in enumerate(parts.optimizers)})
    found.update({names.scheduler(at): one.state_dict() for at, one in enumerate(parts.schedulers)})
    found.update({names.loader(at): one.state_dict() for at, one in enumerate(parts.dataloaders)})
    if parts.scaler is not None:
        found[names.SCALER] = parts.scaler.state_dict()
    found.update({names.custom(at): one.state_dict() for at, one in enumerate(parts.custom_objects)})
    return found


def _warn_of_types(stage: Path, parts: Parts) -> None:
    """Say now what `load_state` would refuse later."""
    for index, one in enumerate(parts.custom_objects):
        found = unsafe_types(stage / names.custom(index))
        if found:
            warn_user(
                f"the state of object {index}, a {type(one).__name__}, holds {', '.join(found)}: load_state will "
                'refuse it without load_kwargs={"weights_only": False}. Let state_dict() return plain numbers, text, '
                "lists, dicts and tensors."
            )


def _publish(stage: Path, target: Path, written: list[dict[str, FileRecord]], accelerator: Any) -> None:
    """Write the manifest and put the checkpoint in place."""
    records = {name: record for one in written for name, record in one.items()}
    for name in folders.contents(stage) - set(records):  # what hooks wrote
        records[name] = files.measure(stage / name, sync=True)
    counts = Parts.of(accelerator).counts
    write_manifest(stage, Manifest(num_processes=accelerator.num_processes, objects=counts, files=records))
    before = folders.contents(target) if target.exists() else set()
    earlier = before & _earlier(target, before)
    stale = earlier - folders.contents(stage)
    folders.publish(stage, target, last=MANIFEST, stale=stale, replaceable=before == earlier)


def _earlier(target: Path, before: set[str]) -> set[str]:
    """Return the files of the checkpoint that the folder holds; without a manifest, those with the names of one."""
    try:
        manifest = read_manifest(target)
    except CheckpointError:
        manifest = None
    if manifest is not None:
        return {*manifest.files, MANIFEST}
    return {MANIFEST, *filter(names.is_part, before)}
