"""Checkpoints: written to a folder aside and renamed, with a manifest, loadable with another number of ranks."""

from __future__ import annotations

from notebook_launcher.training.checkpoints.folders import CheckpointError
from notebook_launcher.training.checkpoints.models import load_model, save, save_model
from notebook_launcher.training.checkpoints.objects import load

__all__ = [
    "CheckpointError",
    "load",
    "load_model",
    "save",
    "save_model",
]
