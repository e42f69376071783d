"""The nodes that this kernel's engines have: started at first need, and kept from launch to launch."""

from __future__ import annotations

import contextlib
import functools
import os
import textwrap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from notebook_launcher.engines.cluster import cluster_tree, node_records
from notebook_launcher.engines.cluster.cluster_tree import ClusterTree
from notebook_launcher.engines.cluster.connections import Greeting, choose_networks, version_difference
from notebook_launcher.engines.cluster.node import Node
from notebook_launcher.engines.engine import start_deadline
from notebook_launcher.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from typing_extensions import Self

    from notebook_launcher.engines.cluster.command_engines import CommandNodes
    from notebook_launcher.engines.cluster.ray_engine import RayNodes
    from notebook_launcher.messaging import messages

    ClusterKey: TypeAlias = CommandNodes | RayNodes
    """Identity of one set of nodes, as a value; engines that are equal share their nodes."""

LOOK_EVERY = 0.1
"""Seconds between two looks whether the deadline of a start is nearer now."""
NUM_PINGS = 5
"""Pings that measure the clock of a node before its first launch."""


class Cluster:
    """One set of nodes, which serves one tree at a time."""

    def __init__(self, key: ClusterKey) -> None:
        self._key = key
        self.nodes: list[Node] = []
        self.taken = threading.Event()
        """Set when a launch takes the nodes, or they are closed; a new event each time that they become idle."""

    def bring_up(self) -> None:
        """Start the agents that are not up, and have all join; raises `ConfigError` if one cannot."""
        for number in range(self._key.num_nodes):
            if number == len(self.nodes):
                self.nodes.append(Node(number, self._key.connect(number)))
            elif self.nodes[number].lost:
                self.nodes[number].close()
                self.nodes[number] = Node(number, self._key.connect(number))
        until = time.monotonic() + self._key.patience
        self._await_greetings(until)
        self._join(until)
        self._compare_folders(until)

    def _await_greetings(self, until: float) -> None:
        """Wait for all nodes, so that an error names each one that does not come up."""
        began, down = time.monotonic(), dict[int, str]()
        for node in self.nodes:
            node.greeting = node.greeting or self._await_greeting(node, until)
            if node.greeting is None:
                words = textwrap.indent(node.connection.last_words(), "    ")
                last_words = f"\nIts last words:\n{words}" if words else ""
                waited = min(self._key.patience, time.monotonic() - began)
                reason = node.lost or f"no message arrived for {waited:.2g} s"
                down[node.number] = (
                    f"node {node.number} did not come up: {reason}. {node.connection.origin}{last_words}"
                )
        if down:
            raise _down("\n".join(down.values()), down)

    def _await_greeting(self, node: Node, until: float) -> Greeting | None:
        greeting: Greeting | None = _reply(node, Greeting, until)
        if greeting is None:
            return None
        if differs := version_difference(greeting.versions):
            raise ConfigError(
                f"node {node.number} ({greeting.host}) has other versions than this kernel: {differs}. Both sides need "
                "the same ones; python= names the interpreter of the nodes.",
                field="engine",
            )
        self._key.check(node.number, greeting)
        return greeting

    def _join(self, until: float) -> None:
        greetings = [node.greeting for node in self.nodes if node.greeting is not None]
        chosen = choose_networks(
            [greeting.namespace for greeting in greetings],
            [greeting.networks for greeting in greetings],
            self._key.network,
        )
        if chosen is None:
            raise ConfigError(_no_network(greetings, self._key.network), field="engine")
        for node, network in zip(self.nodes, chosen, strict=True):
            if node.address != network.address:
                node.send(node_records.Join(network.address, network.interface))
        for node, network in zip(self.nodes, chosen, strict=True):
            if node.address == network.address:
                continue
            if _reply(node, node_records.Joined, until) is None:
                reason = f"{node.lost or 'no answer'}. {node.connection.last_words()}"
                raise _down(f"{node} has greeted and then did not join: {reason}", [node.number])
            node.address = network.address
            for _ in range(NUM_PINGS):
                node.send(node_records.Ping(time.monotonic()))

    def _compare_folders(self, until: float) -> None:
        """Find out which nodes have the kernel's working directory, unless they were asked about it before."""
        folder = None
        with contextlib.suppress(FileNotFoundError):
            folder = Path.cwd()
        asked = [node for node in self.nodes if node.asked_for != folder]
        if folder is None or not asked:
            return
        with cluster_tree.mark(folder) as path:
            for node in asked:
                node.asked_for, node.has_folder = folder, True
                if path is not None:
                    node.send(node_records.LookForFile(path))
            for node in asked if path is not None else ():
                seen = _reply(node, node_records.FileSeen, until)
                node.has_folder = seen is None or seen.is_there

    def close(self) -> None:
        """End all agents; idempotent."""
        for node in self.nodes:
            node.send(None)
        while self.nodes:
            self.nodes[-1].close()
            self.nodes.pop()


