"""Views over runs: what they show comes from frozen snapshots and can be had without them as text.

    from notebook_launcher.widgets import ConfigPanel, Monitor, compare

The folder lies at the top of the repository and is imported as `notebook_launcher.widgets`. The rest of
the package asks for it in one place, by name, when a run that lasts is to show itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notebook_launcher.widgets.comparison import compare
    from notebook_launcher.widgets.monitor import Monitor
    from notebook_launcher.widgets.panel import ConfigPanel

__all__ = ["ConfigPanel", "Monitor", "compare"]

# Imported late: ipywidgets and anywidget take 0.1 s each.
_HOMES = {"ConfigPanel": "panel", "Monitor": "monitor", "compare": "comparison"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
