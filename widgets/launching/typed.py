"""Numbers that are typed into the fields of options, with the words for a text that is not a number."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any

from notebook_launcher.config import LaunchConfig
from notebook_launcher.engines.cluster import engine_texts
from notebook_launcher.settings.option_numbers import NUMBERS

if TYPE_CHECKING:
    from notebook_launcher.settings.option_numbers import OptionNumber

__all__ = ["default_of", "reads"]


def default_of(name: str) -> Any:
    """Return the default of an option."""
    return next(field.default for field in dataclasses.fields(LaunchConfig) if field.name == name)


def reads(name: str, text: str) -> Any:
    """Return the value of an option's text: the default for an empty one; raises ValueError with what to type."""
    if name == "engine":
        return engine_texts.read(text)
    default, text = default_of(name), text.strip()
    return default if not text or (text == "None" and default is None) else _read(text, NUMBERS[name])


def _read(text: str, number: OptionNumber) -> int | float:
    value = _number(text)
    is_round = isinstance(value, float) and value.is_integer()
    if value is None or (number.is_whole and not isinstance(value, int) and not is_round):
        raise ValueError(f"Enter {number.words}.")
    is_inside = number.least <= value <= (math.inf if number.most is None else number.most)
    if not is_inside or (not number.is_whole and not 0 < value < math.inf):
        raise ValueError(f"Enter {number.words}.")
    return int(value) if number.is_whole else value


def _number(text: str) -> int | float | None:
    for read in (ast.literal_eval, float):  # Only the first reads 0x10, and only the second inf.
        with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            value = read(text)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return value
    return None
