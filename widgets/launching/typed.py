"""Numbers that are typed into the fields of options, with the words for a text that is not a number."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import math
from typing import Any

from notebook_launcher.config import MAX_SEED, LaunchConfig
from notebook_launcher.engines.cluster import engine_texts

__all__ = ["NUMBERS", "Number", "default_of", "reads"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """The numbers that an option takes."""

    is_whole: bool = True
    least: int = 0
    most: int | None = None

    @property
    def words(self) -> str:
        """Description of the numbers, for a note about what to type."""
        if not self.is_whole:
            return f"a number above {self.least}"
        bounds = f"{self.least} or more" if self.most is None else f"{self.least} to {self.most:,}"
        return f"a whole number, {bounds}"

    def read(self, text: str) -> int | float:
        """Return the number of a text; raises ValueError with what to type instead."""
        value = _number(text)
        is_round = isinstance(value, float) and value.is_integer()
        if value is None or (self.is_whole and not isinstance(value, int) and not is_round):
            raise ValueError(f"Enter {self.words}.")
        is_inside = self.least <= value <= (math.inf if self.most is None else self.most)
        if not is_inside or (not self.is_whole and not 0 < value < math.inf):
            raise ValueError(f"Enter {self.words}.")
        return int(value) if self.is_whole else value


NUMBERS = {
    "num_processes": Number(least=1),
    "gradient_accumulation_steps": Number(least=1),
    "shard": Number(least=1),
    "max_grad_norm": Number(is_whole=False),
    "seed": Number(most=MAX_SEED),
    "timeout": Number(is_whole=False),
    "idle_timeout": Number(is_whole=False),
    "max_restarts": Number(),
}
"""The options that are typed."""


def default_of(name: str) -> Any:
    """Return the default of an option."""
    return next(field.default for field in dataclasses.fields(LaunchConfig) if field.name == name)


def reads(name: str, text: str) -> Any:
    """Return the value of an option's text: the default for an empty one; raises ValueError with what to type."""
    if name == "engine":
        return engine_texts.read(text)
    default, text = default_of(name), text.strip()
    return default if not text or (text == "None" and default is None) else NUMBERS[name].read(text)


def _number(text: str) -> int | float | None:
    for read in (ast.literal_eval, float):  # Only the first reads 0x10, and only the second inf.
        with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            value = read(text)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return value
    return None
