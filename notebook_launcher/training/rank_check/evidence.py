"""Evidence that ranks write for each other at a comparison, and the parameters that it compares."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from notebook_launcher.training.fingerprints import is_comparable

if TYPE_CHECKING:
    import torch

    from notebook_launcher.training.accumulation.members.ddp import Notes, SyncedModel
    from notebook_launcher.training.accumulation.members.members import Members

__all__ = ["Comparand", "Evidence", "digest"]


class Evidence(NamedTuple):
    """The fingerprints and numbers that a rank writes for the others at a comparison."""

    form: int
    """Fingerprint of the parameters' names and shapes."""
    weights: int
    """Fingerprint of the parameters."""
    state_form: int
    """Fingerprint of the names of the optimizers' states. It differs where each rank keeps a part on purpose."""
    state: int
    rates: list[float]
    """The learning rates of all groups."""
    inputs: int | None
    """Fingerprint of the model's inputs; None where a prepared loader shares the data out."""
    outside: int | None
    """Fingerprint of the parameters that unprepared optimizers update beside the prepared models; None without any."""
    num_steps: int
    """Micro-batches of a full window."""


@dataclasses.dataclass(frozen=True, slots=True)
class Comparand:
    """Parameters that ranks compare together, and reduce together: a model's, or the leaf tensors."""

    owner: Any
    """The object that the bulletin names: the model, or the members for their leaf tensors."""
    title: str
    """The comparand's name in messages."""
    notes: Notes
    """The notes that count the comparand's reductions."""
    tensors: list[tuple[str, torch.Tensor]]
    """The parameters with their names, if they are trained, not ignored by DDP, and whole on each rank."""

    @property
    def is_to_compare(self) -> bool:
        """True after a reduction whose number is a power of two and that was not compared yet."""
        update = self.notes.num_synced
        return self.notes.compared < update and not update & (update - 1)

    @classmethod
    def of_model(cls, model: SyncedModel) -> Comparand:
        """Return the comparand of a model."""
        tensors = [
            (name.replace("_orig_mod.", ""), parameter)
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in model.parameters_to_ignore and is_comparable(parameter)
        ]
        return cls(model, type(model.module).__name__, model.notes, tensors)

    @classmethod
    def of_leaves(cls, members: Members) -> Comparand:
        """Return the comparand of the leaf tensors."""
        tensors = [(f"leaf tensor {at}", leaf.tensor) for at, leaf in enumerate(members.leaves)]
        return cls(members, "the leaf tensors", members.leaf_notes, tensors)


def digest(value: Any) -> int:
    """Return 48 bits that depend on a plain value, as JSON has it."""
    return int.from_bytes(hashlib.blake2b(json.dumps(value).encode(), digest_size=6).digest(), "little")
