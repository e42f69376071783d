"""`load_state`: everything is read and checked before anything changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.training.checkpoints.folders.checkpoint_folders import continue_after, folder_to_load, newest_of
from notebook_launcher.training.checkpoints.layouts.sharded import share_out
from notebook_launcher.training.checkpoints.training_state.reading import Reader
from notebook_launcher.training.checkpoints.training_state.window import restore_window
from notebook_launcher.training.checkpoints.writers import Writers, gather_outcomes, on_all_ranks
from notebook_launcher.training.process.arrivals import meet
from notebook_launcher.training.random import restore_rng_states
from notebook_launcher.training.user_warnings import warn_user

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from pathlib import Path

    from notebook_launcher.training.checkpoints.training_state.reading import ObjectStates
    from notebook_launcher.training.checkpoints.training_state.stateful_objects import StatefulObjects
    from notebook_launcher.training.plugins import ProjectConfiguration
    from notebook_launcher.training.process.process_state import ProcessState

__all__ = ["load_state", "with_counters_on_cpu"]

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
    writers = Writers.of(process, on_each_node=config.save_on_each_node)
    meet("load_state")
    folder = _find_folder(writers, config, input_dir, saved)
    if folder is None:
        return None
    device = process.device if map_location == "on_device" else "cpu"
    reader = on_all_ranks("read the manifest", lambda: _open(folder, process, device, load_kwargs))
    on_all_ranks("verify the checkpoint", lambda: reader.verify(writers))
    states = on_all_ranks("read the checkpoint", lambda: reader.read(stateful))
    models = _models_to_load(stateful, folder)
    strict = bool(load_model_func_kwargs.get("strict", True))
    weights = on_all_ranks("read the models", lambda: reader.read_models(models, strict=strict))
    on_all_ranks("check the window", reader.check_window)
    on_all_ranks("read what is sharded", lambda: _share_out(reader, stateful, states, models, weights))
    for remark in reader.remarks if process.is_main_process else ():
        warn_user(remark)
    on_all_ranks(
        "load the checkpoint", lambda: _apply(reader, stateful, states, models, weights, load_model_func_kwargs)
    )
    continue_after(config, folder)
    return folder


def _find_folder(
    writers: Writers,
    config: ProjectConfiguration,
    input_dir: str | os.PathLike[str] | None,
    saved: Sequence[str] | None,
) -> Path | None:
    """Return the folder that the leader has found; None if no checkpoint was saved."""

    def find() -> Path | None:
        if not writers.leads:
            return None
        return folder_to_load(config, input_dir) if input_dir is not None or saved is None else newest_of(saved)

    return gather_outcomes("find the checkpoint", find)[writers.leader]


def _open(
    folder: Path, process: ProcessState, device: torch.device | str, load_kwargs: dict[str, Any] | None
) -> Reader:
    return Reader(
        folder,
        rank=process.process_index,
        num_processes=process.num_processes,
        device=device,
        load_kwargs=dict(load_kwargs or {}),
    )


def _models_to_load(stateful: StatefulObjects, folder: Path) -> list[torch.nn.Module]:
    """Run the hooks, and return the models that they have left: only the files of these are read."""
    models = list(stateful.models)
    if stateful.load_hooks:
        on_all_ranks("run the hooks", lambda: [hook(models, str(folder)) for hook in stateful.load_hooks])
    return models


def _share_out(
    reader: Reader,
    stateful: StatefulObjects,
    states: ObjectStates,
    models: list[torch.nn.Module],
    weights: list[dict[str, Any]],
) -> None:
    """Keep this rank's parts of tensors that are loaded into spread ones; keep all others."""
    weights[:] = [share_out(tensors, model.state_dict()) for model, tensors in zip(models, weights, strict=True)]
    pairs = enumerate(zip(stateful.optimizers, states.optimizers, strict=True))
    states.optimizers = [reader.read_optimizer_shards(at, optimizer, state) for at, (optimizer, state) in pairs]


def _apply(
    reader: Reader,
    stateful: StatefulObjects,
    states: ObjectStates,
    models: list[torch.nn.Module],
    weights: list[dict[str, Any]],
    model_kwargs: dict[str, Any],
) -> None:
    """Load everything that was read into the objects."""
    for at, (model, tensors) in enumerate(zip(models, weights, strict=True)):
        if not reader.load_model_shards(at, model, strict=bool(model_kwargs.get("strict", True))):
            model.load_state_dict(tensors, **model_kwargs)
    with torch.no_grad():
        for leaf, tensor in zip(stateful.leaves, states.leaves, strict=True):
            leaf.copy_(tensor)
    pairs = [
        *zip(stateful.optimizers, map(with_counters_on_cpu, states.optimizers), strict=True),
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
    restore_window(stateful, states.window)
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
