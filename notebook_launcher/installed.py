"""Versions of installed packages, without importing them."""

from __future__ import annotations

from importlib import metadata

BROKEN_IPYKERNELS = ("7.0.0", "7.0.1")
"""Versions of ipykernel that cannot show rich output that comes from a thread, which a run needs."""


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
