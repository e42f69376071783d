"""Decisions on when gradients are synchronised; all of them are in this file.

A backward reduces a member's gradients over the ranks if the member's switch is on. DDP reads its switch at the
forward, so a block sets the switches when it begins.

| a micro-batch is computed | the switch |
|---|---|
| as the last of its window: `ends_window` | on |
| earlier in its window: `switch_off` | off; on with `sync_each_batch=True`; partly on for sharded models with None |
| outside any `accumulate` | on |
| inside `no_sync`: `without_sync` | off |
| inside `trigger_sync_in_backward`: `sync_next` | on, for the forwards before as well |

Leaf tensors have no hooks, so `reduce_leaves` reduces them after the backward. Optimizers and schedulers step where
a window ends, even with `sync_each_batch=True`: `GradientState.sync_gradients`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from notebook_launcher.training.accumulation.members.member import SwitchOff
from notebook_launcher.training.operations.wire_devices import collective_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from notebook_launcher.training.accumulation.members.member import Member
    from notebook_launcher.training.accumulation.members.member_kinds import LeafTensor
    from notebook_launcher.training.accumulation.members.members import Members
    from notebook_launcher.training.accumulation.windows.windows import Window

__all__ = ["ends_window", "reduce_leaves", "switch_back", "switch_off", "sync_next", "waits_for_ranks", "without_sync"]


def ends_window(num_batches: int, num_steps: int, *, is_last: bool) -> bool:
    """Return True if a micro-batch is the last of its window.

    Args:
        num_batches: Micro-batches of the window, with this one.
        num_steps: Micro-batches of a full window.
        is_last: True if its batch is the last of a prepared loader, and windows end where their loader ends.
    """
    return num_batches >= num_steps or is_last


def switch_off(members: Iterable[Member], *, sync_each_batch: bool | None) -> list[tuple[Member, bool]]:
    """Switch members off for a micro-batch that is not the last of its window; return what `switch_back` needs."""
    if sync_each_batch:
        return []
    asked = sync_each_batch is False
    switched_off = []
    for member in members:
        if member.switch_off is SwitchOff.ALWAYS or (asked and member.switch_off is SwitchOff.IF_ASKED):
            switched_off.append((member, member.set_sync(member.must_sync)))
        elif member.switch_off is SwitchOff.IF_ASKED:
            member.reduce_partly()
            switched_off.append((member, True))
    return switched_off


def switch_back(switched_off: Iterable[tuple[Member, bool]]) -> None:
    """Set the switches back to their states before `switch_off`."""
    for member, before in switched_off:
        member.set_sync(before)


@contextlib.contextmanager
def without_sync(members: Iterable[Member]) -> Iterator[None]:
    """Let the gradients of these members accumulate on each rank by itself, forward and backward."""
    before = [(member, member.set_sync(False)) for member in members]
    try:
        yield
    finally:
        switch_back(reversed(before))


@contextlib.contextmanager
def sync_next(members: Iterable[Member]) -> Iterator[None]:
    """Let the next backward synchronise all gathered gradients, though their forwards ran under `no_sync`."""
    with contextlib.ExitStack() as stack:
        for member in members:
            stack.enter_context(member.sync_next())
        yield


def waits_for_ranks(window: Window | None, members: Members) -> bool:
    """Return True if the last backward of a window, or one outside any, may reduce gradients: it waits for all ranks.

    Inside `no_sync` and `LocalSGD` such a backward reduces nothing.

    Args:
        window: The window of the block; None outside any.
        members: Models and tensors that an Accelerator trains.
    """
    trained = members.models_and_leaves if window is None else window.members or members.models_and_leaves
    for member in trained:  # not any(): it would make a generator at every update
        if member.reduces_next:
            return True
    return window is not None and not trained


def reduce_leaves(leaves: Sequence[LeafTensor]) -> bool:
    """Average the gradients of the leaf tensors whose switch is on; return False without any.

    One all-reduce for each dtype. A rank on which a tensor had no part in the loss counts as one whose gradient is
    zero.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for leaf in leaves:
        tensor = leaf.tensor
        leaf.was_reduced = leaf.syncs
        if not leaf.syncs:
            continue
        if tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor)
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor.grad)
    for grads in groups.values():
        _average(grads)
    return bool(groups)


def _average(grads: list[torch.Tensor]) -> None:
    """Replace gradients of one dtype by their means over the ranks."""
    flat = torch.cat([grad.reshape(-1) for grad in grads]) if len(grads) > 1 else grads[0].contiguous()
    if flat.device.type == "cpu":
        flat = flat.to(collective_device(flat.device))  # NCCL reduces no tensors on the CPU.
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    if len(grads) == 1:
        grads[0].copy_(flat)
        return
    at = 0
    for grad in grads:
        grad.copy_(flat[at : at + grad.numel()].view_as(grad))
        at += grad.numel()
