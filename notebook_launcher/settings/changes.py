"""Changes of settings during a run: what may be asked for, and the value that results."""

from __future__ import annotations

import contextlib
import math
import numbers
import re
from typing import TYPE_CHECKING, Literal, TypeAlias

from notebook_launcher.settings.option_checks import whole_number
from notebook_launcher.tracebacks import for_caller

if TYPE_CHECKING:
    from collections.abc import Mapping

Wanted: TypeAlias = "float | str | None"
"""A new value; a factor, such as `"x0.5"`; None: no clipping."""
SettingKind: TypeAlias = Literal["positive", "optional", "count"]
"""The values that a setting takes: numbers above 0; the same or None; whole numbers from 1 on."""
ACCELERATOR_SETTINGS: dict[str, SettingKind] = {
    "lr": "positive",
    "max_grad_norm": "optional",
    "gradient_accumulation_steps": "count",
}
"""Settings that every Accelerator offers; `training/requests.py` changes them."""
FIXED: dict[str, dict[str, str]] = {
    "lr": {},
    "max_grad_norm": {
        "transformers' Trainer": "gradient_clipping in the settings of DeepSpeed",
        "Lightning's Trainer": "clip_gradients(...), or Trainer(gradient_clip_val=...),",
    },
    "gradient_accumulation_steps": {
        "transformers' Trainer": "TrainingArguments(gradient_accumulation_steps=...)",
        "Lightning's Trainer": "Trainer(accumulate_grad_batches=...)",
    },
}
"""By setting and trainer of another library: what to write where the trainer does not change it."""
FACTOR = re.compile(r"\s*[x*]\s*(?P<factor>[0-9.]+(?:[eE][+-]?[0-9]+)?)\s*")


def check_change(
    name: str,
    wanted: object,
    tunables: Mapping[str, float],
    present: Mapping[str, float | None] | None = None,
    trainer: str = "",
) -> Wanted:
    """Return a change that can be sent to the ranks; raise ValueError, with what to type, for one that cannot work.

    Args:
        name: The setting.
        wanted: A number, of Python or NumPy, a factor such as `"x0.5"`, or None for `max_grad_norm`.
        tunables: Settings that the function offers by `tunable(...)`, with their values, whose types stay.
        present: The last known values of the Accelerator's settings.
        trainer: The trainer of another library that has these settings; empty: an Accelerator has them.
    """
    wanted = _in_plain_type(wanted)
    kind = ACCELERATOR_SETTINGS.get(name)
    if kind is None:
        return _check_tunable(name, wanted, tunables)
    if trainer and present and name not in present and (instead := FIXED[name].get(trainer)):
        msg = f"{name}={wanted!r}: {trainer} cannot change it while it trains. Write {instead} in the function."
        raise for_caller(ValueError(msg))
    if kind == "count":
        try:
            return whole_number(name, wanted)
        except ValueError as error:
            raise for_caller(error) from None
    if wanted is None and kind == "optional":
        return None
    number = _number_in(wanted)
    if number is None or number <= 0:
        none = ", or None for no clipping" if kind == "optional" else ""
        msg = f'{name}={wanted!r} must be a number, more than 0, or a factor such as "x0.5"{none}.'
        raise for_caller(ValueError(msg))
    if isinstance(wanted, str) and present and present.get(name, number) is None:
        msg = f"{name}={wanted!r} is a factor, but {name} is none, and has no value. Give a number."
        raise for_caller(ValueError(msg))
    return wanted  # type: ignore[return-value]


def _in_plain_type(wanted: object) -> object:
    """Return a number of NumPy, or of another type, as an int or a float; any other value as it is."""
    if isinstance(wanted, bool):
        return wanted
    if isinstance(wanted, numbers.Integral):
        return int(wanted)
    return float(wanted) if isinstance(wanted, numbers.Real) else wanted


def read_wanted(text: str) -> Wanted:
    """Return what was typed into a field: a number, `none`, `on`, `off`, or the text itself, such as a factor."""
    text = text.strip()
    words: dict[str, Wanted] = {"none": None, "on": True, "off": False}
    if text.lower() in words:
        return words[text.lower()]
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return read(text)
    return text


def apply_change(before: float, wanted: Wanted) -> float:
    """Return the value after a change."""
    assert wanted is not None
    if isinstance(wanted, str):
        found = FACTOR.fullmatch(wanted)
        assert found is not None
        return before * float(found["factor"])
    return wanted


def _check_tunable(name: str, wanted: object, tunables: Mapping[str, float]) -> Wanted:
    if name not in tunables:
        offered = ", ".join([*ACCELERATOR_SETTINGS, *sorted(tunables)])
        msg = (
            f"{name}={wanted!r}: this run offers {offered}. To offer {name}, write tunable({name!r}, default) where "
            "the function uses it."
        )
        raise for_caller(ValueError(msg))
    number, offered_as = _number_in(wanted), type(tunables[name])
    if offered_as is bool:
        fits, words = isinstance(wanted, (int, float)) and wanted in (0, 1), "True or False"
    elif offered_as is int:
        fits = number is not None and (isinstance(wanted, str) or number == int(number))
        words = 'a whole number, or a factor such as "x0.5"'
    else:
        fits, words = number is not None, 'a number, or a factor such as "x0.5"'
    if not fits:
        raise for_caller(ValueError(f"{name}={wanted!r} must be {words}."))
    return wanted  # type: ignore[return-value]


def _number_in(wanted: object) -> float | None:
    """Return a wanted number, or the number in a factor; None if there is no finite number."""
    number: object = wanted
    if isinstance(wanted, str) and (found := FACTOR.fullmatch(wanted)):
        with contextlib.suppress(ValueError):
            number = float(found["factor"])
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
        return None
    return number
