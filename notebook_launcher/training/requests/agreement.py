"""The update at which all ranks do something together, agreed on without a message.

Ranks see a request of the kernel at different moments, so rank 0 names an update and writes its number where all ranks
find it: on the board, memory that all ranks of one machine map, or, over several machines, into the store at which the
ranks have met. The named update must lie so far ahead that no rank can have passed it unseen. How far that is
follows from the gradients' reduction, which no rank completes before every rank has begun it:

- On a CPU, a backward returns when its reduction is done. A rank that counts update `v` knows that rank 0 has begun
  the reduction of `v`, hence has counted `v - 1`. What rank 0 writes while it counts `u` is seen by all at `u + 1`.
- On a GPU, a backward returns when its reduction is queued: the wait for an NCCL collective holds up the stream, not
  the program. A program could be any number of updates ahead of its peers. Therefore `UpdateFence` lets it count update
  `v` only when the reduction of `v - 1` is done, which proves that rank 0 has counted `v - 2`. What rank 0 writes while
  it counts `u` is seen by all at `u + 2`. The GPU still has the work of a whole window queued, so it does not idle.

Over several machines the same holds, because rank 0 waits for the store's answer before it continues. But each
machine has a board of its own, and a rank that has not seen the request would not look. Therefore the kernel writes a
request to the board of rank 0 last, when all other machines have it (`engines/cluster/relayed_memory.py`).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Protocol

from notebook_launcher.training.queued_work import work_recorder

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable

    import torch

    from notebook_launcher.context import RankContext
    from notebook_launcher.training.queued_work import QueuedWork

__all__ = ["Agreement", "BoardSlot", "ChoiceSlot", "StoreSlot", "UpdateFence", "make_fence"]

CHOICE = struct.Struct("<QQ")
"""Number of the request, and of the update at which it is carried out; 0: no update was named yet."""
MAX_REQUESTS = 1 << 24
"""In the store, the two are one number of 63 bits: update * MAX_REQUESTS + request."""


class ChoiceSlot(Protocol):
    """A place where rank 0 writes its choice and all ranks read it."""

    def read(self) -> tuple[int, int]:
        """Return the last request for which an update was named, and that update; (0, 0): none."""
        ...

    def write(self, request: int, update: int) -> None:
        """Name an update for a request; when this returns, all ranks can read it."""
        ...


class BoardSlot:
    """Slot for ranks of one machine: 16 bytes of the board."""

    def __init__(self, board: mmap.mmap | bytearray, place: slice) -> None:
        self._board = board
        self._place = place

    def read(self) -> tuple[int, int]:
        """Return the last request for which an update was named, and that update; (0, 0): none."""
        return CHOICE.unpack(bytes(self._board[self._place]))

    def write(self, request: int, update: int) -> None:
        """Name an update for a request."""
        self._board[self._place] = CHOICE.pack(request, update)


class StoreSlot:
    """Slot for ranks of several machines: a number in the store, for each call another. Each look asks the store.

    Args:
        context: This rank.
        name: The kind of request.
    """

    def __init__(self, context: RankContext, name: str) -> None:
        self._context = context
        self._name = name

    def read(self) -> tuple[int, int]:
        """Return the last request for which an update was named, and that update; (0, 0): none."""
        update, request = divmod(self._add(0), MAX_REQUESTS)
        return request, update

    def write(self, request: int, update: int) -> None:
        """Name an update for a request."""
        named, at = self.read()
        self._add((update - at) * MAX_REQUESTS + request - named)

    def _add(self, number: int) -> int:
        # The only operation of a store that does not wait for the key, and returns once the store has carried it out.
        return int(self._context.rendezvous.store.add(f"call-{self._context.call_id}/{self._name}", number))


class UpdateFence:
    """Keeps a rank from running more than one update ahead of what its device has done.

    Args:
        record: Marks the end of all work that is queued by now, or returns None if nothing can be marked now.
            None: a backward returns when its work is done.
    """

    def __init__(self, record: Callable[[], QueuedWork | None] | None) -> None:
        self._record = record
        self.waits = record is not None
        """True if `pass_update` may wait."""
        self._previous: QueuedWork | None = None
        """The mark of the previous update's work; None if nothing is to be waited for."""

    @property
    def lead(self) -> int:
        """Number of updates after which all ranks have seen what rank 0 writes while it counts an update."""
        return 1 if self._record is None else 2

    def pass_update(self) -> None:
        """Wait until the previous update's reduction is done, and mark this one's; after each synchronised backward."""
        if self._record is None:
            return
        mark = self._record()
        if mark is None:  # A wait would end the capture of a CUDA graph, too; captured work is not carried out.
            return
        previous, self._previous = self._previous, mark
        if previous is not None:
            previous.synchronize()

    def finish(self) -> None:
        """Wait until all work that is queued by now is done: every rank has then begun the reductions in it."""
        mark = None if self._record is None else self._record()
        if mark is not None:
            mark.synchronize()


class Agreement:
    """One kind of request, such as a checkpoint.

    Every rank calls `poll` at every update, with its own number of the update; all ranks number alike.

    Args:
        slot: Place in which rank 0 writes the update that it names: the board, or the store.
        chooses: True on rank 0.
        lead: `UpdateFence.lead`; 0 where there is one rank.
    """

    def __init__(self, slot: ChoiceSlot, *, chooses: bool, lead: int) -> None:
        self._slot = slot
        self._chooses = chooses
        self._lead = lead

    def poll(self, request: int, update: int) -> tuple[int, int]:
        """Return the newest request that rank 0 has named an update for, with that update; (0, 0): none.

        Args:
            request: Number of the request that this rank sees, from 1 on. Rank 0 names an update for a new request once
                all ranks have passed the update that it named last; until then, a peer may still look for that update.
            update: Number of the update that this rank has just counted, from 1 on.
        """
        named, at = self._slot.read()
        if self._chooses and named != request and (not at or at + self._lead <= update):
            named, at = request, update + self._lead
            self._slot.write(named, at)
        return named, at


def make_fence(device: torch.device, num_processes: int) -> UpdateFence:
    """Return the fence of a rank that computes on a device."""
    return UpdateFence(None if num_processes == 1 else work_recorder(device))
