"""Ranks and GPUs that a launch takes of a machine: as asked for, else as many as make sense."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from notebook_launcher.errors import ConfigError
from notebook_launcher.messaging.board_layout import MAX_RANKS
from notebook_launcher.wording import plural, plural_verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.machine.devices import Machine


DEFAULT_CPU_RANKS = 4
"""At most so many CPU ranks where the number is left open: more rarely help, and each takes memory."""
MAX_RANKS_PER_CORE = 16
MIN_RANK_LIMIT = 64
SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Variable with which NCCL 2.30 and newer accepts several ranks on one GPU, if it is 1; found in its `init.cc`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Part of a machine that a launch takes."""

    num_processes: int
    gpus: tuple[int, ...]
    """Positions among the visible GPUs; empty: the ranks use the CPU."""
    backend: str | None
    """Backend of the default process group; None: no group is started."""


def allocate(
    machine: Machine,
    *,
    num_processes: int | None,
    devices: tuple[int, ...] | str | None,
    backend: str | None,
    nccl_shares: bool = False,
) -> Allocation:
    """Return what a launch with these fields of `LaunchConfig` takes; raise `ConfigError` if the machine has less.

    With `nccl_shares` the ranks get `SHARING_VARIABLE`, so NCCL may be chosen for ranks that share a GPU.
    """
    gpus = _choose_gpus(devices, machine)
    num_processes = num_processes or len(gpus) or min(DEFAULT_CPU_RANKS, machine.num_cores)
    if num_processes > (limit := rank_limit(machine.num_cores)):
        cores = plural(machine.num_cores, "core")
        raise _too_many(num_processes, f" for this machine: it has {cores}, and {limit} ranks are the limit")
    return Allocation(
        num_processes=num_processes,
        gpus=gpus,
        backend=_choose_backend(backend, num_processes, gpus, machine, nccl_shares=nccl_shares),
    )


def rank_limit(num_cores: int) -> int:
    """Return the largest number of ranks that a launch may have on a machine with so many cores."""
    return min(max(MIN_RANK_LIMIT, MAX_RANKS_PER_CORE * num_cores), MAX_RANKS)


def _choose_gpus(devices: tuple[int, ...] | str | None, machine: Machine) -> tuple[int, ...]:
    if devices is None:
        return tuple(range(len(machine.gpus))) if not machine.why_no_gpu else ()
    if isinstance(devices, str):
        return ()
    if machine.why_no_gpu:
        raise ConfigError(
            f"devices={list(devices)!r}: {machine.why_no_gpu}. Use devices='cpu', or omit devices.", field="devices"
        )
    for index in devices:
        if index >= len(machine.gpus):
            have = ", ".join(f"{at}: {gpu.name}" for at, gpu in enumerate(machine.gpus))
            raise ConfigError(
                f"devices={list(devices)!r}: there is no GPU {index}. Visible are {have}.", field="devices"
            )
    return devices


def _too_many(num_processes: int, why: str) -> ConfigError:
    return ConfigError(
        f"num_processes={num_processes} is too many{why}. Omit num_processes to let the launcher choose.",
        field="num_processes",
    )


def _choose_backend(
    backend: str | None, num_processes: int, gpus: tuple[int, ...], machine: Machine, *, nccl_shares: bool
) -> str | None:
    num_gpus = len(gpus)
    has_enough = num_gpus >= num_processes or (nccl_shares and num_gpus > 0)
    if backend == "auto":
        # NCCL refuses two ranks on one GPU ("Duplicate GPU detected") unless told otherwise, and slices may be of one.
        has_slices = num_processes > 1 and any(machine.gpus[at].is_slice for at in gpus)
        return "nccl" if has_enough and (nccl_shares or not has_slices) else "gloo"
    if backend is not None and "nccl" in backend:
        if not num_gpus:
            why = machine.why_no_gpu or "devices='cpu' excludes every GPU"
            raise ConfigError(
                f"backend={backend!r} needs a GPU for each rank: {why}. Use backend='gloo' or 'auto'.", field="backend"
            )
        if not has_enough:
            raise ConfigError(
                f"num_processes={num_processes} with backend={backend!r}: NCCL needs a GPU for each rank, and "
                f"there {plural_verb('is', num_gpus)} {num_gpus}. Use num_processes={num_gpus}, or "
                f"backend='gloo' to let ranks share. (NCCL 2.30 and newer shares a GPU with {SHARING_VARIABLE}=1.)",
                field="num_processes",
            )
    return backend


