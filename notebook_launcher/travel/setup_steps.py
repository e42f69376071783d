"""Code that each rank runs once, before the first call that comes with it: `setup=` and the cells of `%%everywhere`."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["SetupStep", "SetupSteps"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SetupStep:
    """A piece of code that each rank runs before it unpacks a call."""

    key: str
    """A rank runs one step of each key."""
    what: str
    """The code in words, for an error that it raises."""
    run: Callable[[], object]
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The notebook's variables that the code uses, which each call brings with their present values."""
    shared: Mapping[str, Any] | None = None
    """By name: what the same code has made in the kernel, where it has run, and each rank has of its own. In a rank the
    names alone. None: the code has not run in the kernel."""

    def __reduce__(self) -> tuple[Any, ...]:
        shared = None if self.shared is None else dict.fromkeys(self.shared)
        return _step, (self.key, self.what, self.run, dict(self.variables), shared)


def _step(
    key: str, what: str, run: Callable[[], object], variables: dict[str, Any], shared: dict[str, None] | None
) -> SetupStep:
    return SetupStep(key=key, what=what, run=run, variables=variables, shared=shared)


class SetupSteps:
    """The steps that this rank has run."""

    def __init__(self) -> None:
        self._done: set[str] = set()

    def inherit(self, steps: Iterable[SetupStep]) -> None:
        """Note what had run in the kernel when this rank was forked from it."""
        self._done |= {step.key for step in steps if step.shared is not None}

    def run(self, step: SetupStep) -> None:
        """Run a step, unless this rank has run it; raise what it raises, with a note that names the step."""
        vars(sys.modules["__main__"]).update(step.variables)
        if step.key in self._done:
            return
        try:
            step.run()
        except Exception as error:
            note = f"It was raised by {step.what}, which each rank runs before the function."
            # Not add_note(), which Python 3.10 lacks.
            error.__notes__ = [*getattr(error, "__notes__", ()), note]
            raise
        self._done.add(step.key)
