"""Run distributed PyTorch from a notebook cell.

    from notebook_launcher import notebook_launch

    results = notebook_launch(train, 4)

Importing the package imports neither torch nor anything else that is slow, and starts nothing.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.context import report, track
    from notebook_launcher.errors import (
        CallOrderError,
        CaptureError,
        ConfigError,
        InternalError,
        LaunchError,
        MissingResultError,
        RankFailedError,
        ResourceError,
        ReturnValueError,
        RunStoppedError,
        RunTimeoutError,
    )
    from notebook_launcher.kernel.launch import launch, notebook_launch, prewarm
    from notebook_launcher.kernel.results import Results
    from notebook_launcher.kernel.run import Run
    from notebook_launcher.kernel.session import Session

__all__ = [
    "CallOrderError",
    "CaptureError",
    "ConfigError",
    "InternalError",
    "LaunchConfig",
    "LaunchError",
    "MissingResultError",
    "RankFailedError",
    "ResourceError",
    "Results",
    "ReturnValueError",
    "Run",
    "RunStoppedError",
    "RunTimeoutError",
    "Session",
    "launch",
    "notebook_launch",
    "prewarm",
    "report",
    "track",
]

__version__ = "0.1.0"

# In a checkout, `widgets/` lies beside this folder; once installed, it lies in it (pyproject.toml,
# package-dir). This makes `import notebook_launcher.widgets` work in a checkout that is not installed.
_CHECKOUT = Path(__file__).resolve().parents[1]
if (_CHECKOUT / "pyproject.toml").is_file() and (_CHECKOUT / "widgets" / "__init__.py").is_file():
    __path__.append(str(_CHECKOUT))

_HOMES = {
    "LaunchConfig": "config",
    "Results": "kernel.results",
    "Run": "kernel.run",
    "Session": "kernel.session",
    "launch": "kernel.launch",
    "notebook_launch": "kernel.launch",
    "prewarm": "kernel.launch",
    "report": "context",
    "track": "context",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    module = importlib.import_module(f"{__name__}.{_HOMES.get(name, 'errors')}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
