"""Models without the wrappers of `prepare` and `torch.compile`."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from notebook_launcher.training.precision import strip_precision


def synced_part(model: Any) -> Any:
    """Return the DistributedDataParallel that a compiled model was compiled from; any other model as it is."""
    inner = model._modules.get("_orig_mod") if isinstance(model, torch.nn.Module) else None  # noqa: SLF001
    return inner if isinstance(inner, DistributedDataParallel) else model


def unwrap_model(model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
    """Return the model that `prepare` was given.

    Args:
        model: As `prepare` returned it; anything else is returned as it is.
        keep_fp32_wrapper: True if its `forward` still computes in mixed precision.
        keep_torch_compile: True if a compiled model stays compiled.
    """
    compiled = None
    while True:
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            compiled, model = compiled or model, model._orig_mod  # noqa: SLF001 - torch.compile gives no other way
        else:
            break
    if not keep_fp32_wrapper:
        strip_precision(model)
    if compiled is None or not keep_torch_compile:
        return model
    # What was compiled may be a wrapper around the model, whose names do not belong in a checkpoint.
    return compiled if compiled._orig_mod is model else type(compiled)(model, compiled.dynamo_ctx)  # noqa: SLF001


def extract_model_from_parallel(
    model: Any,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> Any:
    """Return `unwrap_model(...)`; with `recursive`, wrapped submodules are unwrapped, too."""
    model = unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)
    if recursive:
        for name, child in model.named_children():
            setattr(model, name, extract_model_from_parallel(child, keep_fp32_wrapper, keep_torch_compile, True))
    return model
