"""`save_state`: everything that training needs to continue, whole or not at all."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from notebook_launcher.training.checkpoints.checkpoint_error import CheckpointError
from notebook_launcher.training.checkpoints.folders import staging
from notebook_launcher.training.checkpoints.folders.checkpoint_folders import folder_to_save
from notebook_launcher.training.checkpoints.layouts.state_dict_types import check_layout, choose_sharded
from notebook_launcher.training.checkpoints.training_state.checkpoint_writer import CheckpointWriter
from notebook_launcher.training.checkpoints.writers import Writers, gather_outcomes, on_all_ranks
from notebook_launcher.training.process.arrivals import meet

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from pathlib import Path

    from notebook_launcher.training.checkpoints.folders.durable_files import FileDigest
    from notebook_launcher.training.checkpoints.training_state.stateful_objects import StatefulObjects
    from notebook_launcher.training.plugins import ProjectConfiguration
    from notebook_launcher.training.process.process_state import ProcessState
    from notebook_launcher.training.rank_check.check import RankCheck

__all__ = ["save_state"]


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
    """Write everything that training needs to continue; every rank calls it.

    A checkpoint has the states of models, leaf tensors, optimizers, schedulers, the scaler, loaders and registered
    objects and, of each rank, of its random number generators and of an open window. The state of a scheduler or
    registered object is rank 0's and, where it differs between ranks, each rank's. The files are written to a
    stage, a folder beside the target, which takes the target's name once it is complete and has a manifest. Until
    then, an earlier checkpoint of that name stays whole, even if a process is killed. Hooks get the stage, so that
    their files become part of the checkpoint.

    Args:
        stateful: The objects whose states are saved.
        process: This process among its peers.
        config: Folder and naming of checkpoints.
        output_dir: The folder; files in it that do not belong to an earlier checkpoint stay. None: the next one by
            `ProjectConfiguration(automatic_checkpoint_naming=True)`.
        safe: Models as safetensors; False: by `torch.save`.
        rank_check: Compares the ranks' weights first; None: they are not compared.
        state_dict_type: Layout of sharded models and their optimizers: `"FULL_STATE_DICT"` or
            `"SHARDED_STATE_DICT"`. None: the latter above 10 GB.

    Returns:
        The folder.

    Raises:
        ValueError: No folder was given and none can be named, or the automatic name is taken, or the layout is unknown
            or impossible.
        CheckpointError: Something cannot be written, or another rank failed; the earlier checkpoint is whole.
        OSError: The disk is full or fails; the earlier checkpoint is whole.
    """
    on_each_node = bool(config.save_on_each_node)
    check_layout(state_dict_type, on_each_node=on_each_node)
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
        writer.sharded = choose_sharded(states, state_dict_type, process, on_each_node=on_each_node)
        writer.keep_weights(gather_outcomes("run the hooks", writer.run_hooks)[writers.leader])
        digests = _write_files(writer, writers)
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
        target = folder_to_save(config, output_dir)
        return target, staging.open_stage(target)

    places = gather_outcomes("begin the checkpoint", begin)[writers.leader]
    assert places is not None
    try:
        yield places
    except BaseException:
        if writers.leads:
            staging.discard(places[1])
        raise


def _write_files(writer: CheckpointWriter, writers: Writers) -> dict[str, FileDigest]:
    """Write the files of all ranks; return sizes and digests of the files in this rank's stage."""
    on_all_ranks("write its part of the checkpoint", writer.write_spread)
    written = gather_outcomes("write its part of the checkpoint", lambda: (writers.leader, writer.write()))
    in_stage = [digests for leader, digests in written if leader == writers.leader]
    return dict(item for digests in in_stage for item in digests.items())


def _check_reach(stage: Path, rank: int) -> None:
    if not stage.is_dir():
        raise CheckpointError(
            f"{stage.parent} is not on the disks of {socket.gethostname()}, where rank {rank} is. Choose a folder that "
            "all machines share, by project_dir= or output_dir; or let each machine write a checkpoint of its own: "
            "ProjectConfiguration(save_on_each_node=True)."
        )
