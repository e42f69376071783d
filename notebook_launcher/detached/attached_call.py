"""The handle on a call of a detached session."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from notebook_launcher.detached.attached_output import AttachedOutput
from notebook_launcher.detached.attached_run import AttachedRun
from notebook_launcher.detached.requests import TakeResults
from notebook_launcher.errors import CallOrderError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.history.schema import RunSnapshot
    from notebook_launcher.kernel.calls.call_scope import TakesDisplay
    from notebook_launcher.kernel.run.outcome import RunOutcome

__all__ = ["AttachedCall"]

NOTHING: dict[str, Any] = {
    "logs": "",
    "log_order": [],
    "metrics": (),
    "pictures": (),
    "metrics_since": ([], 0),
    "pictures_since": ([], 0),
}
"""Data of a call that left no folder, because its ranks wrote and reported nothing."""


class AttachedCall(AttachedRun):
    """A call that the host of a detached session conducts.

    Args:
        folder: The call's folder.
        config: The session's options.
        displays: Takes rich output that a cell on ranks shows at its end.
        failed: Called once the call is known to have failed.
    """

    def __init__(
        self,
        folder: Path,
        config: LaunchConfig,
        displays: TakesDisplay | None = None,
        failed: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(folder)
        self._failed = failed
        self._config = config
        self._displays = displays
        self._final: RunSnapshot | None = None
        """The last snapshot of a call whose folder the host has removed."""

    @property
    def config(self) -> LaunchConfig:
        """The options as given."""
        return self._config

    def _make_output(self, since: float | None) -> AttachedOutput:
        return AttachedOutput(self._folder, self._config, since, self._displays)

    def _opened(self) -> RunOutcome:
        is_first = self._outcome is None
        outcome = super()._opened()
        if is_first:
            if outcome.error is not None:
                self._failed()
            if self._ending is not None and self._ending.num_unopened(outcome):
                return outcome  # The folder stays, for a later try.
            # The host may be gone: then the folder stays.
            with contextlib.suppress(OSError, EOFError, CallOrderError):
                self._final = self._request(TakeResults())
                if self._final is not None:
                    outcome.results.folder = None
        return outcome

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._final is None:
            return super()._ask(method, *args, **kwargs)
        if method == "logs_since":
            return "", args[1]
        return self._final if method == "snapshot" else NOTHING[method]
