"""The wire from rank 0 to every rank: objects pickled, tensors as they lie in memory.

For each round one small tensor goes to all ranks (what comes, how much, and what everybody has), and then
each rank's own batch to that rank. With NCCL, a send by itself would make a communicator for each pair of ranks.
Sends in a batch, as here, go over the group's own, which the broadcast before has made on all ranks.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist

from notebook_launcher.training.data.rows import Round
from notebook_launcher.training.operations.checking import sending_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


BATCH, END, ERROR = range(3)


class BatchParcel(NamedTuple):
    """A batch on its way, in bytes."""

    objects: torch.Tensor
    """The pickled batch, without the tensors."""
    tensors: list[torch.Tensor]


def pack(batch: Any, device: torch.device) -> BatchParcel:
    """Return the parcel of another rank's batch; its tensors are on `device`, if the group can send from there."""
    where = sending_device(device)
    file = io.BytesIO()
    pickler = _TensorPickler(file, where)
    pickler.dump(batch)
    objects = torch.frombuffer(file.getbuffer(), dtype=torch.uint8).to(where)
    return BatchParcel(objects, [_as_bytes(tensor) for tensor in pickler.tensors])


def send(parcels: Sequence[BatchParcel], drawn: Round, *, is_last: bool, samples: int, device: torch.device) -> None:
    """Send every other rank its part; all other ranks must call `receive`.

    Args:
        parcels: The other ranks' parts.
        drawn: Samples of all ranks' parts.
        is_last: True if no other round follows.
        samples: Samples of the epoch with this round.
        device: As for `pack`.
    """
    sizes = [parcel.objects.numel() for parcel in parcels]
    _announce(BATCH, [int(is_last), samples], drawn, sizes, device)
    others = list(enumerate(parcels, 1))
    # In two batches, as they are received: the objects describe how large the tensors are.
    objects = [dist.P2POp(dist.isend, parcel.objects, rank) for rank, parcel in others]
    tensors = [
        _tensor_op(dist.isend, part, rank, at) for rank, parcel in others for at, part in _filled(parcel.tensors)
    ]
    _exchange(objects, tensors)


def send_end(device: torch.device) -> None:
    """Send the end of the data to the other ranks."""
    _announce(END, [0, 0], None, [], device)


def send_error(error: Exception, device: torch.device) -> None:
    """Make the other ranks raise what rank 0 is about to raise."""
    parcel = torch.frombuffer(bytearray(_dump_error(error)), dtype=torch.uint8).to(sending_device(device))
    _announce(ERROR, [0, 0], None, [parcel.numel()] * (dist.get_world_size() - 1), device)
    dist.broadcast(parcel, src=0)


def receive(device: torch.device) -> tuple[Any, Round, bool, int] | None:
    """Return this rank's part of the next round; None at the end of the data.

    Beside the part: the round, True if it is the last, and the samples of the epoch with it.

    Raises:
        Exception: Error that the data set raised on rank 0.
    """
    num_processes, rank, where = dist.get_world_size(), dist.get_rank(), sending_device(device)
    header = torch.empty(3 + 4 * num_processes, dtype=torch.int64, device=where)
    dist.broadcast(header, src=0)
    kind, is_last, samples, *table = header.tolist()
    if kind == END:
        return None
    size = table[3 * num_processes + rank]
    if kind == ERROR:
        raise pickle.loads(_receive_bytes(size, where, lambda wire: dist.broadcast(wire, src=0)))
    parcel = _receive_bytes(size, where, lambda wire: _exchange([dist.P2POp(dist.irecv, wire, 0)]))
    rows, real, weights = (tuple(table[at * num_processes : (at + 1) * num_processes]) for at in range(3))
    return _unpack(parcel, where), Round(rows, real, weights), bool(is_last), samples


def _announce(kind: int, numbers: list[int], drawn: Round | None, sizes: list[int], device: torch.device) -> None:
    num_processes = dist.get_world_size()
    table = [0] * (3 * num_processes) if drawn is None else [*drawn.rows, *drawn.real, *drawn.weights]
    sizes = [0, *sizes, *[0] * (num_processes - 1 - len(sizes))]
    dist.broadcast(torch.tensor([kind, *numbers, *table, *sizes], device=sending_device(device)), src=0)


class _TensorPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that leaves plain tensors out, and notes their shapes."""

    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self._device = device

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout != torch.strided or value.is_quantized:
            return None
        self.tensors.append(value.detach().resolve_conj().resolve_neg().to(self._device).contiguous())
        return tuple(value.shape), value.dtype


class _TensorUnpickler(pickle.Unpickler):
    """An unpickler that makes room for the tensors that were left out."""

    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._device = device

    def persistent_load(self, pid: Any) -> torch.Tensor:
        shape, dtype = pid
        self.tensors.append(torch.empty(shape, dtype=dtype, device=self._device))
        return self.tensors[-1]


def _receive_bytes(size: int, device: torch.device, receive_into: Callable[[torch.Tensor], Any]) -> bytearray:
    memory = bytearray(size)
    here = torch.frombuffer(memory, dtype=torch.uint8)
    wire = here.to(device)  # on the CPU the same memory
    receive_into(wire)
    here.copy_(wire)
    return memory


def _unpack(parcel: bytearray, device: torch.device) -> Any:
    unpickler = _TensorUnpickler(io.BytesIO(parcel), device)
    batch = unpickler.load()
    parts = [_as_bytes(tensor) for tensor in unpickler.tensors]
    _exchange([_tensor_op(dist.irecv, part, 0, at) for at, part in _filled(parts)])
    return batch


def _filled(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    return ((at, tensor) for at, tensor in enumerate(tensors) if tensor.numel())


def _tensor_op(operation: Callable[..., Any], part: torch.Tensor, peer: int, at: int) -> dist.P2POp:
    return dist.P2POp(operation, part, peer, tag=1 + at)


def _exchange(*batches: Sequence[dist.P2POp]) -> None:
    """Begin one batch after another, and wait for all."""
    pending = [work for batch in batches if batch for work in dist.batch_isend_irecv(list(batch))]
    for work in filter(None, pending):
        work.wait()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _dump_error(error: Exception) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(error)
        pickle.loads(data)
    except Exception:  # whatever the exception's own code raises
        data = pickle.dumps(RuntimeError(f"the data set failed on rank 0: {type(error).__name__}: {error}"))
    return data
