"""The names of a checkpoint's files: Accelerate's where it has one, so that either can read the other's."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["count", "custom", "is_part", "loader", "model", "optimizer", "random_states", "scheduler", "window"]

SCALER = "scaler.pt"
LEAVES = "leaves.bin"
MODEL = r"(?:model|pytorch_model)(?:_\d+)?\.(?:safetensors|bin)"
OPTIMIZER = r"optimizer(?:_\d+)?\.bin"
SCHEDULER = r"scheduler(?:_\d+)?\.bin"
CUSTOM = r"custom_checkpoint_\d+\.pkl"
FORMS = (
    MODEL,
    OPTIMIZER,
    SCHEDULER,
    CUSTOM,
    r"dataloader(?:_\d+)?\.bin",
    r"random_states_\d+\.pkl",
    r"window_\d+\.bin",
    r"sampler(?:_\d+)?\.bin",
    r"dl_state_dict(?:_\d+)?\.bin",
    r"scaler\.pt",
    r"leaves\.bin",
)
"""All that a checkpoint of Accelerate's, or of ours without its manifest, may consist of."""


def model(index: int, *, safe: bool) -> str:
    """Return `model.safetensors`, `model_1.safetensors` and so on, or `pytorch_model.bin`."""
    return _numbered("model", index, "safetensors") if safe else _numbered("pytorch_model", index, "bin")


def optimizer(index: int) -> str:
    """Return `optimizer.bin`, `optimizer_1.bin` and so on."""
    return _numbered("optimizer", index, "bin")


def scheduler(index: int) -> str:
    """Return `scheduler.bin`, `scheduler_1.bin` and so on."""
    return _numbered("scheduler", index, "bin")


def loader(index: int) -> str:
    """Return the file with a loader's position, which Accelerate has no like of."""
    return _numbered("dataloader", index, "bin")


def custom(index: int) -> str:
    """Return the file with the state of an object that was registered."""
    return f"custom_checkpoint_{index}.pkl"


def random_states(process_index: int) -> str:
    """Return the file with a rank's random number generators."""
    return f"random_states_{process_index}.pkl"


def window(process_index: int) -> str:
    """Return the file with the gradients that a rank has gathered in an open window."""
    return f"window_{process_index}.bin"


def count(files: Iterable[str]) -> dict[str, int]:
    """Return how many models, optimizers and so on there are among a folder's files."""
    kinds = {"models": MODEL, "optimizers": OPTIMIZER, "schedulers": SCHEDULER, "custom_objects": CUSTOM}
    files = list(files)
    return {kind: sum(re.fullmatch(form, name) is not None for name in files) for kind, form in kinds.items()}


def is_part(name: str) -> bool:
    """Whether a file has the name of a checkpoint's part."""
    return any(re.fullmatch(form, name) for form in FORMS)


def _numbered(stem: str, index: int, suffix: str) -> str:
    return f"{stem}_{index}.{suffix}" if index else f"{stem}.{suffix}"