# --------------------------------------------------------------------------------------------------------------------
# Ranks that a launch takes of several nodes: as asked for, else as many as make sense.


MAX_SHOWN = 4
"""Nodes that a summary names."""


@dataclasses.dataclass(frozen=True, slots=True)
class NodeInfo:
    """One machine that an engine has."""

    node: int
    """Its number among the nodes of the engine."""
    host: str
    address: str
    """The address at which its ranks meet the ranks of other nodes."""
    num_cores: int
    gpus: tuple[str, ...]
    """Names of the GPUs that ranks can use."""
    has_folder: bool = True
    """False if the kernel's working directory is not on its disks."""


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
    num_nodes: int
    """Number of nodes that get ranks: the first ones of the engine."""
    node_names: tuple[str, ...]
    """By rank: the name of its node; empty if there is one."""


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
    num_nodes: int | None = None,
    processes_per_node: int | None = None,
) -> NodeAllocation:
    """Return what a launch with these fields of `LaunchConfig` takes; raise `ConfigError` if the nodes have less."""
    if num_nodes is None and num_processes is not None and processes_per_node is not None:
        num_nodes = num_processes // processes_per_node
    if num_nodes is not None and num_nodes > len(nodes):
        raise ConfigError(
            f"{plural(num_nodes, 'node')} are asked for, and the engine has {plural(len(nodes), 'node')}: "
            f"{_describe_all(nodes)}. Omit nodes= to use all of them.",
            field="nodes",
        )
    nodes = nodes[:num_nodes]
    may_use_gpus = devices != "cpu" and all(node.gpus for node in nodes)
    if num_processes is None:
        # Ranks are spread evenly, so the node with fewest GPUs decides.
        of_each = processes_per_node or (min(len(node.gpus) for node in nodes) if may_use_gpus else 1)
        num_processes = len(nodes) * of_each
    parts = ranks_by_node(num_processes, len(nodes))
    used = nodes[: len(parts)]
    for node, ranks in zip(used, parts, strict=True):
        if len(ranks) > (limit := rank_limit(node.num_cores)) or num_processes > MAX_RANKS:
            gets = f"node {node.node} ({node.host}) would get {len(ranks)}, it has {plural(node.num_cores, 'core')}"
            raise _too_many(num_processes, f": {gets}, and {limit} ranks are its limit")
    lacking = [node.host for node in used if not node.has_folder]
    way_out = "save checkpoints to a shared folder, or with save_on_each_node=True"
    note = f", {_first_few(lacking)} without this folder ({way_out})" if lacking else ""
    short = [node.host.partition(".")[0] for node in used]
    names = short if len(set(short)) == len(used) else [f"node {node.node}" for node in used]
    own_gpus = may_use_gpus and all(len(ranks) <= len(node.gpus) for node, ranks in zip(used, parts, strict=True))
    if backend is not None and "nccl" in backend and not own_gpus:
        raise ConfigError(
            f"backend={backend!r} needs a GPU for each rank, and not every node has as many. Use fewer ranks, or "
            "backend='gloo'.",
            field="backend",
        )
    return NodeAllocation(
        num_processes=num_processes,
        backend=("nccl" if own_gpus else "gloo") if backend == "auto" else backend,
        use_gpu=may_use_gpus,
        cores_per_process=max(1, min(node.num_cores // len(ranks) for node, ranks in zip(used, parts, strict=True))),
        found=f"on {plural(len(used), 'node')} ({_describe_all(used)}){note}",
        num_nodes=len(used),
        # Two nodes may call themselves the same; then their numbers tell them apart.
        node_names=tuple(name for name, ranks in zip(names, parts, strict=True) for _ in ranks)
        if len(used) > 1
        else (),
    )


def _describe_all(nodes: Sequence[NodeInfo]) -> str:
    return _first_few([_describe(node) for node in nodes])


def _first_few(texts: list[str]) -> str:
    more = [f"{len(texts) - MAX_SHOWN} more"] if len(texts) > MAX_SHOWN else []
    return ", ".join([*texts[:MAX_SHOWN], *more])


def _describe(node: NodeInfo) -> str:
    kinds = [f"{node.gpus.count(name)} x {name}" for name in dict.fromkeys(node.gpus)]
    return f"{node.host}: {' + '.join(kinds) or plural(node.num_cores, 'core')}"
