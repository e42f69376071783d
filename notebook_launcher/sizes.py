"""Numbers of bytes as people read them."""

from __future__ import annotations

__all__ = ["format_bytes"]


def format_bytes(number: float) -> str:
    """Return `12 bytes`, `1.5 kB` or `3.1 GB`: in powers of 1000, as torch and disks count."""
    if number < 1000:
        return f"{number:.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        number /= 1000
        if number < 1000:
            return f"{number:.1f} {unit}"
    return f"{number / 1000:.1f} TB"
