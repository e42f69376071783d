"""Settings of a launch for training; Accelerate's environment variables give what the launch leaves open.

An argument in the code wins over both (`training/resolving.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from notebook_launcher.settings.option_choices import CHOICES
from notebook_launcher.settings.option_numbers import DEFAULT_STEPS
from notebook_launcher.settings.whole_numbers import accumulation_steps
from notebook_launcher.wording.choices import unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "OF_ENVIRONMENT",
    "PRECISION_VARIABLE",
    "STEPS_VARIABLE",
    "SettingName",
    "TrainingSettings",
    "precision_of",
    "read_precision",
    "read_variable",
    "steps_of",
]

SettingName = Literal[
    "mixed_precision", "gradient_accumulation_steps", "max_grad_norm", "comm_hook", "check_ranks", "shard"
]
"""A field of `TrainingSettings`."""

PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"
STEPS_VARIABLE = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
OF_ENVIRONMENT = " It is a variable of the environment: of the shell, of os.environ, or of the launch's env=."
"""End of an error about a variable."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """Fields of `LaunchConfig` that an `Accelerator()` made in a rank adopts, by the same names. None: not given."""

    mixed_precision: str | None
    gradient_accumulation_steps: int | None
    max_grad_norm: float | None
    comm_hook: str | None
    check_ranks: bool | None
    shard: int | None

    def asked_for(self) -> dict[str, Any]:
        """Return the fields that ask an Accelerator for something, by name; what it compares is not among them."""
        neutral = {
            "mixed_precision": "no", "gradient_accumulation_steps": DEFAULT_STEPS, "max_grad_norm": None,
            "comm_hook": "no", "shard": 1,
        }  # fmt: skip
        given = {name: getattr(self, name) for name in neutral}
        return {name: value for name, value in given.items() if value not in (None, neutral[name])}

    def resolved(self, environ: Mapping[str, str]) -> TrainingSettings:
        """Return the settings of ranks with this environment: as given, else from Accelerate's variables.

        A field stays None if its variable cannot be read. The rank then raises an error with the variable's name.
        """
        steps, precision = self.gradient_accumulation_steps, self.mixed_precision
        with contextlib.suppress(ValueError):
            steps = steps_of(steps, environ)
        with contextlib.suppress(ValueError):
            precision = precision_of(precision, environ)
        return dataclasses.replace(
            self, mixed_precision=precision, gradient_accumulation_steps=steps, comm_hook=self.comm_hook or "no"
        )


def precision_of(launched: str | None, environ: Mapping[str, str]) -> str:
    """Return the precision of a launch, else the variable's, else "no"; raise ValueError if the variable has none."""
    if launched is not None:
        return launched
    return read_precision(PRECISION_VARIABLE, environ.get(PRECISION_VARIABLE, "no"))


def read_precision(name: str, value: object) -> str:
    """Return a precision in small letters; raise ValueError with the name of its source if there is none such."""
    words, text = CHOICES["mixed_precision"].words, str(value).lower()
    if text in words:
        return text
    raise ValueError(unknown(name, value, words))


def steps_of(launched: int | None, environ: Mapping[str, str]) -> int:
    """Return the accumulation steps of a launch, else the variable's, else DEFAULT_STEPS.

    Raises:
        ValueError: The variable has no number.
    """
    if launched is not None:
        return launched
    return accumulation_steps(
        STEPS_VARIABLE, read_variable(environ, STEPS_VARIABLE, DEFAULT_STEPS), hint=OF_ENVIRONMENT
    )


def read_variable(environ: Mapping[str, str], variable: str, default: int) -> int | str:
    """Return the number that a variable holds; its text if that is no whole number, the default if it is not set."""
    text = environ.get(variable, str(default)).strip()
    return int(text) if text.lstrip("-").isdecimal() else text
