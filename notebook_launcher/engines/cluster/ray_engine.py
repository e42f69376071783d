"""The engine of a Ray cluster: Ray places, starts and watches the agents, and reserves their CPUs and GPUs."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from notebook_launcher.engines.cluster.clusters import ClosedByWith, clusters
from notebook_launcher.engines.cluster.ray_connections import RayConnection, ray_drivers
from notebook_launcher.errors import ConfigError
from notebook_launcher.machine.allocation import NodeInfo, ranks_by_node
from notebook_launcher.wording import plural

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from notebook_launcher.engines.cluster.cluster_tree import ClusterTree
    from notebook_launcher.engines.cluster.clusters import ClusterKey
    from notebook_launcher.engines.cluster.connections import Greeting
    from notebook_launcher.messaging import messages


@dataclasses.dataclass(frozen=True)
class Ray(ClosedByWith):
    """Ranks on the nodes of a Ray cluster that runs already: `Ray()`, `Ray("10.0.0.1:6379")`.

    The kernel runs on a node of the cluster. A launch asks Ray for a CPU for each rank and, if the ranks use GPUs, for
    a GPU for each. The agents stay up for the next launch, and hold them for so long.

    Raises:
        ConfigError: A value cannot work. A cluster that cannot be reached is an error of the launch, and of `look()`.
    """

    address: str = "auto"
    """The cluster's address, `"HOST:PORT"`. `"auto"`: the one that this kernel is connected to, else the address in the
    variable RAY_ADDRESS, else the one that runs on this machine."""
    max_nodes: int | None = None
    """The most nodes to use. None: all of them."""
    cpus: float | None = None
    """CPUs to ask for on each node. None: one for each of its ranks, or all that it has."""
    network: str | None = None
    """As in `Commands`."""
    patience: float = 60.0
    """Longest wait in seconds until Ray has placed and started the agents; other work may hold what they need."""
    keep: float | None = 300.0
    """Seconds after a launch for which the agents stay up, with what they hold. None: until `close`."""
    runtime_env: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    """Ray's `runtime_env` of the agents, such as `{"pip": ["notebook-launcher"]}`."""

    def __post_init__(self) -> None:
        _check_address(self.address)
        for name, value, least in (("max_nodes", self.max_nodes, 1), ("keep", self.keep, 0)):
            if value is not None and value < least:
                raise ConfigError(f"{name}={value!r} must be {least} or more, or None.", field="engine")
        if self.runtime_env is not None:  # A copy that cannot be changed from outside, and that JSON can hold.
            object.__setattr__(self, "runtime_env", json.loads(json.dumps(dict(self.runtime_env))))

    def look(self) -> tuple[NodeInfo, ...]:
        """Return the nodes with their CPUs and GPUs, as Ray reports them; starts no agent, and reserves nothing.

        Raises:
            ConfigError: ray is not installed, or the cluster cannot be reached.
        """
        lacking = {share.node_id for share, node in self._agents() if not node.has_folder}
        return tuple(
            dataclasses.replace(share.info(number), has_folder=share.node_id not in lacking)
            for number, share in enumerate(self._nodes())
        )

    def _nodes(self) -> list[NodeShare]:
        """Return the resources of every node: first nodes with agents, then free nodes, then nodes that others use."""
        found = ray_drivers().get(self.address).nodes()
        held = {share.node_id for share, _ in self._agents()}
        shares = [NodeShare(**each) for each in found]
        shares = [share for share in shares if share.cpus or share.gpus] or shares  # Without head nodes for no work.
        shares.sort(key=lambda share: (share.node_id not in held, share.is_busy))
        return shares[: self.max_nodes]

    def _agents(self) -> list[tuple[NodeShare, Any]]:
        """Return the agents that were last up, with what they hold."""
        known = clusters().known(self._is_ours).items()
        ours = [(key.shares, nodes) for key, nodes in known if isinstance(key, RayNodes)]
        return [pair for shares, nodes in ours for pair in zip(shares, nodes, strict=True)]

    def _is_ours(self, key: ClusterKey) -> bool:
        return isinstance(key, RayNodes) and key.engine == self

    def without(self, nodes: Collection[int]) -> Ray:
        """Return this engine: Ray itself knows which nodes are up."""
        del nodes
        return self

    def start(self, setup: messages.Setup) -> ClusterTree:
        """Start ranks on the nodes; launches call this."""
        parts = ranks_by_node(setup.num_processes, setup.place.num_nodes)
        there = self._nodes()
        if len(there) < len(parts):
            msg = f"Ray has {plural(len(there), 'node')} now, and this launch was to use {len(parts)}. Launch again."
            error = ConfigError(msg, field="engine")
            error.nodes = tuple(range(len(there), len(parts)))
            raise error
        wanted = RayNodes(
            self,
            tuple(
                share.part(len(ranks), use_gpus=setup.use_gpu, cpus=self.cpus)
                for share, ranks in zip(there, parts, strict=False)
            ),
            self.network,
            self.patience,
            self.keep,
        )
        idle = [key for key in clusters().idle(self._is_ours) if isinstance(key, RayNodes) and key.covers(wanted)]
        if not idle:
            # They may hold what the new ones need.
            clusters().release(self._is_ours)
        return clusters().start(idle[0] if idle else wanted, setup)

    def close(self) -> None:
        """End the agents: idle ones now, others at the end of their launch. The next launch starts them again."""
        for key in clusters().known(self._is_ours):
            clusters().close(key)
        ray_drivers().close(self.address)


