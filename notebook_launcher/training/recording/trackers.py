"""The trackers of an Accelerator: their choice by name, and logging to all of them."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from notebook_launcher import context, reporting
from notebook_launcher.training.recording.logged_values import Table
from notebook_launcher.training.recording.tracker_classes import (
    BlankTracker,
    GeneralTracker,
    JSONLinesTracker,
    TensorBoardTracker,
    as_number,
)
from notebook_launcher.training.recording.tracker_clients import CLIENT_TRACKERS
from notebook_launcher.training.user_warnings import warn_user
from notebook_launcher.wording import unknown

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from notebook_launcher.training.process.process_state import ProcessState

_OWN: tuple[type[GeneralTracker], ...] = (JSONLinesTracker, TensorBoardTracker, *CLIENT_TRACKERS)

TRACKER_CLASSES: dict[str, type[GeneralTracker]] = {tracker.name: tracker for tracker in _OWN}
"""Classes by the names that `log_with` finds. The process keeps them, because as in Accelerate
`register_tracker_class` is called before an Accelerator is made."""


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Let `log_with` find a tracker by its name, in this process; a rank registers in the function that it runs.

    A class of the same name is replaced, with a warning if this package has made that class.

    Raises:
        ValueError: The class is not a subclass of `GeneralTracker`, or lacks `name` or `requires_logging_directory`.
    """
    name = getattr(tracker_class, "name", None)
    is_tracker = isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)
    if not (is_tracker and name and hasattr(tracker_class, "requires_logging_directory")):
        raise ValueError(
            f"{tracker_class!r} cannot be registered: it must be a subclass of GeneralTracker that defines name and "
            "requires_logging_directory."
        )
    replaced = TRACKER_CLASSES.get(name)
    if replaced in _OWN and replaced is not tracker_class:
        warn_user(f"{tracker_class.__name__} replaces {replaced.__name__}: log_with={name!r} means it now.")
    TRACKER_CLASSES[name] = tracker_class


def filter_trackers(
    log_with: Any, logging_dir: str | os.PathLike[str] | None = None, *, skip_missing: bool = True
) -> list[type[GeneralTracker] | GeneralTracker]:
    """Return the trackers that `log_with` names, each once, in order.

    An entry is a name, a class or an instance; `"all"` stands for every class that is known and installed. With
    `skip_missing` a tracker whose client is not installed is left out with a warning, else it is an error.
    """
    entries = log_with if isinstance(log_with, (list, tuple, set)) else [] if log_with is None else [log_with]
    found: list[type[GeneralTracker] | GeneralTracker] = []
    for entry in entries:
        for tracker in _find(entry, skip_missing=skip_missing):
            if tracker not in found:
                found.append(tracker)
    for tracker in found:
        if isinstance(tracker, type) and tracker.requires_logging_directory and logging_dir is None:
            raise ValueError(
                f"log_with={log_with!r}: the tracker {tracker.name!r} writes to a folder, and there is none. "
                "Pass project_dir=, or ProjectConfiguration(logging_dir=...)."
            )
    return found


def _find(entry: Any, *, skip_missing: bool) -> list[type[GeneralTracker] | GeneralTracker]:
    if isinstance(entry, GeneralTracker) or (isinstance(entry, type) and issubclass(entry, GeneralTracker)):
        return [entry]
    name = str(entry).lower() if isinstance(entry, str) else None
    if name == "all":
        return [tracker for tracker in TRACKER_CLASSES.values() if _is_available(tracker)]
    tracker = TRACKER_CLASSES.get(name) or TRACKER_CLASSES.get(entry) if name is not None else None
    if tracker is None:
        more = (
            ", or a GeneralTracker: its class, an instance, or the name of a class that register_tracker_class() was "
            "given"
        )
        raise ValueError(unknown("log_with", entry, [*sorted(TRACKER_CLASSES), "all"], more=more))
    if not _is_available(tracker):
        missing = f"{tracker.name} is not installed. Type %pip install {tracker.name}"
        if not skip_missing:
            raise ModuleNotFoundError(f"log_with={entry!r}: {missing}, and then launch again.")
        warn_user(f"log_with={entry!r} is left out: {missing}")
        return []
    return [tracker]


def _is_available(tracker_class: type[GeneralTracker]) -> bool:
    is_available: Callable[[], bool] | None = getattr(tracker_class, "is_available", None)
    return is_available is None or is_available()


