"""The board's memory where every node has its own: what is written goes to all, what is read comes from all.

A request goes to the node of rank 0 last, when all other nodes have confirmed that they have it. So once rank 0 sees
the request and names an update for it, every rank that looks sees it too (`training/requests/agreement.py`).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from notebook_launcher.engines.cluster import node_records
from notebook_launcher.messaging import board_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.engines.cluster.node import Node

__all__ = ["RelayedMemory"]


class RelayedMemory:
    """The board's memory in a tree of several nodes, as the kernel writes and reads it.

    Args:
        nodes: The nodes; rank 0 is on the first.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._memory = bytearray(board_layout.BOARD_SIZE)
        self._epoch = 0
        self._numbers = itertools.count(1)
        self._held: collections.deque[_HeldWrite] = collections.deque()
        """Requests that the first node does not have yet, the oldest first."""

    def __getitem__(self, at: Any) -> Any:
        return self._memory[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        self._memory[at] = value
        if isinstance(at, slice):
            self._write_all(at.start or 0, bytes(value))
        else:
            self._request(at, bytes([value]))

    def _write_all(self, start: int, data: bytes) -> None:
        self._epoch += 1
        self._held.clear()
        for node in self._nodes:
            node.send(node_records.BoardWrite(start, data, self._epoch))

    def _request(self, at: int, data: bytes) -> None:
        write = node_records.BoardWrite(at, data, self._epoch, next(self._numbers))
        others = [node for node in self._nodes[1:] if not node.lost]
        self._held.append(_HeldWrite(write, {node.number for node in others}))
        for node in others:
            node.send(write)
        self._send_held()

    def note_written(self, node: int, number: int) -> None:
        """Note that a node has what was written; `number` as in `BoardWrite`."""
        for held in self._held:
            if held.write.number == number:
                held.missing.discard(node)
        self._send_held()

    def _send_held(self) -> None:
        while self._held and not self._held[0].missing:
            self._nodes[0].send(dataclasses.replace(self._held.popleft().write, number=0))

    def merge(self, state: node_records.NodeState, ranks: Sequence[int]) -> None:
        """Take over what ranks of one node have written, unless the board was cleared since."""
        if state.epoch != self._epoch:
            return
        self._memory[board_layout.HAS_SAFEPOINT] |= state.has_safepoint
        for first, values in ((board_layout.COOPERATIVE, state.cooperative), (board_layout.ACTIVITY, state.activities)):
            self._memory[first + ranks[0] : first + ranks[0] + len(values)] = values


@dataclasses.dataclass(slots=True)
class _HeldWrite:
    """A request on its way."""

    write: node_records.BoardWrite
    missing: set[int]
    """The nodes that have not confirmed yet that they have it."""