class Clusters:
    """The nodes of all engines of this kernel. Two simultaneous launches on one engine get separate agents."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[ClusterKey, Cluster] = {}
        self._known: dict[ClusterKey, tuple[Node, ...]] = {}
        """The nodes that were last up, for `nodes_of` while all are busy."""
        self._num_closed: dict[ClusterKey, int] = {}
        """Number of times that an engine was closed: a launch that began before does not give its nodes back."""

    def nodes_of(self, key: ClusterKey) -> tuple[Node, ...]:
        """Return the nodes of an engine, which are up; raises `ConfigError`."""
        with self._lock:
            known = self._known.get(key)
            if known is not None and key not in self._idle and not any(node.lost for node in known):
                return known
        cluster, closed = self._take(key)
        nodes = tuple(cluster.nodes)
        self._give_back(key, cluster, closed)
        return nodes

    def start(self, key: ClusterKey, setup: messages.Setup) -> ClusterTree:
        """Start ranks on the nodes of an engine; raises `ConfigError` if a node does not come up."""
        cluster, closed = self._take(key)
        try:
            return ClusterTree(setup, cluster.nodes, lambda: self._give_back(key, cluster, closed))
        except BaseException:  # The user's interrupt.
            cluster.close()
            raise

    def _take(self, key: ClusterKey) -> tuple[Cluster, int]:
        with self._lock:
            cluster = self._idle.pop(key, None) or Cluster(key)
            cluster.taken.set()
            closed = self._num_closed.get(key, 0)
        try:
            cluster.bring_up()
        except BaseException:
            cluster.close()
            raise
        with self._lock:
            self._known[key] = tuple(cluster.nodes)
        return cluster, closed

    def _give_back(self, key: ClusterKey, cluster: Cluster, closed: int) -> None:
        for node in cluster.nodes:
            if node.lost:  # A node that no longer sends may still run ranks.
                node.close()
        with self._lock:
            is_kept = key not in self._idle and self._num_closed.get(key, 0) == closed
            if is_kept:
                self._idle[key] = cluster
                cluster.taken = threading.Event()
        if not is_kept:
            cluster.close()
            return
        if key.keep is not None:
            args = key, key.keep, cluster.taken
            threading.Thread(target=self._expire, args=args, name="notebook-launcher idle nodes", daemon=True).start()

    def _expire(self, key: ClusterKey, keep: float, taken: threading.Event) -> None:
        """End the nodes of a set after a while, unless they are taken before."""
        if taken.wait(keep):
            return
        with self._lock:
            cluster = self._idle.get(key)
            if cluster is None or cluster.taken is not taken:
                return
            self._drop(key)
        cluster.close()

    def known(self, is_meant: Callable[[ClusterKey], bool]) -> dict[ClusterKey, tuple[Node, ...]]:
        """Return the nodes of all sets that are meant, as they were last up."""
        with self._lock:
            return {key: nodes for key, nodes in self._known.items() if is_meant(key)}

    def idle(self, is_meant: Callable[[ClusterKey], bool]) -> list[ClusterKey]:
        """Return the sets that are meant and have idle agents, all alive."""
        with self._lock:
            found = {key: cluster for key, cluster in self._idle.items() if is_meant(key)}
        return [key for key, cluster in found.items() if not any(node.lost for node in cluster.nodes)]

    def release(self, is_meant: Callable[[ClusterKey], bool]) -> None:
        """End the idle agents of all sets that are meant."""
        with self._lock:
            ended = [self._drop(key) for key in [*self._idle] if is_meant(key)]
        for cluster in filter(None, ended):
            cluster.close()

    def close(self, key: ClusterKey) -> None:
        """End the agents of an engine: idle agents now, the others at the end of their launch."""
        with self._lock:
            self._num_closed[key] = self._num_closed.get(key, 0) + 1
            cluster = self._drop(key)
        if cluster is not None:
            cluster.close()

    def _drop(self, key: ClusterKey) -> Cluster | None:
        self._known.pop(key, None)
        cluster = self._idle.pop(key, None)
        if cluster is not None:
            cluster.taken.set()
        return cluster


def _reply(node: Node, kind: type[Any], until: float) -> Any:
    """Wait for an answer of this kind and return it; None if the node is lost, or at the end of the time."""
    while not node.lost and (now := time.monotonic()) < (end := min(until, start_deadline())):
        if (answer := node.reply(lambda record: isinstance(record, kind), min(end, now + LOOK_EVERY))) is not None:
            return answer
    return node.reply(lambda record: isinstance(record, kind), 0.0)


def _down(message: str, nodes: Iterable[int]) -> ConfigError:
    error = ConfigError(message, field="engine")
    error.nodes = tuple(nodes)
    return error


def _no_network(greetings: Sequence[Greeting], wanted: str | None) -> str:
    have = "; ".join(
        f"{greeting.host}: "
        + (", ".join(f"{network.interface} {network.subnet}" for network in greeting.networks) or "none")
        for greeting in greetings
    )
    asked = f"network={wanted!r} is not on every node" if wanted else "the nodes have no network in common"
    return f"{asked}. They have {have}. Pass network= an interface's name, or a network such as '10.0.0.0/8'."


class ClosedByWith:
    """An engine whose agents a `with` block ends."""

    def close(self) -> None:
        """End the agents: idle ones now, others at the end of their launch. The next launch starts them again."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def clusters() -> Clusters:
    """Return the nodes of this process's engines."""
    return _clusters_of(os.getpid())


@functools.lru_cache(maxsize=1)
def _clusters_of(_pid: int) -> Clusters:
    # By process number, so that a process that the user's code forked from the kernel has none of the kernel's.
    return Clusters()
