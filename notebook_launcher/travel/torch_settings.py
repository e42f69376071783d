"""Settings of torch that a program makes once, at its top: ranks have the kernel's, as a fork of the kernel would.

Without them, a model made under `torch.set_default_dtype(torch.float64)` would meet float32 tensors in its ranks.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["TorchSettings", "read_settings"]

DEFAULTS: dict[str, Any] = {
    "default_dtype": "float32",
    "deterministic_algorithms": (False, False),
    "float32_matmul_precision": "highest",
    "cudnn_benchmark": False,
    "cudnn_deterministic": False,
    "detect_anomaly": (False, True),
    "print_options": (4, 1000, 3, 80, None),
}
"""Torch's own values, in plain types."""


def read_settings() -> dict[str, Any]:
    """Return this process's settings that are not torch's own, by name; empty while torch is not imported."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}

    def print_options() -> tuple[Any, ...]:
        options = torch._tensor_str.PRINT_OPTS  # noqa: SLF001 - torch has no other way to read them
        return options.precision, options.threshold, options.edgeitems, options.linewidth, options.sci_mode

    readers: dict[str, Callable[[], Any]] = {
        "default_dtype": lambda: str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic_algorithms": lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "float32_matmul_precision": lambda: str(torch.get_float32_matmul_precision()),
        "cudnn_benchmark": lambda: bool(torch.backends.cudnn.benchmark),
        "cudnn_deterministic": lambda: bool(torch.backends.cudnn.deterministic),
        "detect_anomaly": lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "print_options": print_options,
    }
    found = {}
    for name, read in readers.items():
        # Torch refuses to read an old setting beside its newer form, and is not complete while it is being imported.
        with contextlib.suppress(Exception):
            found[name] = read()
    return {name: value for name, value in found.items() if value != DEFAULTS[name]}


class TorchSettings:
    """The kernel's settings in a rank. Only what has changed in the kernel is set, so a rank's own settings stay.

    Args:
        inherited: The settings that a fork of the kernel has inherited from it.
    """

    def __init__(self, inherited: Mapping[str, Any] | None = None) -> None:
        self._kernels = {**DEFAULTS, **(inherited or {})}
        """The kernel's settings at the last call."""

    def follow(self, sent: Mapping[str, Any]) -> None:
        """Set what differs from the last call; `sent` is what `read_settings` has returned in the kernel."""
        wanted = {**DEFAULTS, **sent}
        changed = {name: value for name, value in wanted.items() if value != self._kernels[name]}
        if not changed:
            return
        import torch

        def print_as(options: tuple[Any, ...]) -> None:
            names = ("precision", "threshold", "edgeitems", "linewidth", "sci_mode")
            torch.set_printoptions(**dict(zip(names, options, strict=True)))  # type: ignore[no-untyped-call]

        writers: dict[str, Callable[[Any], object]] = {
            "default_dtype": lambda name: torch.set_default_dtype(getattr(torch, name)),
            "deterministic_algorithms": lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1]),
            "float32_matmul_precision": torch.set_float32_matmul_precision,
            "cudnn_benchmark": lambda value: setattr(torch.backends.cudnn, "benchmark", value),
            "cudnn_deterministic": lambda value: setattr(torch.backends.cudnn, "deterministic", value),
            "detect_anomaly": lambda both: torch.autograd.set_detect_anomaly(both[0], check_nan=both[1]),
            "print_options": print_as,
        }
        for name, value in changed.items():
            writers[name](value)
            self._kernels[name] = value
