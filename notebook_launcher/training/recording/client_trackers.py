"""The base of trackers that write by another service's own client, which is imported where the tracker starts."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from notebook_launcher.training.recording.tracker_classes import GeneralTracker, as_number

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ClientTracker", "is_installed", "numbers_of", "plain_values"]


class ClientTracker(GeneralTracker):
    """A tracker with the client of a service; it runs on the main process alone.

    Args:
        run_name: The project's name.
        kwargs: Arguments of the function with which the client begins a run (`init_kwargs` of `init_trackers`).
    """

    name: str
    requires_logging_directory = False
    module: str
    """The client's module."""
    distribution: str
    """The name to install it by."""

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None
        """The client's own object for the run; None before `start`."""

    @classmethod
    def is_available(cls) -> bool:
        """Return True if the client is installed; it is not imported."""
        return is_installed(cls.module)

    @classmethod
    def client(cls) -> Any:
        """Return the client's module.

        Raises:
            ModuleNotFoundError: The client is not installed.
        """
        if not cls.is_available():
            raise ModuleNotFoundError(
                f"The tracker {cls.name!r} needs the package {cls.distribution}, which is not installed. "
                f"Type %pip install {cls.distribution}"
            )
        return importlib.import_module(cls.module)

    @property
    def tracker(self) -> Any:
        """The client's own object for the run; None before `start`."""
        return self.run

    def finish(self) -> None:
        """End the run, so that the client keeps nothing open; idempotent."""
        run, self.run = self.run, None
        if run is not None:
            self._end(run)

    def _end(self, run: Any) -> None:
        raise NotImplementedError


def is_installed(module: str) -> bool:
    """Return True if a top-level module can be imported; it is not imported."""
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with each tensor or array of one element as its number; others stay as they are."""
    return {name: _plain(value) for name, value in values.items()}


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are numbers, for clients that take nothing else."""
    found = {name: as_number(value) for name, value in values.items()}
    return {name: number for name, number in found.items() if number is not None}


def _plain(value: Any) -> Any:
    number = as_number(value) if callable(getattr(value, "item", None)) else None
    return value if number is None else number
