"""Engines: the machines on which a launch's ranks run, when these are not the kernel's own."""

from __future__ import annotations

import contextlib
import contextvars
import math
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from notebook_launcher.engines.tree import Tree
    from notebook_launcher.machine.node_allocation import NodeInfo
    from notebook_launcher.messaging import messages

__all__ = ["Engine", "ReducibleEngine", "RememberingEngine", "start_deadline", "starting_until"]

_DEADLINE: contextvars.ContextVar[Callable[[], float]] = contextvars.ContextVar("start deadline")


@contextlib.contextmanager
def starting_until(deadline: Callable[[], float]) -> Iterator[None]:
    """Let machines that are started in this block come up until a time, which `deadline` returns again and again."""
    token = _DEADLINE.set(deadline)
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def start_deadline() -> float:
    """Return the time by `time.monotonic()` until which a machine may come up; infinity: as long as it takes."""
    deadline = _DEADLINE.get(None)
    return math.inf if deadline is None else deadline()


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
