"""Plain data that ranks write for each other into the process group's store; no rank waits for another rank.

A collective pairs with whatever the peers call next, so a check that adds one could hang where the program alone
would not. A key in the store pairs with nothing: a peer's word is there, or it is not.
"""

from __future__ import annotations

import json
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from notebook_launcher import context

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Bulletin"]

PREFIX = "notebook_launcher/bulletin"
PATIENCE = 10.0
"""Seconds for which `exchange` waits for ranks that are about to write."""


class Bulletin:
    """Plain data about objects that each rank has a copy of; every rank writes about its own copy."""

    def __init__(self, rank: int, num_processes: int) -> None:
        self._rank = rank
        self._num_processes = num_processes
        self._store: Any = None
        self._call_id = 0
        """The run of a session in which the names were given."""
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def write(self, owner: Any, topic: str, content: Any) -> bool:
        """Write for the other ranks; return False if the process group has no store (MPI).

        Args:
            owner: Object that the entry is about; it is registered.
            topic: Aspect of the object that the entry is about.
            content: Plain data: numbers, texts, lists.
        """
        if not self.register(owner):
            return False
        store = self._store()
        key = self._key(owner, topic, self._rank)
        store.set(key, json.dumps(content))
        # `set` returns before the store has it. Its answer to a question comes after.
        return bool(store.check([key]))

    def register(self, owner: Any) -> bool:
        """Give an object its name in the store, if it has none; return False if the process group has no store (MPI).

        All ranks must register their objects of a type in the same order.
        """
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no other name for it
        if store is None:
            return False
        if self._store is None or self._store() is not store or self._call_id != context.call_id():
            # With a new process group all begins again, and with a new run: the last one may have failed on one rank
            # before that rank had registered what the others had.
            self._store, self._call_id = weakref.ref(store), context.call_id()
            self._names.clear()
        if owner not in self._names:
            kind = type(owner).__name__
            # The store counts, so that several Accelerators need not know of each other.
            number = store.add(f"{PREFIX}/{self._rank}/{self._call_id}/{kind}", 1)
            self._names[owner] = f"{self._call_id}/{kind} {number}"
        return True

    def read(self, owner: Any, topic: str, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Return what these ranks, by default all of them, have written so far."""
        store = self._store()
        keys = {
            rank: self._key(owner, topic, rank) for rank in (range(self._num_processes) if ranks is None else ranks)
        }
        return {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}

    def exchange(self, owner: Any, topic: str, mine: Any, ranks: Iterable[int]) -> dict[int, Any]:
        """Write, and return what these ranks are about to write; a rank that ends meanwhile is left out."""
        wanted = set(ranks)
        self.write(owner, topic, mine)
        deadline = time.monotonic() + PATIENCE
        while len(found := self.read(owner, topic, wanted)) < len(wanted) and time.monotonic() < deadline:
            time.sleep(0.001)
        return found

    def _key(self, owner: Any, topic: str, rank: int) -> str:
        return f"{PREFIX}/{rank}/{self._names[owner]}/{topic}"
