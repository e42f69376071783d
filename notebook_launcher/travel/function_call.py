"""The function that a run calls, with its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.travel.setup_steps import SetupStep

__all__ = ["FunctionCall"]


class FunctionCall(NamedTuple):
    """A function and its arguments, as the user gave them to a launch."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    steps: tuple[SetupStep, ...] = ()
    """Code that each rank runs before it unpacks the rest."""
