"""Ranks that a launch takes of several nodes: as asked for, else as many as make sense."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from notebook_launcher.context import MAX_RANKS
from notebook_launcher.errors import ConfigError
from notebook_launcher.machine.allocation import MAX_RANKS_PER_CORE, MIN_RANK_LIMIT
from notebook_launcher.units import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NodeAllocation", "NodeInfo", "allocate_nodes", "ranks_by_node"]


MAX_SHOWN = 4
"""Nodes that a summary names."""


@dataclasses.dataclass(frozen=True, slots=True)
class NodeInfo:
    """One machine that an engine has."""

    node: int
    """Its number among the nodes of the engine."""
    host: str
    address: str
    """The address at which its ranks meet those of other nodes."""
    num_cores: int
    gpus: tuple[str, ...]
    """Names of the GPUs that ranks can use."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeAllocation:
    """Part of several nodes that a launch takes."""

    num_processes: int
    backend: str | None
    use_gpu: bool
    cores_per_process: int
    """Cores of each rank, on the node that has fewest for each."""
    found: str
    """A clause for the summary: the nodes."""


def ranks_by_node(num_processes: int, num_nodes: int) -> list[tuple[int, ...]]:
    """Return the ranks of each node, consecutive and as even as can be; nodes that get none are left out."""
    num_nodes = min(num_nodes, num_processes)
    part, more = divmod(num_processes, num_nodes)
    starts = [number * part + min(number, more) for number in range(num_nodes + 1)]
    return [tuple(range(start, end)) for start, end in itertools.pairwise(starts)]


def allocate_nodes(
    nodes: Sequence[NodeInfo],
    *,
    num_processes: int | None,
    devices: tuple[int, ...] | str | None,
    backend: str | None,
) -> NodeAllocation:
    """Return what a launch with these fields of `LaunchConfig` takes; raise `ConfigError` if the nodes have less."""
    may_use_gpus = devices != "cpu" and all(node.gpus for node in nodes)
    if num_processes is None:
        # Ranks are spread evenly, so the node with fewest GPUs decides.
        num_processes = len(nodes) * (min(len(node.gpus) for node in nodes) if may_use_gpus else 1)
    parts = ranks_by_node(num_processes, len(nodes))
    used = nodes[: len(parts)]
    for node, ranks in zip(used, parts, strict=True):
        _check_number(node, len(ranks), num_processes)
    own_gpus = may_use_gpus and all(len(ranks) <= len(node.gpus) for node, ranks in zip(used, parts, strict=True))
    return NodeAllocation(
        num_processes=num_processes,
        backend=_choose_backend(backend, own_gpus=own_gpus),
        use_gpu=may_use_gpus,
        cores_per_process=max(1, min(node.num_cores // len(ranks) for node, ranks in zip(used, parts, strict=True))),
        found=f"on {plural(len(used), 'node')} ({_describe_all(used)})",
    )


def _check_number(node: NodeInfo, num_ranks: int, num_processes: int) -> None:
    limit = min(max(MIN_RANK_LIMIT, MAX_RANKS_PER_CORE * node.num_cores), MAX_RANKS)
    if num_ranks > limit or num_processes > MAX_RANKS:
        msg = (
            f"num_processes={num_processes} is too many: node {node.node} ({node.host}) would get {num_ranks}, it has "
            f"{plural(node.num_cores, 'core')}, and {limit} ranks are its limit. Omit num_processes to let the "
            "launcher choose."
        )
        raise ConfigError(msg, field="num_processes")


def _choose_backend(backend: str | None, *, own_gpus: bool) -> str | None:
    if backend == "auto":
        return "nccl" if own_gpus else "gloo"
    if backend is not None and "nccl" in backend and not own_gpus:
        msg = (
            f"backend={backend!r} needs a GPU for each rank, and not every node has as many. Use fewer ranks, or "
            "backend='gloo'."
        )
        raise ConfigError(msg, field="backend")
    return backend


def _describe_all(nodes: Sequence[NodeInfo]) -> str:
    shown = [_describe(node) for node in nodes[:MAX_SHOWN]]
    return ", ".join([*shown, *([f"{len(nodes) - MAX_SHOWN} more"] if len(nodes) > MAX_SHOWN else [])])


def _describe(node: NodeInfo) -> str:
    kinds = [f"{node.gpus.count(name)} x {name}" for name in dict.fromkeys(node.gpus)]
    return f"{node.host}: {' + '.join(kinds) or plural(node.num_cores, 'core')}"
