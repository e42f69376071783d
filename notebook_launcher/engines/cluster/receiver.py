"""The thread that receives from the agents of one set of nodes."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher.messaging.links import LinkError

if TYPE_CHECKING:
    from notebook_launcher.engines.cluster.node import Node

__all__ = ["Receiver"]

LOOK_EVERY = 0.5
"""Seconds between two looks for nodes that are silent."""


class Receiver:
    """Reads the links of all nodes in one thread, which starts with the first node.

    A thread for each of 125 nodes, woken with every message, took a tenth of a core, of which the records themselves
    cost a tenth. This thread reads from all nodes that have sent something before it passes on any record.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._lock = threading.Lock()
        """Held while links are read, and while nodes are added or removed."""
        self._heard: dict[Node, float] = {}
        """The nodes whose links are read, each with the time, as in `_watched`, at which bytes last arrived."""
        self._watched = 0.0
        """Seconds that the thread has spent waiting: only then a node that sends nothing is silent."""
        self._looked_at = 0.0
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def add(self, node: Node) -> None:
        """Read the link of a node from now on."""
        with self._lock:
            self._heard[node] = self._watched
            self._selector.register(node.read_fd, selectors.EVENT_READ, node)
            if self._thread is None:
                self._thread = threading.Thread(target=self._receive, name="notebook-launcher nodes", daemon=True)
                self._thread.start()

    def remove(self, node: Node) -> None:
        """Read the link of a node no more; idempotent."""
        with self._lock:
            self._drop(node)

    def close(self) -> None:
        """End the thread; idempotent."""
        with self._lock:
            self._is_closed = True
            if self._thread is not None:
                os.eventfd_write(self._wake_fd, 1)
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._thread = None
            if self._wake_fd >= 0:
                self._selector.close()
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _receive(self) -> None:
        while not self._is_closed:
            began = time.monotonic()
            ready = self._selector.select(LOOK_EVERY)
            waited = time.monotonic() - began
            with self._lock:
                self._watched += waited
                arrived = [(key.data, self._read(key.data)) for key, _ in ready if key.data in self._heard]
                now = time.monotonic()
                for node, records in arrived:
                    self._pass_on(node, records, now)
                if self._watched - self._looked_at >= LOOK_EVERY:
                    self._looked_at = self._watched
                    self._look_for_silent_nodes()

    def _read(self, node: Node) -> list[Any]:
        self._heard[node] = self._watched
        try:
            return node.read()
        except OSError as error:
            self._lose(node, error)
        except Exception as error:  # a record that this kernel cannot unpickle: an agent of another kind
            self._lose(node, LinkError(f"{type(error).__name__}: {error}"))
        return []

    @staticmethod
    def _pass_on(node: Node, records: list[Any], now: float) -> None:
        for record in records:
            node.take(record, now)

    def _look_for_silent_nodes(self) -> None:
        silent = {node: node.patience for node in self._heard if self._watched - self._heard[node] >= node.patience}
        for node, patience in silent.items():
            self._lose(node, LinkError(f"no message arrived for {patience:g} s"))

    def _lose(self, node: Node, error: OSError) -> None:
        self._drop(node)
        node.lose(error)

    def _drop(self, node: Node) -> None:
        if self._heard.pop(node, None) is not None:
            with contextlib.suppress(KeyError, OSError):
                self._selector.unregister(node.read_fd)
