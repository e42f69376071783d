"""Versions of installed packages, without importing them."""

from __future__ import annotations

from importlib import metadata

__all__ = ["version_of"]


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
