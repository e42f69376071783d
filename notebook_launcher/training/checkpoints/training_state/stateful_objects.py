"""The objects of an Accelerator whose states belong in a checkpoint."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from notebook_launcher.training.unwrapping import unwrap_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from notebook_launcher.training.accumulation.windows.gradient_state import GradientState
    from notebook_launcher.training.prepared import Prepared
    from notebook_launcher.training.rules import Rules

__all__ = ["StatefulObjects"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StatefulObjects:
    """The objects, in the order in which they were prepared or registered."""

    models: list[torch.nn.Module]
    """The models without the wrappers of `prepare`, so that weights have the models' own names."""
    leaves: list[torch.Tensor]
    optimizers: list[Any]
    schedulers: list[Any]
    dataloaders: list[Any]
    custom_objects: list[Any]
    """Objects that `register_for_checkpointing` was given."""
    scaler: Any
    """The gradient scaler of fp16; None in other precisions."""
    gradient_state: Any
    """The `GradientState` with the open windows."""
    save_hooks: list[Callable[..., Any]]
    """Called with models, weights and folder before models are saved."""
    load_hooks: list[Callable[..., Any]]
    """Called with models and folder before models are loaded."""
    nominal_divisor: bool
    """True if gradients are averaged over ranks, and not over what the window held."""
    loaders_resume: bool
    """True if loaders continue where they were saved."""

    @classmethod
    def of(cls, prepared: Prepared, gradient_state: GradientState, rules: Rules, *, scaler: Any) -> StatefulObjects:
        """Return what an Accelerator has prepared at this moment."""
        return cls(
            models=[unwrap_model(model, keep_torch_compile=False) for model in prepared.models],
            leaves=prepared.leaves,
            optimizers=list(prepared.optimizers),
            schedulers=list(prepared.schedulers),
            dataloaders=list(prepared.loaders),
            custom_objects=list(prepared.custom_objects),
            scaler=scaler,
            gradient_state=gradient_state,
            save_hooks=list(prepared.save_hooks.values()),
            load_hooks=list(prepared.load_hooks.values()),
            nominal_divisor=rules.nominal_divisor,
            loaders_resume=rules.loaders_resume,
        )

    @property
    def counts(self) -> dict[str, int]:
        """Number of objects of each kind."""
        kinds = ("models", "leaves", "optimizers", "schedulers", "dataloaders", "custom_objects")
        return {kind: len(getattr(self, kind)) for kind in kinds}

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield everything that may have a gradient, with a name that is the same in every run."""
        for index, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                yield f"{index}.{name}", parameter
        for index, leaf in enumerate(self.leaves):
            yield f"leaf.{index}", leaf
