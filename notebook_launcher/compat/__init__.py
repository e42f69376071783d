"""Accelerate's exact behaviour, for moving over without changing a number.

    from notebook_launcher.compat import Accelerator, notebook_launcher

It is the same code as `notebook_launcher`'s, by other rules (`training/rules.py`): a window is divided by its
nominal length, a scheduler advances once for each process, `PartialState()` and its siblings are shared. When the
numbers are the same, import from `notebook_launcher` instead, and get the exact ones.
"""

from __future__ import annotations

import importlib
from typing import Any

from notebook_launcher import training

_OWN = {
    "Accelerator": "accelerator",
    "AcceleratorState": "state",
    "GradientState": "state",
    "PartialState": "state",
    "debug_launcher": "launchers",
    "get_logger": "logging",
    "notebook_launcher": "launchers",
}

__all__ = sorted({*_OWN, *training.__all__, "notebook_launch"})  # noqa: PLE0605 - mypy and ruff want a literal


def __getattr__(name: str) -> Any:
    if name in _OWN:
        return getattr(importlib.import_module(f"{__name__}.{_OWN[name]}"), name)
    if name in training.__all__:
        return getattr(training, name)
    if name == "notebook_launch":
        return importlib.import_module("notebook_launcher.kernel.launch").notebook_launch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
