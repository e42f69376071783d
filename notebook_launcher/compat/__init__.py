"""Accelerate's exact behaviour, for moving over without changing a number.

    from notebook_launcher.compat import Accelerator, notebook_launcher

The code is `notebook_launcher`'s, by other rules (`training/plugins.py`): a window is divided by its
nominal length, a scheduler advances once for each process, `PartialState()` and its siblings are shared. When the
numbers are the same, import from `notebook_launcher` instead, and get the exact ones.
"""

from __future__ import annotations

from notebook_launcher import training
from notebook_launcher.compat.names import OWN, make_modules
from notebook_launcher.compat.names import find as __getattr__  # noqa: F401 - answers `from ... import name`

__all__ = sorted({*OWN, *training.__all__, "notebook_launch"})  # noqa: PLE0605 - mypy and ruff want a literal
make_modules(globals())


def __dir__() -> list[str]:
    return list(__all__)
