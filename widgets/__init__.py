"""Views over runs: what they show comes from frozen snapshots and can be had without them as text.

The folder lies at the top of the repository and is imported as `notebook_launcher.widgets`. Nothing
in the rest of the package imports it.
"""

from __future__ import annotations

__all__: list[str] = []
