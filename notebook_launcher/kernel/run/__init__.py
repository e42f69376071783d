"""One run: its handle, the thread that carries it out, its data, and the steps that lead to its outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher.facade import LazyNames

if TYPE_CHECKING:
    from notebook_launcher.kernel.run.handle import Run as Run

_NAMES = LazyNames(__name__)

__all__ = sorted(_NAMES.homes)  # noqa: PLE0605 - named once, above
__getattr__, __dir__ = _NAMES.find, _NAMES.listed
