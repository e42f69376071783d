"""Checkpoints: written aside and renamed, with a manifest, loadable with another number of ranks."""

from __future__ import annotations

from notebook_launcher.training.checkpoints.checkpoint_error import CheckpointError
from notebook_launcher.training.checkpoints.loading import load_state
from notebook_launcher.training.checkpoints.model_files import load_model, save, save_model
from notebook_launcher.training.checkpoints.objects import check_custom_objects, load
from notebook_launcher.training.checkpoints.saving import save_state

__all__ = [
    "CheckpointError",
    "check_custom_objects",
    "load",
    "load_model",
    "load_state",
    "save",
    "save_model",
    "save_state",
]
