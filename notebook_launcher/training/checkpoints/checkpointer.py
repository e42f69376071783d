"""Saves and loads what an Accelerator has prepared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher import context
from notebook_launcher.training.checkpoints.loading import load_state
from notebook_launcher.training.checkpoints.models import save, save_model
from notebook_launcher.training.checkpoints.objects import check_custom_objects
from notebook_launcher.training.checkpoints.saving import StatefulObjects, save_state
from notebook_launcher.training.unwrapping import unwrap_model

if TYPE_CHECKING:
    import os

    from notebook_launcher.training.accumulation.updates import Updates
    from notebook_launcher.training.accumulation.windows import GradientState
    from notebook_launcher.training.parallelism.fsdp_plugin import FullyShardedDataParallelPlugin
    from notebook_launcher.training.plugins import ProjectConfiguration, Rules
    from notebook_launcher.training.preparation import Prepared
    from notebook_launcher.training.process.process_state import ProcessState
    from notebook_launcher.training.rank_check.check import RankCheck
    from notebook_launcher.training.requests import Safepoint

__all__ = ["Checkpointer"]


class Checkpointer:
    """Writes and reads the checkpoints of one Accelerator.

    Args:
        process: This process among its peers.
        prepared: The objects whose states are saved.
        updates: Knows the gradient scaler.
        gradient_state: The open windows.
        rules: The differences from Accelerate.
        project: Folder and naming of checkpoints.
        rank_check: Compares the ranks' weights before a save; None: they are not compared.
        fsdp_plugin: Says the layout of sharded models at each save; None: by size.
        safepoint: Counts the updates; None outside of a launch.
    """

    def __init__(
        self,
        process: ProcessState,
        prepared: Prepared,
        updates: Updates,
        gradient_state: GradientState,
        rules: Rules,
        *,
        project: ProjectConfiguration,
        rank_check: RankCheck | None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None,
        safepoint: Safepoint | None,
    ) -> None:
        self.project = project
        self._process = process
        self._prepared = prepared
        self._updates = updates
        self._gradient_state = gradient_state
        self._rules = rules
        self._rank_check = rank_check
        self._fsdp_plugin = fsdp_plugin
        self._safepoint = safepoint

    def _collect(self) -> StatefulObjects:
        """Return what the Accelerator has prepared at this moment."""
        prepared = self._prepared
        return StatefulObjects(
            models=[unwrap_model(model, keep_torch_compile=False) for model in prepared.models],
            leaves=prepared.leaves,
            optimizers=list(prepared.optimizers),
            schedulers=list(prepared.schedulers),
            dataloaders=list(prepared.loaders),
            custom_objects=list(prepared.custom_objects),
            scaler=self._updates.scaling.update(),
            gradient_state=self._gradient_state,
            safepoint=self._safepoint,
            save_hooks=list(prepared.save_hooks.values()),
            load_hooks=list(prepared.load_hooks.values()),
            nominal_divisor=self._rules.nominal_divisor,
            loaders_resume=self._rules.loaders_resume,
        )

    def save(self, obj: Any, f: str | os.PathLike[str], *, safe: bool) -> None:
        """Write an object to a file, once, and whole or not at all."""
        save(obj, f, save_on_each_node=bool(self.project.save_on_each_node), safe_serialization=safe)

    def save_model(self, model: Any, folder: str | os.PathLike[str], max_shard_size: int | str, *, safe: bool) -> None:
        """Write a model's weights under Hugging Face's file names."""
        with context.activity(context.SAVING):
            save_model(unwrap_model(model), folder, max_shard_size, safe)

    def save_state(
        self, output_dir: str | os.PathLike[str] | None, *, safe: bool, state_dict_type: str | None = None
    ) -> Path:
        """Write everything that training needs to continue; every rank must call it."""
        if state_dict_type is None and self._fsdp_plugin is not None:
            state_dict_type = self._fsdp_plugin.checkpoint_layout
        with context.activity(context.SAVING):
            folder = save_state(
                self._collect(),
                self._process,
                self.project,
                output_dir,
                safe=safe,
                rank_check=self._rank_check,
                state_dict_type=state_dict_type,
            )
            context.note_checkpoint(str(folder), is_writer=self._process.is_main_process)
            return folder

    def folder_of_update(self, number: int) -> Path | None:
        """Return the folder for a checkpoint that the launcher asks for after an update; None: automatic naming."""
        if self.project.automatic_checkpoint_naming and self.project.project_dir:
            return None
        return Path(self.project.project_dir or ".") / "checkpoints" / f"update_{number}"

    def load_state(
        self, input_dir: str | os.PathLike[str] | None, load_kwargs: dict[str, Any] | None, model_kwargs: dict[str, Any]
    ) -> Path | None:
        """Load what `save_state` wrote; every rank must call it."""
        return load_state(
            self._collect(),
            self._process,
            self.project,
            input_dir,
            load_kwargs,
            saved=context.saved_checkpoints(),
            **model_kwargs,
        )

    def register(self, objects: tuple[Any, ...]) -> None:
        """Save and load these objects too; raises ValueError if one lacks `state_dict` or `load_state_dict`."""
        check_custom_objects(objects)
        self._prepared.custom_objects.extend(objects)
