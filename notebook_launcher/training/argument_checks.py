"""Checks of the arguments of an Accelerator and of its records, by their types."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import TYPE_CHECKING, Any

from notebook_launcher.settings.whole_numbers import whole_number
from notebook_launcher.wording.choices import did_you_mean
from notebook_launcher.wording.text import type_of

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["check_fields", "check_instance", "check_keywords", "check_limit", "check_number", "check_switch"]


def check_instance(name: str, value: Any, kind: type, write: str) -> None:
    """Raise TypeError unless a value is None or of a class of this package.

    Args:
        name: The argument's name.
        value: Its value.
        kind: The class.
        write: A value to pass instead, as code.
    """
    if value is None or isinstance(value, kind):
        return
    if type(value).__name__ == kind.__name__:
        raise TypeError(
            f"{name}={value!r} is the {kind.__name__} of {type(value).__module__}. Import {kind.__name__} from "
            "notebook_launcher."
        )
    article = "an" if kind.__name__[0] in "AEIO" else "a"
    raise TypeError(f"{name}={value!r} is not {article} {kind.__name__}. Pass {write}.")


def check_keywords(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for a keyword that is not known, with the nearest one.

    Args:
        call: What was called, as code: `save_state()`.
        given: The keywords that were given besides those of the signature.
        known: All keywords, those of the signature included.
    """
    known = list(known)
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or f"It takes {', '.join(known)}."
            raise TypeError(f"{call} has no argument {name}=. {hint}")


def check_switch(name: str, value: Any, *, or_none: bool = False) -> None:
    """Raise TypeError unless a value is True or False, which NumPy's and 1 and 0 are as well."""
    if (value is None and or_none) or (not isinstance(value, float) and value in (True, False)):
        return
    end = "True or False, or None" if or_none else "True or False"
    raise TypeError(f"{name}={value!r} is {type_of(value)}; it must be {end}.")


def check_limit(name: str, value: Any) -> None:
    """Raise TypeError or ValueError unless a value is a number that gradients can be clipped to.

    A negative one would turn the gradients around.
    """
    if type(value) is float and value >= 0.0:  # in every micro-batch
        return
    check_number(name, value)
    if value < 0:
        raise ValueError(f"{name}={value!r} must be 0 or more; to clip nothing, leave the call out.")


def check_fields(record: Any) -> None:
    """Raise TypeError or ValueError if a field of a dataclass is not of its type, which may be bool, int or float."""
    for field in dataclasses.fields(record):
        kind, _, rest = str(field.type).partition(" | ")
        value = getattr(record, field.name)
        if kind == "bool":
            check_switch(field.name, value, or_none=rest == "None")
        elif value is None and rest == "None":
            continue
        elif kind == "int":
            whole_number(field.name, value, minimum=-sys.maxsize)
        elif kind == "float":
            check_number(field.name, value)


def check_number(name: str, value: Any) -> None:
    """Raise TypeError unless a value is a number, or holds one, as a tensor of one element does."""
    try:
        number = math.nan if isinstance(value, (str, bytes, bool)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise TypeError(f"{name}={value!r} is {type_of(value)}; it must be a number.")
