"""The options that are numbers: their bounds, and what None means, for all that check, ask for and show them."""

from __future__ import annotations

import dataclasses

__all__ = ["DEFAULT_STEPS", "MAX_SEED", "NUMBERS", "OptionNumber"]

DEFAULT_STEPS = 1
"""Accumulation steps if nobody gives them: each micro-batch is an update."""

MAX_SEED = 2**32 - 1
"""Largest seed that NumPy's legacy generator takes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptionNumber:
    """The numbers that an option takes."""

    is_whole: bool = True
    least: int = 0
    """The least whole number; other numbers are more than this."""
    most: int | None = None
    unit: str = ""
    none: str | None = None
    """Meaning of None in words; None: the option must be a number."""

    @property
    def words(self) -> str:
        """Description of the numbers, for a note about what to type."""
        if not self.is_whole:
            return f"a number above {self.least}"
        bounds = f"{self.least} or more" if self.most is None else f"{self.least} to {self.most:,}"
        return f"a whole number, {bounds}"


NUMBERS = {
    "num_processes": OptionNumber(least=1, none="one for each GPU, else 4, or fewer on fewer cores"),
    "nodes": OptionNumber(least=1, none="all machines"),
    "processes_per_node": OptionNumber(least=1, none="spread evenly"),
    "gradient_accumulation_steps": OptionNumber(least=1, none=str(DEFAULT_STEPS)),
    "shard": OptionNumber(least=1, none="no sharding"),
    "threads_per_process": OptionNumber(least=1, none="the cores, divided among the ranks"),
    "seed": OptionNumber(most=MAX_SEED, none="the random state of the kernel"),
    "max_restarts": OptionNumber(),
    "max_grad_norm": OptionNumber(is_whole=False, none="no clipping"),
    "timeout": OptionNumber(is_whole=False, unit="seconds", none="no limit"),
    "idle_timeout": OptionNumber(is_whole=False, unit="seconds", none="no limit"),
    "hang_notice": OptionNumber(is_whole=False, unit="seconds", none="no notice"),
}
"""By name of the option."""
