"""Names of the files in a checkpoint, which are Accelerate's wherever Accelerate has one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "LEAVES",
    "METADATA",
    "SCALER",
    "count_objects",
    "custom_object",
    "is_checkpoint_file",
    "leaves_folder",
    "loader",
    "model",
    "model_shards",
    "of_rank",
    "optimizer",
    "optimizer_shards",
    "random_states",
    "scheduler",
    "window",
]

METADATA = ".metadata"
"""The file with which a reader of a folder of shards begins."""
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
    r"scheduler(?:_\d+)?_rank_\d+\.bin",
    r"custom_checkpoint_\d+_rank_\d+\.pkl",
    r"random_states_\d+\.pkl",
    r"window_\d+\.bin",
    r"sampler(?:_\d+)?\.bin",
    r"dl_state_dict(?:_\d+)?\.bin",
    r"scaler\.pt",
    r"leaves\.bin",
)
"""Names of all files of a checkpoint without manifest: Accelerate's, or this package's with the manifest lost."""


def leaves_folder(name: object) -> bool:
    """Return True for what a list of a folder's files may not name: a path that leads out of the folder, or no text."""
    return not isinstance(name, str) or name.startswith("/") or ".." in name.split("/") or "\0" in name


def model(index: int, *, safe: bool) -> str:
    """Return `model.safetensors`, `model_1.safetensors` and so on, or `pytorch_model.bin`."""
    return _file_name("model", index, "safetensors") if safe else _file_name("pytorch_model", index, "bin")


def optimizer(index: int) -> str:
    """Return `optimizer.bin`, `optimizer_1.bin` and so on."""
    return _file_name("optimizer", index, "bin")


def model_shards(index: int) -> str:
    """Return the folder of a model in the sharded layout."""
    return f"pytorch_model_fsdp_{index}"


def optimizer_shards(index: int) -> str:
    """Return the folder of an optimizer's spread tensors in the sharded layout; its file has the rest."""
    return f"optimizer_{index}"


def scheduler(index: int) -> str:
    """Return `scheduler.bin`, `scheduler_1.bin` and so on."""
    return _file_name("scheduler", index, "bin")


def loader(index: int) -> str:
    """Return the file with a loader's position; Accelerate has no such file."""
    return _file_name("dataloader", index, "bin")


def custom_object(index: int) -> str:
    """Return the file with the state of an object that was registered."""
    return f"custom_checkpoint_{index}.pkl"


def of_rank(name: str, process_index: int) -> str:
    """Return the file with what a rank has in the place of the file of this name, which has the first rank's."""
    stem, _, suffix = name.rpartition(".")
    return f"{stem}_rank_{process_index}.{suffix}"


def random_states(process_index: int) -> str:
    """Return the file with a rank's random number generators."""
    return f"random_states_{process_index}.pkl"


def window(process_index: int) -> str:
    """Return the file with the gradients that a rank has gathered in an open window."""
    return f"window_{process_index}.bin"


def count_objects(files: Iterable[str]) -> dict[str, int]:
    """Return the numbers of models, optimizers and so on whose files are in a folder."""
    kinds = {"models": MODEL, "optimizers": OPTIMIZER, "schedulers": SCHEDULER, "custom_objects": CUSTOM}
    files = list(files)
    return {kind: sum(re.fullmatch(form, name) is not None for name in files) for kind, form in kinds.items()}


def is_checkpoint_file(name: str) -> bool:
    """Return True if `save_state` or Accelerate may have written a file of this name."""
    return any(re.fullmatch(form, name) for form in FORMS)


def _file_name(stem: str, index: int, suffix: str) -> str:
    return f"{stem}_{index}.{suffix}" if index else f"{stem}.{suffix}"
