"""The failure of one rank, as the kernel concludes and shows it; exceptions and results carry it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from notebook_launcher.wording.text import name_rank

if TYPE_CHECKING:
    from notebook_launcher.messaging.messages import KeptFrames

__all__ = ["Failure"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The failure of one rank."""

    rank: int
    kind: Literal["exception", "exit", "signal", "arrival", "return"]
    """`"arrival"`: the function, or an object that it uses, could not be rebuilt in the rank; `"return"`: the rank
    was stopped or exited while its value was being packed."""
    time: float
    """Time of the failure by CLOCK_MONOTONIC, which all processes of the machine share, in seconds."""
    summary: str
    """One line: `ValueError: boom`, `SIGSEGV(-11)`, `exit code 3`."""
    traceback: str = ""
    """The rank's traceback, with the source lines of the notebook's cells."""
    exitcode: int | None = None
    pid: int | None = None
    """Process number of the rank; None if the process did not start."""
    victim: bool = False
    """True if the rank failed only because another rank did."""
    left_by: tuple[int, ...] = ()
    """Ranks that had returned while this rank still waited for others in a collective."""
    place: str = ""
    """The line of Python that called into C code that crashed, if it is known: `f, Cell In[3], line 4: x = g()`."""
    last_lines: tuple[str, ...] = ()
    """The end of the rank's output, without the stacks that a crash adds."""
    kept: KeptFrames | None = None
    """The frames that the rank keeps for `Session.debug` until its next call; None if it keeps none."""
    collective: str = ""
    """The rank's collective that did not match the other ranks' collectives (`check_collectives=True`)."""
    node: str = ""
    """The name of the rank's machine; empty if all ranks are on one."""

    @property
    def who(self) -> str:
        """The rank, with its machine if there are several: `rank 3`, `rank 3 (gpu2)`."""
        return name_rank(self.rank, self.node)
