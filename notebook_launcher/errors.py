"""Every error the package raises, split by who is to blame.

* LaunchError
    yours: the call, or the order of calls
      - ConfigError (also a ValueError)       an option, a function or an argument that cannot work
      - CaptureError (also a TypeError)       something the function captured cannot travel to a rank
      - CallOrderError (also a RuntimeError)  a launch inside a rank, a run on a closed session
      - RunStoppedError                       the result of a run that `run.stop()` ended
    the machine's
      - ResourceError (also an OSError)       no memory, process or descriptor left; a rank cannot start
    a rank's
      - RankFailedError (also a RuntimeError) a signal, an exit code, `sys.exit`, a dead supervisor
          . RunTimeoutError (a TimeoutError)  the run outlived `timeout`
      - ReturnValueError (also a TypeError)   a rank returned something that cannot travel
      - MissingResultError (a LookupError)    asked for the result of a rank that gave none
    ours
      - InternalError                         a fault of this package: please report it

A Python exception that a rank raised is not wrapped: the cell gets the original type, with the
attributes `rank`, `failures` and `results` added to it, and a `RemoteTraceback` as its cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher import tracebacks

if TYPE_CHECKING:
    from notebook_launcher.kernel.results import Results
    from notebook_launcher.messages import Failure

__all__ = [
    "CallOrderError",
    "CaptureError",
    "ConfigError",
    "InternalError",
    "LaunchError",
    "MissingResultError",
    "RankFailedError",
    "RemoteTraceback",
    "ResourceError",
    "ReturnValueError",
    "RunStoppedError",
    "RunTimeoutError",
]


class LaunchError(Exception):
    """Base of all errors of this package."""

    rank: int | None = None
    """The rank that is to blame, if one is."""
    failures: tuple[Failure, ...] = ()
    """What is known of every rank that failed, the culprit first."""
    results: Results | None = None
    """What the ranks returned before the run failed."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the user's frames, without those of this package."""
        return tracebacks.render(self)


class ConfigError(LaunchError, ValueError):
    """An option, a function or an argument that cannot work; nothing was started."""

    field: str | None = None
    """Name of the `LaunchConfig` field that cannot work; None if the error is about something else."""

    def __init__(self, *args: object, field: str | None = None) -> None:
        super().__init__(*args)
        if field is not None:
            self.field = field


class CaptureError(LaunchError, TypeError):
    """Something that the function captured cannot travel to a rank; nothing was started."""


class CallOrderError(LaunchError, RuntimeError):
    """A call at a moment when it cannot be answered."""


class RunStoppedError(LaunchError):
    """The run was stopped before every rank had returned."""


class ResourceError(LaunchError, OSError):
    """The machine has no memory, process or descriptor left for what was asked."""


class RankFailedError(LaunchError, RuntimeError):
    """A rank ended without a Python exception: by a signal, an exit code or `sys.exit`."""

    exitcode: int | None = None
    """The exit code as `multiprocessing` writes it: negative for a signal; None if it had not ended."""


class RunTimeoutError(RankFailedError, TimeoutError):
    """The run outlived its `timeout` and was stopped."""


class ReturnValueError(LaunchError, TypeError):
    """A rank returned something that cannot travel back."""


class MissingResultError(LaunchError, LookupError):
    """The result of a rank that gave none."""


class InternalError(LaunchError):
    """A fault of this package, not of the caller's code."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: everything, since a report needs the frames of this package."""
        return tracebacks.render(self, whole=True)


class RemoteTraceback(Exception):  # noqa: N818 - not an error of its own: the cause of one
    """The traceback of a rank, as the cause of the exception that the kernel raises."""
