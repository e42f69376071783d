"""`pdb` in a rank: its prompt is answered in the cell."""

from __future__ import annotations

import io
import pdb
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RankPdb"]


class RankPdb(pdb.Pdb):
    """A debugger whose prompt travels inside the request, so that both stand on one line."""

    def __init__(self, rank: int, ask: Callable[[str], str], stdout: Any) -> None:
        # Without nosigint, `continue` would take over the rank's handler of SIGINT, by which a run is stopped.
        super().__init__(
            stdin=_Prompt(self, f"(rank {rank} pdb) ", ask),
            stdout=stdout,
            skip=["notebook_launcher.*"],
            nosigint=True,
        )
        self.prompt = ""


class _Prompt(io.TextIOBase):
    def __init__(self, debugger: pdb.Pdb, prompt: str, ask: Callable[[str], str]) -> None:
        self._debugger = debugger
        self._prompt = prompt
        self._ask = ask

    def readline(self, _size: int | None = -1) -> str:  # type: ignore[override]
        # The `commands` command of pdb sets a prompt of its own for a while.
        return self._ask(self._debugger.prompt or self._prompt) + "\n"
