"""Whole numbers as users give them, and accumulation steps, which many places take."""

from __future__ import annotations

import operator

from notebook_launcher.settings.option_numbers import NUMBERS
from notebook_launcher.wording.text import type_of

__all__ = ["accumulation_steps", "whole_number"]


def whole_number(name: str, value: object, *, minimum: int = 1, maximum: int | None = None, hint: str = "") -> int:
    """Return a value as an int; raise ValueError if it is not a whole number, of Python or NumPy, or out of bounds.

    Args:
        name: The option's name.
        value: The value as given.
        minimum: Least value.
        maximum: Largest value; None: no limit.
        hint: Words that follow in the error.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is {type_of(value)}; it must be a whole number.{hint}")
    if number < minimum:
        raise ValueError(f"{name}={value!r} is too small; it must be {minimum} or more.{hint}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{name}={value!r} is too large; it must be {maximum} or less.{hint}")
    return number


def accumulation_steps(name: str, value: object, *, hint: str = "") -> int:
    """Return a number of accumulation steps as an int; raise ValueError with the name of its source if it is none.

    Each source is checked here: an argument, a plugin, a variable, DeepSpeed's settings, a change during a run. A
    launch's option has the same bound, and its error says which option it is (`check_number`).
    """
    return whole_number(name, value, minimum=NUMBERS["gradient_accumulation_steps"].least, hint=hint)
