"""Mixed precision: a forward that computes in it and returns float32."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.training.operations import convert_to_fp32

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from notebook_launcher.training.plugins import AutocastKwargs

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def forward_precision(mixed_precision: str, scaler: torch.amp.GradScaler | None) -> str:
    """Return the precision of the forward: float32, which is `"no"`, where fp16 has no scaler, as on a CPU."""
    return "no" if mixed_precision == "fp16" and scaler is None else mixed_precision


class MixedForward:
    """A module's `forward` under autocast; half-precision outputs come back in float32."""

    def __init__(self, forward: Callable[..., Any], device_type: str, dtype: torch.dtype) -> None:
        self.forward = forward
        self.device_type = device_type
        self.dtype = dtype
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the forward."""
        with torch.autocast(self.device_type, dtype=self.dtype):
            outputs = self.forward(*args, **kwargs)
        return convert_to_fp32(outputs)


def compute_in(model: torch.nn.Module, device_type: str, precision: str) -> None:
    """Make `model.forward` compute in `precision`; its weights stay as they are."""
    strip_precision(model)  # set by an Accelerator that prepared it before
    if precision != "no":
        model.forward = MixedForward(model.forward, device_type, DTYPES[precision])


def strip_precision(model: torch.nn.Module) -> None:
    """Undo `compute_in`."""
    mixed = model.__dict__.get("forward")
    if not isinstance(mixed, MixedForward):
        return
    del model.__dict__["forward"]
    if model.forward != mixed.forward:
        model.forward = mixed.forward  # the model's own, as compiled models have it


@contextlib.contextmanager
def autocast(device: torch.device, precision: str, kwargs: AutocastKwargs) -> Iterator[None]:
    """Compute in `precision`, as the prepared model's forward does."""
    if precision == "no" or not kwargs.enabled:
        with torch.autocast(device.type, enabled=False):
            yield
        return
    with torch.autocast(device.type, dtype=DTYPES[precision], cache_enabled=kwargs.cache_enabled):
        yield
