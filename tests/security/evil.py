"""A value whose unpickling runs code."""

from __future__ import annotations

from pathlib import Path


class Evil:
    """Makes a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.mark,)
