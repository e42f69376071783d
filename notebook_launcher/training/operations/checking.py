"""The agreement of ranks before an operation: that it is the same one, on values that fit together.

    rank 0                                      rank 1
    hash of names, dtypes and shapes; lengths   hash of names, dtypes and shapes; lengths
    ------------------------- one small message, of the same size always -------------------------
    hashes equal: the tensors follow, as long   the same, in the same order of names, whatever the
    as the lengths say                          order in its own dictionaries
    hashes differ: names, dtypes and shapes     the same, and the same error
    follow, and then an error

Without it, a backend would write one rank's bytes into another's tensor of another shape, wait for ever, or end the
process. It costs a message of 128 bytes: with gloo and 2 ranks on two very busy cores, a reduce of one number took
1.3 ms in place of 0.6, and a gather 1.6 in place of 0.8. Padding and objects cost what they did: the message has their
lengths.
"""

from __future__ import annotations

import hashlib
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from notebook_launcher.training.operations.nested import is_container, wrong_leaf
from notebook_launcher.wording import describe_value, rank_list

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


NUMBERS = 15
"""Numbers that travel with the hash. More go in a message of their own."""

OTHER_ROWS = (
    "Only dimension 0 may differ; pad_across_processes(tensor, dim=1) makes dimension 1 equally long on all ranks."
)
SHAPES = {
    "gather": OTHER_ROWS,
    "gather_for_metrics": OTHER_ROWS,
    "pad_across_processes": "Tensors must have as many dimensions on all ranks.",
}
"""The advice of an error about shapes."""

MAX_DIFFERENCES = 5
"""Differences that an error lists."""


class DistributedOperationException(Exception):  # noqa: N818 - Accelerate's name
    """The ranks called an operation with values that do not fit together, or different operations."""


class Pickled:
    """A leaf that is sent by pickle, beside tensors that are sent as they are."""

    def __init__(self, part: Any) -> None:
        self.part = part


class Agreed(NamedTuple):
    """A tensor that all ranks have under one name."""

    at: int
    """Its place among this rank's leaves."""
    tensor: torch.Tensor
    """This rank's."""
    lengths: list[int]
    """Its length on each rank, in rank order; 1 for a tensor without dimensions."""


def agree(
    operation: str, leaves: Sequence[tuple[str, Any]], form: Callable[[torch.Tensor], str], *, dim: int = 0
) -> list[Agreed]:
    """Return this rank's tensors in an order that is the same on all ranks, by their paths.

    Args:
        operation: Its name, and those arguments that must be equal on all ranks: `reduce(reduction='sum')`.
        leaves: This rank's leaves with their paths, from `find_leaves`.
        form: Function of a tensor whose result must be equal on all ranks; it begins with the dtype.
        dim: The dimension whose lengths are exchanged.

    Raises:
        DistributedOperationException: Paths, forms or operations differ; on all ranks.
        TypeError: A leaf is neither a tensor of the usual kind nor None; on all ranks.
        ValueError: A tensor is of torch's nested kind, which has no one length; on all ranks.
    """
    order = sorted(range(len(leaves)), key=lambda at: leaves[at][0])
    forms = {leaves[at][0]: _form_of(leaves[at][1], form) for at in order}
    found = [(at, leaf) for at in order if isinstance(leaf := leaves[at][1], torch.Tensor)]
    lengths = _handshake(
        operation,
        [f"{path}: {text}" for path, text in forms.items()],
        [_length(tensor, dim) for _, tensor in found],
        lambda: {path: (forms[path], _show(leaf)) for path, leaf in leaves},
    )
    for _, leaf in leaves:
        if (error := _refusal(operation.partition("(")[0], leaf)) is not None:
            raise error
    return [Agreed(at, tensor, [row[n] for row in lengths]) for n, (at, tensor) in enumerate(found)]


def exchange_objects(operation: str, make: Callable[[], Any]) -> list[Any]:
    """Return what each rank has made, in rank order; it must be picklable.

    Raises:
        TypeError: A rank cannot make or pickle its object; on all ranks.
        DistributedOperationException: Another rank has called another operation; on all ranks.
    """
    payload, error = _pickled(make)
    sizes = [size for (size,) in _handshake(operation, [], [len(payload) * (-1 if error else 1)])]
    payloads = _gather_payloads(payload, list(map(abs, sizes)))
    if min(sizes) < 0:
        raise _unsendable(operation, {r: p for r, p in enumerate(payloads) if sizes[r] < 0}) from error
    return [pickle.loads(each) for each in payloads]


