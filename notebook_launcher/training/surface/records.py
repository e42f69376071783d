"""What a training writes down: metrics, and profiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.training.plugins import ProfileKwargs
from notebook_launcher.training.recording.profiling import build_profiler

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from notebook_launcher.training.recording.trackers import Trackers

__all__ = ["RecordMethods"]


class RecordMethods:
    """Trackers and the profiler."""

    _trackers: Trackers
    profile_handler: ProfileKwargs | None

    @property
    def trackers(self) -> list[Any]:
        """The trackers that `init_trackers` started."""
        return self._trackers.trackers

    @property
    def log_with(self) -> list[Any]:
        """What `log_with` named."""
        return self._trackers.log_with

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Start the trackers that `log_with` names.

        Args:
            project_name: What the run is called.
            config: Hyperparameters to store with it.
            init_kwargs: Arguments for each tracker by its name.
        """
        self._trackers.init_trackers(project_name, config, init_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:  # noqa: FBT001, FBT002 - Accelerate's signature
        """Return a tracker by name (`unwrap`: what it wraps); one that does nothing off the main process."""
        return self._trackers.get_tracker(name, unwrap=unwrap)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Give metrics to all trackers, and to the launcher's live view, which wants them from every rank.

        The view also gets `learning_rate`, and `grad_norm` where gradients are clipped, unless they are among them.
        """
        self._trackers.log(values, step, log_kwargs or {})

    def end_training(self) -> None:
        """Finish all trackers. The process group stays: whoever made it ends it."""
        self._trackers.end_training()

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """Profile a block with `torch.profiler`, as `with accelerator.profile() as prof:`."""
        return build_profiler(profile_handler or self.profile_handler or ProfileKwargs())
