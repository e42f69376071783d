"""Resources of one node of a Ray cluster, and the share of them that an agent holds."""

from __future__ import annotations

import dataclasses

from notebook_launcher.machine.node_allocation import NodeInfo

__all__ = ["NodeShare"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeShare:
    """Resources of one node, or the share of them that an agent holds."""

    node_id: str
    host: str
    address: str
    cpus: float
    gpus: int
    kind: str
    """Ray's name of the node's GPUs."""
    is_busy: bool = dataclasses.field(default=False, compare=False)
    """True if some of it was in use when Ray was asked."""

    def part(self, num_ranks: int, *, use_gpus: bool, cpus: float | None) -> NodeShare:
        """Return the part that so many ranks need."""
        cpus = min(float(num_ranks), self.cpus) if cpus is None else cpus
        return dataclasses.replace(self, cpus=cpus, gpus=min(num_ranks, self.gpus) if use_gpus else 0)

    def info(self, number: int) -> NodeInfo:
        """Return the node for a plan."""
        return NodeInfo(number, self.host, self.address, max(1, int(self.cpus)), (self.kind,) * self.gpus)