@dataclasses.dataclass(frozen=True, slots=True)
class RayNodes:
    """Nodes of a cluster, with what an engine's agents hold of them."""

    engine: Ray
    shares: tuple[NodeShare, ...]
    network: str | None = None
    patience: float = 60.0
    keep: float | None = 300.0

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.shares)

    def covers(self, other: RayNodes) -> bool:
        """Return True if agents of this key can serve another key: the same first nodes, and no less of each."""
        return len(self.shares) >= len(other.shares) and all(
            mine.node_id == theirs.node_id and mine.cpus >= theirs.cpus and mine.gpus >= theirs.gpus
            for mine, theirs in zip(self.shares, other.shares, strict=False)
        )

    def connect(self, number: int) -> RayConnection:
        """Have Ray start the agent of a node; raises `ConfigError` if Ray does not answer."""
        driver = ray_drivers().get(self.engine.address)
        share = self.shares[number]
        request = {"node_id": share.node_id, "cpus": share.cpus, "gpus": share.gpus}
        return driver.connect({**request, "address": share.address, "runtime_env": self.engine.runtime_env})

    def check(self, number: int, greeting: Greeting) -> None:
        """Raise `ConfigError` if an agent does not see the GPUs that Ray has reserved for it."""
        share = self.shares[number]
        if len(greeting.gpus) < share.gpus:
            raise ConfigError(
                f"node {number} ({greeting.host}): Ray has reserved {plural(share.gpus, 'GPU')} there, and torch finds "
                f"{len(greeting.gpus)}. Install a torch with CUDA there, or pass devices='cpu'.",
                field="engine",
            )


def _check_address(value: str) -> None:
    if value.startswith("ray://"):
        raise ConfigError(
            f"address={value!r}: Ray Client has no streams. Run the kernel on a node of the cluster, and pass 'auto' "
            "or the address of its head, such as '10.0.0.1:6379'.",
            field="engine",
        )
    host, _, port = value.rpartition(":")
    if value != "auto" and not (host and port.isdecimal()):
        raise ConfigError(
            f"address={value!r} is not an address of a Ray cluster: pass 'auto', or one such as '10.0.0.1:6379'.",
            field="engine",
        )


# --------------------------------------------------------------------------------------------------------------------
# Resources of one node of a Ray cluster, and the share of them that an agent holds.


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