class Trackers:
    """The trackers of one Accelerator on one process.

    Args:
        process_state: The `ProcessState` of this process.
        log_with: See `filter_trackers`, also for `skip_missing`.
        logging_dir: The folder for trackers that require one.
        observe: Returns metrics that are added for the live run, such as the learning rate, unless the user logs them.
        skip_missing: As above.
    """

    def __init__(
        self,
        process_state: ProcessState,
        log_with: Any = None,
        logging_dir: str | os.PathLike[str] | None = None,
        *,
        observe: Callable[[], Mapping[str, Any]] = dict,
        skip_missing: bool = False,
    ) -> None:
        self.log_with = filter_trackers(log_with, logging_dir, skip_missing=skip_missing)
        """The classes and instances that `log_with` named."""
        self.trackers: list[GeneralTracker] = []
        """The trackers that run on this process, from `init_trackers` to `end_training`."""
        self._observe = observe
        self._is_main = process_state.is_main_process
        self._logging_dir = logging_dir

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start every tracker that runs on this process, after finishing the trackers that run already."""
        self.end_training()
        for named in self.log_with:
            if named.main_process_only and not self._is_main:
                continue
            tracker: Any = named
            if isinstance(named, type):
                place = [self._logging_dir] if named.requires_logging_directory else []
                tracker = tracker(project_name, *place, **(init_kwargs or {}).get(named.name, {}))
            tracker.start()
            self.trackers.append(tracker)
            if config is not None:
                tracker.store_init_configuration(config)

    def get_tracker(self, name: str, *, unwrap: bool = False) -> Any:
        """Return the tracker of this name, or with `unwrap` the object that it writes with.

        Where none runs, off the main process or without `log_with`, it is a `BlankTracker`.
        """
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if self.trackers and self._is_main:
            names = ", ".join(repr(tracker.name) for tracker in self.trackers)
            raise ValueError(f"get_tracker({name!r}): there is no such tracker. It can be {names}.")
        return BlankTracker()

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Log metrics to every tracker that runs on this process, and the numbers among them to the live run.

        Without a step, the live run takes the number of updates, and trackers count as they do by themselves.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"log({type(values).__name__}): pass metrics by name, such as {{'loss': loss}}.")
        step = None if step is None else _whole(step)
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))
        reporting.report_values(self._numbers(values) if context.current() else {}, step=step)

    def log_images(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log images to the trackers that take images, and to the live run."""
        if not isinstance(values, Mapping):
            raise TypeError(f"log_images({type(values).__name__}): pass images by name, such as {{'input': image}}.")
        step = None if step is None else _whole(step)
        listed = {
            name: list(images) if isinstance(images, (list, tuple)) else [images] for name, images in values.items()
        }
        named = {
            name if len(images) == 1 else f"{name}/{number}": image
            for name, images in listed.items()
            for number, image in enumerate(images)
        }
        pictures = reporting.encode_pictures(named)  # Checked before the first tracker.
        for tracker in self.trackers:
            if (log_images := getattr(tracker, "log_images", None)) is not None:
                log_images(_stacked(listed) if isinstance(tracker, TensorBoardTracker) else listed, step=step)
        reporting.report_pictures(pictures, step=step)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Log a table to the trackers that take tables, and on the main process to the live run."""
        table = Table.of(columns, data, dataframe)  # Checked on every rank, and before the first tracker.
        step = None if step is None else _whole(step)
        for tracker in self.trackers:
            if (log_table := getattr(tracker, "log_table", None)) is not None:
                log_table(table_name, columns=columns, data=data, dataframe=dataframe, step=step)
        if self._is_main and context.current() is not None:
            reporting.report_pictures({table_name: ("text/csv", table.to_bounded_csv())}, step=step)

    def _numbers(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Return the numbers that the run logs, the user's own first."""
        logged = {*values, *(["learning_rate"] if "lr" in values else [])}
        observed = {name: value for name, value in self._observe().items() if name not in logged}
        numbers = {name: as_number(value) for name, value in {**values, **observed}.items()}
        return {name: number for name, number in numbers.items() if number is not None}

    def end_training(self) -> None:
        """Finish the trackers, each even if another fails; idempotent."""
        trackers, self.trackers = self.trackers, []
        with contextlib.ExitStack() as stack:
            for tracker in reversed(trackers):
                stack.callback(tracker.finish)


def _stacked(images: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Return the images of each name as TensorBoard takes them: one array of shape (N, C, H, W)."""
    import numpy as np

    def planes(image: Any) -> Any:
        array = np.asarray(image.detach().cpu() if hasattr(image, "detach") else image)
        array = array[:, :, None] if array.ndim == 2 else array
        return array if array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4) else array.transpose(2, 0, 1)

    return {name: np.stack([planes(image) for image in several]) for name, several in images.items()}


def _whole(step: Any) -> int:
    try:
        return operator.index(step)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"log(step={step!r}): a step must be an integer. Pass int(step).") from error
