"""Errors of torch that do not name the remedy, each with its remedy."""

from __future__ import annotations

import re

__all__ = ["advice_on"]

_RESHAPED = (
    "Something reshaped the parameters of a sharded model, as LBFGS and Adafactor do: they cannot be used with it."
)
_AVERAGED = (
    "For a moving average write averaged = AveragedModel(model), then prepare the model, then averaged.module = "
    "accelerator.prepare(averaged.module); where it averages buffers, give it avg_fn= and not multi_avg_fn=."
)
_ADVICE = {
    "Expected to mark a variable ready only once": (
        "DistributedDataParallel synchronises once for each forward. Two backward() went through one forward: add the "
        "losses up and write one backward(loss_a + loss_b). Or activation checkpointing ran a part again: pass "
        "DistributedDataParallelKwargs(static_graph=True)."
    ),
    "Expected to have finished reduction in the prior iteration": (
        "The last backward left parameters without gradients: they were frozen after prepare(), or its loss does not "
        "depend on them. Freeze before prepare(), or pass DistributedDataParallelKwargs(find_unused_parameters=True)."
    ),
    "got mixed torch.Tensor and DTensor": (
        "The parameters of a sharded model are DTensors, which do not mix with plain tensors. For a penalty on the "
        "weights, give the optimizer weight_decay, or sum over parameter.full_tensor() on every rank. " + _AVERAGED
    ),
    "would remove or reshape sharded dimension": _RESHAPED,
    "Cannot flatten unevenly sharded tensor": _RESHAPED,
    "Attempted to flatten unevenly sharded dimension": _RESHAPED,  # torch 2.8, 2.10 and 2.11
    "Sharding propagation failed for Op(op=aten.view.default": _RESHAPED,  # torch 2.9
    "operations that require placement changes": _RESHAPED,
    "'_OpNamespace' '": (
        "The rank does not know this operator. Import the library that has it in the function, or define it in a cell "
        "by torch.library.custom_op and call it by torch.ops in the function's own code."
    ),
    "FSDP does not support deepcopy": (
        "A sharded model cannot be copied: make the copy before prepare(). " + _AVERAGED
    ),
}
"""Code to write instead, by a part of torch's text."""


_ONLY_FORWARD = (
    "Gradients are synchronised only through the call of the wrapper itself, so a method whose result is trained on "
    "has to be called in the model's forward()."
)
_WRAPPED = re.compile(r"'(?:SyncedModel|DistributedDataParallel)' object has no attribute '(\w+)'")
"""The error of a model on several ranks, of which the user knows the model inside."""


def advice_on(text: str) -> list[str]:
    """Return the advice on an error with this text: one line, or none."""
    if wrapped := _WRAPPED.search(text):
        reached = f"accelerator.unwrap_model(model).{wrapped[1]}"
        return [f"On several ranks prepare() wraps the model: write {reached}. {_ONLY_FORWARD}"]
    return [advice for part, advice in _ADVICE.items() if part in text][:1]
