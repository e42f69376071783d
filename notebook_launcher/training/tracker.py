"""What a tracker is: a place that a training writes its metrics to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BlankTracker", "GeneralTracker", "as_number"]


class GeneralTracker:
    """Base of all trackers, by Accelerate's names; a subclass defines `name`, `requires_logging_directory`, `tracker`.

    It is made with the project's name, then the logging folder if it requires one, then its own arguments.
    Everything that costs something belongs in `start`, which runs only where the tracker is used.

    Raises:
        NotImplementedError: The subclass lacks one of the three.
    """

    name: str
    """What `log_with` and `get_tracker` call it."""
    requires_logging_directory: bool
    """Whether it is made with a folder."""
    main_process_only: bool = True
    """Whether it runs on the main process alone; False: on every process."""

    def __init__(self) -> None:
        missing = [name for name in ("name", "requires_logging_directory") if not hasattr(self, name)]
        missing += ["tracker"] if type(self).tracker is GeneralTracker.tracker else []
        if missing:
            raise NotImplementedError(f"{type(self).__name__} lacks {', '.join(missing)}: a tracker must define them.")

    @property
    def tracker(self) -> Any:
        """What it writes with: a writer, a client, a file."""
        raise NotImplementedError(f"{type(self).__name__} lacks tracker: a tracker must define it.")

    def start(self) -> None:
        """Open what it writes to."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the run's hyperparameters."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write metrics; `kwargs` are what `Accelerator.log(log_kwargs=...)` has for this tracker."""

    def finish(self) -> None:
        """Close what `start` opened."""


class BlankTracker(GeneralTracker):
    """Does nothing, whatever it is told: what `get_tracker` gives where the tracker does not run."""

    name = "blank"
    requires_logging_directory = False

    @property
    def tracker(self) -> BlankTracker:
        """Itself."""
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):  # What copying, pickling and displaying look for.
            raise AttributeError(name)
        return _do_nothing


def as_number(value: Any) -> float | None:
    """Return one number as a float, be it a tensor or an array of one element; None if it is none."""
    if isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        return float(value.item() if callable(getattr(value, "item", None)) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _do_nothing(*_: Any, **__: Any) -> None:
    pass
