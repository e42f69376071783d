"""The registry of an Accelerator: everything that was prepared or registered, in order."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from notebook_launcher.training.accumulation.members.members import Members
    from notebook_launcher.training.accumulation.updates.optimizer import AcceleratedOptimizer
    from notebook_launcher.training.accumulation.updates.scheduler import AcceleratedScheduler

__all__ = ["Prepared"]


class Prepared:
    """Models, leaf tensors, optimizers, schedulers, loaders, registered objects and hooks of one Accelerator."""

    def __init__(self, members: Members) -> None:
        self.members = members
        """Models and leaf tensors."""
        self.optimizers: list[AcceleratedOptimizer] = []
        self.schedulers: list[AcceleratedScheduler] = []
        self.loaders: list[Any] = []
        self.custom_objects: list[Any] = []
        """Objects that `register_for_checkpointing` was given."""
        self.save_hooks: collections.OrderedDict[int, Callable[..., Any]] = collections.OrderedDict()
        self.load_hooks: collections.OrderedDict[int, Callable[..., Any]] = collections.OrderedDict()
        self._known: dict[int, tuple[Any, Any]] = {}
        """By id: an object, and the result of its preparation. Holding the object keeps its id from another object."""

    @property
    def models(self) -> list[Any]:
        """The models, as `prepare` returned them."""
        return self.members.models

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The leaf tensors."""
        return [leaf.tensor for leaf in self.members.leaves]

    def find(self, obj: Any) -> Any:
        """Return what an object was prepared to before, or the object if it is prepared itself; None otherwise."""
        found = self._known.get(id(obj))
        # In an Accelerator that was pickled, an id can be another object's.
        return found[1] if found is not None and found[0] is obj else None

    def remember(self, original: Any, prepared: Any) -> None:
        """Note the result of an object's preparation."""
        self._known[id(original)] = original, prepared
        self._known[id(prepared)] = prepared, prepared
        if prepared is not original:
            prepared._is_accelerate_prepared = True  # noqa: SLF001 - Accelerate's mark, which libraries look for

    def add_save_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Add a hook that runs before models are saved."""
        return _register(self.save_hooks, hook)

    def add_load_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Add a hook that runs before models are loaded."""
        return _register(self.load_hooks, hook)

    def clear(self) -> None:
        """Release everything that was prepared; registered objects and hooks stay."""
        self.members.clear()
        self.optimizers.clear()
        self.schedulers.clear()
        self.loaders.clear()
        self._known.clear()


def _register(hooks: collections.OrderedDict[int, Callable[..., Any]], hook: Callable[..., Any]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
