"""The stacks of ranks on several nodes, read by their agents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from notebook_launcher.engines.cluster.node import Node

__all__ = ["NodeStacks"]


class NodeStacks:
    """The stacks of a cluster tree's ranks (`RankStacks` of several machines).

    Args:
        ranks_of: The ranks of each node.
        ask: Calls a method of the `StackFiles` of each node, with its arguments there; returns the answers, joined.
    """

    def __init__(
        self,
        ranks_of: Mapping[Node, tuple[int, ...]],
        ask: Callable[[Any, Mapping[Node, tuple[Any, ...]]], dict[int, Any]],
    ) -> None:
        self._ranks_of = ranks_of
        self._ask = ask

    def dump(self, ranks: Iterable[int] | None = None) -> dict[int, str]:
        """Return the stacks of all threads of these ranks, or of every live rank."""
        wanted = None if ranks is None else set(ranks)
        return self._ask("dump", {node: (self._here(node, wanted),) for node in self._ranks_of})

    def sizes(self) -> dict[int, int]:
        """Return the number of bytes that each rank that is up has written into its file."""
        return self._ask("sizes", dict.fromkeys(self._ranks_of, ()))

    def request(self) -> None:
        """Have every rank that is up write its stacks; this waits for the request's arrival."""
        self._ask("request", dict.fromkeys(self._ranks_of, ()))

    def read(self, starts: Mapping[int, int]) -> dict[int, str]:
        """Return what ranks have written into their files after these positions."""
        wanted = set(starts)
        here = {node: {rank: starts[rank] for rank in self._here(node, wanted)} for node in self._ranks_of}
        return self._ask("read", {node: (positions,) for node, positions in here.items()})

    def _here(self, node: Node, ranks: set[int] | None) -> list[int]:
        return [rank for rank in self._ranks_of[node] if ranks is None or rank in ranks]
