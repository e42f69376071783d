"""Engines: the machines on which a launch's ranks run, when these are not the kernel's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Collection

    from notebook_launcher.engines.tree import Tree
    from notebook_launcher.machine.node_allocation import NodeInfo
    from notebook_launcher.messaging import messages

__all__ = ["Engine", "ReducibleEngine", "RememberingEngine"]


class Engine(Protocol):
    """Machines that ranks can run on, as a value: frozen, printable, checked when it is made."""

    def look(self) -> tuple[NodeInfo, ...]:
        """Return the machines, with their cores and GPUs; raises `ConfigError` if one cannot be used."""
        ...

    def start(self, setup: messages.Setup) -> Tree:
        """Start ranks; `setup.environ` holds what is added to each machine's own environment."""
        ...


@runtime_checkable
class RememberingEngine(Engine, Protocol):
    """Engine whose machines need not be looked at for each launch."""

    def nodes_for_launch(self) -> tuple[NodeInfo, ...]:
        """Return what `look` returns, or what it returned a short time ago."""
        ...


@runtime_checkable
class ReducibleEngine(Engine, Protocol):
    """Engine of which a run can use a part, when machines are gone for good."""

    def without(self, nodes: Collection[int]) -> ReducibleEngine | None:
        """Return the engine of the other nodes, which have the numbers from 0 on; None if there is no other one."""
        ...

    def close(self) -> None:
        """End what is kept up between launches."""
        ...
