"""Weights whose update waits for its gradients: a read through their module makes the update first.

Torch's modules keep their parameters in a dictionary, through which they read them: `module.weight`, `parameters()`,
`state_dict()`, a pickle. While updates wait, this dictionary is one that notices reads. A parameter that is read past
its module, as from a list of one's own, is hidden: it is empty, so that the read fails and cannot return old numbers.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["PendingWeights"]


class PendingWeights:
    """The weights of one model whose updates wait.

    Args:
        module: The model.
        read: Function that is called with a parameter before it is read.
    """

    def __init__(self, module: torch.nn.Module, read: Callable[[Any], None]) -> None:
        self._module = module
        self._read = read
        self._hidden: dict[int, Hidden] = {}
        self._watched: list[tuple[torch.nn.Module, WatchedParameters, Any]] = []
        """Modules with their dictionary, and the handle of the hook before their forward, if they need one."""

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._hidden

    def can_be_watched(self) -> bool:
        """Return True if reads of the weights can be noticed: no part is compiled, or a program of TorchScript."""
        return all(
            type(module.__dict__.get("_parameters")) in (dict, collections.OrderedDict, WatchedParameters)
            and getattr(module, "_compiled_call_impl", None) is None
            and "_orig_mod" not in module.__dict__["_modules"]
            for module in self._module.modules()
        )

    def hide(self, parameters: list[torch.Tensor]) -> None:
        """Hide parameters, and notice reads of them from now on."""
        for parameter in parameters:
            data, version = parameter.data, parameter._version  # noqa: SLF001 - torch has no public name for it
            if data.numel():
                parameter.data = torch.empty(0, dtype=data.dtype, device=data.device)
            self._hidden[id(parameter)] = Hidden(parameter, data, version)
        seen = {id(module) for module, _, _ in self._watched}
        for module in self._module.modules():
            if id(module) not in seen and any(id(one) in self._hidden for one in module._parameters.values()):  # noqa: SLF001
                self._watch(module)

    def _watch(self, module: torch.nn.Module) -> None:
        watched = WatchedParameters(module._parameters, self._read)  # noqa: SLF001
        module.__dict__["_parameters"] = watched
        # These keep their parameters in a list, which their forward reads.
        handle = None
        if isinstance(module, torch.nn.RNNBase):
            handle = module.register_forward_pre_hook(ReadAll(watched))
        self._watched.append((module, watched, handle))

    def show(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Show parameters that were hidden; return those that were changed meanwhile, past their module."""
        changed = []
        for parameter in parameters:
            hidden = self._hidden.pop(id(parameter), None)
            if hidden is None:
                continue
            is_replaced = hidden.data.numel() and parameter.numel()
            if is_replaced or parameter._version != hidden.version:  # noqa: SLF001
                changed.append(hidden.data)
            parameter.data = hidden.data
        return changed

    def show_all(self) -> list[torch.Tensor]:
        """Show all parameters, and watch no module any more; return parameters as `show` does."""
        changed = self.show([hidden.parameter for hidden in self._hidden.values()])
        for module, watched, handle in self._watched:
            if module.__dict__.get("_parameters") is watched:
                module.__dict__["_parameters"] = watched.plain
            if handle is not None:
                handle.remove()
        self._watched.clear()
        return changed


class Hidden(NamedTuple):
    """A hidden parameter."""

    parameter: torch.Tensor
    data: torch.Tensor
    """Its numbers."""
    version: int
    """The number of writes to it when it was hidden."""


class WatchedParameters(dict[str, Any]):
    """A module's dictionary of parameters that notices reads and changes; it pickles as an ordinary one.

    Args:
        plain: The module's own dictionary, to which all changes go.
        read: Function that is called with a parameter before it is read.
    """

    __slots__ = ("_read", "plain")

    def __init__(self, plain: dict[str, Any], read: Callable[[Any], None]) -> None:
        super().__init__(plain)
        self.plain, self._read = plain, read

    def read_all(self) -> dict[str, Any]:
        """Return the module's own dictionary, after a read of everything in it."""
        for parameter in list(self.plain.values()):
            self._read(parameter)
        return self.plain

    def __getitem__(self, name: str) -> Any:
        parameter = self.plain[name]
        self._read(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        """Return a parameter."""
        return self[name] if name in self.plain else default

    def __iter__(self) -> Iterator[str]:  # Also so that `dict(...)` and `update(...)` read by `__getitem__`.
        return iter(self.plain)

    def values(self) -> Any:
        """Return all parameters."""
        return self.read_all().values()

    def items(self) -> Any:
        """Return all parameters with their names."""
        return self.read_all().items()

    def copy(self) -> dict[str, Any]:
        """Return an ordinary dictionary of the same parameters."""
        return self.read_all().copy()

    def __setitem__(self, name: str, parameter: Any) -> None:
        self.read_all()[name] = parameter
        super().__setitem__(name, parameter)

    def __delitem__(self, name: str) -> None:
        del self.read_all()[name]
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        """Remove a parameter, and return it."""
        super().pop(name, None)
        return self.read_all().pop(name, *default)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add parameters."""
        super().update(*args, **kwargs)
        self.read_all().update(*args, **kwargs)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return type(self.plain), (list(self.read_all().items()),)


class ReadAll:
    """The hook before the forward of a module that reads its parameters from a list."""

    def __init__(self, watched: WatchedParameters) -> None:
        self._watched = watched

    def __call__(self, *_: Any) -> None:
        """Read everything."""
        self._watched.read_all()