def broadcast_objects(operation: str, mine: list[Any], source: int) -> list[Any]:
    """Return the objects of one rank, where all ranks have as many.

    Raises:
        TypeError: They cannot be pickled; on all ranks.
        DistributedOperationException: Another rank has more or fewer, or has called another operation; on all ranks.
    """
    is_source = dist.get_rank() == source
    payload, error = _pickled(lambda: mine) if is_source else (b"", None)
    num = len(mine)
    sizes = _handshake(
        operation,
        [str(num)],
        [len(payload) * (-1 if error else 1)],
        lambda: {"object_list": (str(num), f"{num} items")},
    )
    size = sizes[source][0]
    wire = _to_tensor(payload) if is_source else torch.empty(abs(size), dtype=torch.uint8)
    wire = wire.to(collective_device(wire.device))
    dist.broadcast(wire, src=source)
    payload = bytes(wire.cpu().numpy())
    if size < 0:
        raise _unsendable(operation, {source: payload}) from error
    return mine if is_source else list(pickle.loads(payload))


def gather_numbers(numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers of every rank, in rank order; as many on each, of 64 bits."""
    num_processes = dist.get_world_size()
    mine = torch.tensor(numbers, dtype=torch.int64, device=collective_device(torch.device("cpu")))
    everyone = mine.new_empty(num_processes * len(numbers))
    _all_gather(everyone, mine)
    by_rank: list[list[int]] = everyone.view(num_processes, len(numbers)).tolist()
    return by_rank


def gather_digest(text: str) -> list[int]:
    """Return a number for the text of every rank, in rank order: equal texts have equal numbers."""
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    return [number for (number,) in gather_numbers([int.from_bytes(digest, "little")])]


def gather_bytes(mine: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return every rank's bytes as a row, in rank order; `sizes` are their numbers. Short rows end in anything."""
    longest = max(sizes)
    if len(mine) < longest:
        mine = torch.cat([mine, mine.new_empty(longest - len(mine))])
    everyone = mine.new_empty(len(sizes) * longest)
    if longest:
        _all_gather(everyone, mine)
    return everyone.view(len(sizes), longest)


def _all_gather(everyone: torch.Tensor, mine: torch.Tensor) -> None:
    # Its name since torch 2.13, which warns of the old one.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    all_gather(everyone, mine)


def _handshake(
    operation: str,
    forms: Sequence[str],
    numbers: Sequence[int],
    describe: Callable[[], dict[str, tuple[str, str]]] = dict,
) -> list[list[int]]:
    """Return every rank's numbers, in rank order, where all ranks have the same operation and forms.

    `describe` returns forms, and what a message says of each value, by path; only called if they differ.
    """
    digest = hashlib.blake2b("\n".join([operation, *forms]).encode(), digest_size=8).digest()
    head = [int.from_bytes(digest, "little", signed=True), *numbers[:NUMBERS]]
    by_rank = gather_numbers(head + [0] * (1 + NUMBERS - len(head)))
    if len({row[0] for row in by_rank}) > 1:
        payload = pickle.dumps((operation, describe()))
        sizes = [size for (size,) in gather_numbers([len(payload)])]
        raise DistributedOperationException(_differences(list(map(pickle.loads, _gather_payloads(payload, sizes)))))
    if len(numbers) > NUMBERS:
        return gather_numbers(numbers)
    return [row[1 : 1 + len(numbers)] for row in by_rank]


def _gather_payloads(payload: bytes, sizes: Sequence[int]) -> list[bytes]:
    wire = _to_tensor(payload).to(collective_device(torch.device("cpu")))
    rows = gather_bytes(wire, sizes).cpu().numpy()
    return [bytes(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def _to_tensor(payload: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


def _pickled(make: Callable[[], Any]) -> tuple[bytes, Exception | None]:
    """Return the pickled value and None; or words about an error, and the error."""
    try:
        return pickle.dumps(make()), None
    except Exception as error:  # objects may raise anything
        return str(error).encode(errors="replace") or b"?", error


def _unsendable(operation: str, words: dict[int, bytes]) -> TypeError:
    what = by_rank_text({rank: text.decode(errors="replace").rstrip(".") for rank, text in words.items()})
    return TypeError(f"{operation.partition('(')[0]} cannot send what it got: {what}.")


def _length(tensor: torch.Tensor, dim: int) -> int:
    if tensor.is_nested:
        return 0
    if tensor.ndim == 0:
        return 1
    return tensor.shape[dim] if -tensor.ndim <= dim < tensor.ndim else 0


def _form_of(leaf: Any, form: Callable[[torch.Tensor], str]) -> str:
    if not isinstance(leaf, torch.Tensor):
        return "empty" if isinstance(leaf, (list, tuple)) else type(leaf).__name__
    if leaf.is_nested or leaf.layout != torch.strided:
        return f"{leaf.dtype} {leaf.layout} {leaf.is_nested}"
    # Two devices may be served by two backends, which would wait for each other.
    return f"{form(leaf)} {collective_device(leaf.device).type}"


def _show(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return describe_value(leaf.part if isinstance(leaf, Pickled) else leaf)
    dtype = str(leaf.dtype).removeprefix("torch.")
    if leaf.is_nested:
        return f"a nested {dtype}"
    layout = "" if leaf.layout == torch.strided else f"{str(leaf.layout).removeprefix('torch.')} "
    device = "" if leaf.device.type == "cpu" else f" on {leaf.device.type}"
    return f"{layout}{dtype} {list(leaf.shape)}{device}"


def _refusal(operation: str, leaf: Any) -> Exception | None:
    if leaf is None or isinstance(leaf, Pickled):
        return None
    if not isinstance(leaf, torch.Tensor):
        return None if is_container(leaf) else TypeError(wrong_leaf(operation, leaf))
    if leaf.is_nested:
        return ValueError(
            f"{operation} got a nested tensor of {leaf.size(0)} parts, which have different lengths. Pass "
            "tensor.to_padded_tensor(0.0) instead."
        )
    if leaf.layout != torch.strided:
        return TypeError(f"{operation} got {_show(leaf)}, a sparse tensor. Pass tensor.to_dense() instead.")
    if leaf.is_meta:
        return TypeError(f"{operation} got {_show(leaf)}, which has no data. Make it with tensor.to_empty(...) first.")
    return None


def _differences(everyone: list[tuple[str, dict[str, tuple[str, str]]]]) -> str:
    """Return the error for ranks that told their operations and, by path, the forms and descriptions of values."""
    operations = [operation for operation, _ in everyone]
    if len(set(operations)) > 1:
        return (
            f"The ranks called different operations: {by_rank_text(dict(enumerate(operations)))}. All ranks must call "
            "the same operations in the same order, with the same arguments."
        )
    lines, advice = [], {}
    for path in sorted({path for _, values in everyone for path in values}):
        values = [values.get(path, ("", "nothing")) for _, values in everyone]
        forms = {form for form, _ in values}
        if len(forms) == 1:
            continue
        lines.append(f"  {path}: {by_rank_text({rank: shown for rank, (_, shown) in enumerate(values)})}")
        if any(len(form.split()) < 2 for form in forms):
            advice["names"] = (
                "All ranks must pass the same names and numbers of items, with tensors in the same places. A rank that "
                "has no rows passes a tensor without any, such as torch.zeros(0, 3). gather_object([...]) takes lists "
                "of any objects."
            )
        elif len({form.split()[0] for form in forms}) > 1:
            advice["dtypes"] = "Give all ranks one dtype, as with tensor.float()."
        elif len({_num_dimensions(form) for form in forms}) > 1:
            advice["dimensions"] = "Give all ranks as many dimensions, as with tensor[None]."
        else:
            advice["shapes"] = SHAPES.get(operations[0].partition("(")[0], "Shapes must be equal on all ranks.")
    more = [f"  and {len(lines) - MAX_DIFFERENCES} more"] if len(lines) > MAX_DIFFERENCES else []
    return "\n".join(
        [
            f"{operations[0]} needs values that fit together on all ranks, and these differ:",
            *lines[:MAX_DIFFERENCES],
            *more,
            " ".join(advice.values()),
        ]
    )


def _num_dimensions(form: str) -> int:
    """Return the number of dimensions in `torch.float32 [*, 3] cpu`, or of a form that has the number alone."""
    sizes = form.partition("[")[2].partition("]")[0]
    return sizes.count(",") + 1 if sizes else 0


def by_rank_text(words: dict[int, str]) -> str:
    """Return `float32 [2] on ranks 0-2, int64 [2] on rank 3`."""
    ranks: dict[str, list[int]] = {}
    for rank, text in words.items():
        ranks.setdefault(text, []).append(rank)
    return ", ".join(f"{text} on {rank_list(where)}" for text, where in ranks.items())


# --------------------------------------------------------------------------------------------------------------------
# The device on which the default group takes a tensor that it sends or reduces.
#
# The two rules differ for a tensor on a GPU if the group has gloo for GPUs and no NCCL. gloo's collectives take
# tensors on GPUs, and then `collective_device` leaves them there. gloo's sends from one rank to another take only
# what lies in the CPU's memory, so `sending_device` names the CPU.


def sending_device(device: torch.device) -> torch.device:
    """Return `device`, or the CPU or GPU that the group can send from."""
    kinds = _kinds_of_devices()
    if "cuda" in kinds and ("cpu" not in kinds or device.type == "cuda") and "nccl" in dist.get_backend_config():
        return device if device.type == "cuda" else _own_gpu()
    return torch.device("cpu")


def collective_device(device: torch.device) -> torch.device:
    """Return `device`, or the CPU or GPU from which the group's collectives take tensors."""
    kinds = _kinds_of_devices()
    if device.type in kinds:
        return device
    return _own_gpu() if "cuda" in kinds else torch.device("cpu")


def _kinds_of_devices() -> set[str]:
    # "cpu:gloo,cuda:gloo", or "cuda:nccl" for a group that cannot take what lies in the CPU's memory.
    return {entry.partition(":")[0] for entry in dist.get_backend_config().split(",")}


def _own_gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
