"""Ranks with different numbers of batches, by torch's `Join`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch.distributed.algorithms.join import Join, Joinable

from notebook_launcher.training.accumulation.members import SyncedModel
from notebook_launcher.training.plugins import check_switch
from notebook_launcher.training.user_warnings import warn_user
from notebook_launcher.wording import class_name

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def join_uneven_inputs(
    joinables: list[Any],
    loaders: list[Any],
    *,
    even_batches: bool | None,
    default: bool,
    num_processes: int,
    num_steps: int,
) -> Iterator[None]:
    """Let ranks with more batches continue after others have run out; see `Accelerator.join_uneven_inputs`."""
    even = default if even_batches is None else even_batches
    check_switch("even_batches", even_batches, or_none=True)
    _check_windows(1 if even or num_processes == 1 else num_steps)
    if num_processes == 1:
        yield
        return
    alone = next((class_name(model) for model in joinables if not isinstance(model, Joinable)), None)
    if alone is not None:
        warn_user(
            f"join_uneven_inputs has no effect: it is only supported for multi-GPU and multi-CPU training with "
            f"DistributedDataParallel, and got a {alone}. Pass the models that prepare() returned."
        )
        yield
        return
    all_samplers: list[Any] = [getattr(loader, "batch_sampler", None) for loader in loaders]
    samplers = [sampler for sampler in all_samplers if hasattr(sampler, "even_batches")]
    if even_batches is not None and len(samplers) < len(all_samplers):
        warn_user(
            f"join_uneven_inputs(even_batches={even_batches}) is only supported for map-style datasets that each "
            f"rank reads; {len(all_samplers) - len(samplers)} of the {len(all_samplers)} prepared loaders are of "
            "another kind and stay as they are."
        )
    before = [(sampler, sampler.even_batches, getattr(sampler, "uneven", None)) for sampler in samplers]
    for sampler in samplers:
        if even_batches is not None:
            sampler.even_batches = even_batches
        if hasattr(sampler, "uneven"):
            sampler.uneven = "leave"  # Join lets ranks that have run out take part in the reductions
    try:
        with Join(joinables, enable=not even, throw_on_early_termination=False):
            if not even:
                _note_own_states(joinables)
            yield
    finally:
        for sampler, even_before, uneven_before in before:
            sampler.even_batches = even_before
            if uneven_before is not None:
                sampler.uneven = uneven_before


def _check_windows(num_steps: int) -> None:
    if num_steps > 1:
        raise ValueError(
            f"join_uneven_inputs with gradient_accumulation_steps={num_steps}: torch's Join follows each backward of "
            "the others, and theirs synchronise at the end of a window only. Leave it out: with "
            "DataLoaderConfiguration(even_batches=False), ranks that have run out keep step with weight 0."
        )


def _note_own_states(joinables: list[Any]) -> None:
    """Note that a rank which has run out makes fewer updates, so that its optimizers' states differ from then on."""
    for model in joinables:
        if isinstance(model, SyncedModel):
            model.notes.own_state = "join_uneven_inputs()"
