"""The errors that the package raises, grouped by their cause.

* LaunchError
    your code: the call, or the order of calls
      - ConfigError (also a ValueError)       an option, a function or an argument that cannot work
      - CaptureError (also a TypeError)       an object that the function captured cannot travel to a rank
      - CallOrderError (also a RuntimeError)  a launch inside a rank, a run on a closed session
      - NoSuchRankError (also a LookupError)  a rank that the run or session does not have
      - RunStoppedError                       the result of a run that `run.stop()` ended
    the machine
      - ResourceError (also an OSError)       no memory, process or descriptor left; a rank cannot start
      - RunFolderError (also an OSError)      a run's folder that is damaged, or not the user's own
    a rank
      - RankFailedError (also a RuntimeError) a signal, an exit code, `sys.exit`, a dead supervisor
          . RunTimeoutError (a TimeoutError)  the run exceeded `timeout` or `idle_timeout`
          . NodeLostError                     a machine of a cluster, or the connection to it, is gone
      - ReturnValueError (also a TypeError)   the requested rank's value could not travel
      - MissingResultError (a LookupError)    the requested rank returned no value
    this package
      - InternalError                         a fault of this package: please report it

A Python exception that a rank raised is not wrapped: the cell gets the original type, with the attributes
`rank`, `failures` and `results` added, and a `RemoteTraceback` as its cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher import tracebacks
from notebook_launcher.wording import no_such_rank

if TYPE_CHECKING:
    from notebook_launcher.kernel.failures.culprit import Failure
    from notebook_launcher.kernel.results import Results


class LaunchError(Exception):
    """The base class of all errors of this package."""

    rank: int | None = None
    """The culprit: the rank that failed first; None if no rank is to blame."""
    failures: tuple[Failure, ...] = ()
    """The failure of each rank that failed, the culprit first."""
    results: Results | None = None
    """The values that ranks returned before the run failed."""

    def _render_traceback_(self) -> list[str]:
        """Return the traceback that IPython shows: the user's frames, without the frames of this package."""
        return tracebacks.render(self)


class ConfigError(LaunchError, ValueError):
    """An option, a function or an argument that cannot work; nothing was started."""

    field: str | None = None
    """Name of the `LaunchConfig` field that cannot work; None if the error is about something else."""
    nodes: tuple[int, ...] = ()
    """Numbers of the engine's nodes that do not come up; empty if the error is about something else."""

    def __init__(self, *args: object, field: str | None = None) -> None:
        super().__init__(*args)
        if field is not None:
            self.field = field


class CaptureError(LaunchError, TypeError):
    """An object that the function captured and that cannot travel to a rank; nothing was started."""


class CallOrderError(LaunchError, RuntimeError):
    """A call in a state that does not allow it, such as a run on a closed session."""


class NoSuchRankError(ConfigError, CallOrderError, LookupError):
    """The number of a rank that the run or session does not have.

    It has several bases because calls that take a rank used to raise one of these each: they still catch it.
    """


def check_rank(rank: int, num: int, whose: str = "run", *, typed: str = "") -> int:
    """Return a rank; raise `NoSuchRankError` if it is not one of them.

    Args:
        rank: The rank as the user named it.
        num: Number of ranks.
        whose: Word for what has the ranks: run or session.
        typed: The argument as typed, with which the message begins: `ranks=[0, 7]`.
    """
    if isinstance(rank, bool) or rank not in range(num):
        words = f"{typed}: {no_such_rank(rank, num, whose)}." if typed else f"{no_such_rank(rank, num, whose)}."
        raise tracebacks.for_caller(NoSuchRankError(words))
    return rank


class RunStoppedError(LaunchError):
    """A run that was stopped before every rank had returned."""


class ResourceError(LaunchError, OSError):
    """A lack of memory, processes or descriptors on the machine."""


class RunFolderError(LaunchError, OSError):
    """A run's folder that cannot be read: a file in it is damaged or of another version, or not the user's own."""


class RankFailedError(LaunchError, RuntimeError):
    """The end of a rank without an exception of its own: by a signal, an exit code or `sys.exit`.

    Also the error of a rank that waited in a collective for ranks that had returned.
    """

    exitcode: int | None = None
    """The exit code as in `multiprocessing`: negative for a signal; None if the rank had not exited."""


class RunTimeoutError(RankFailedError, TimeoutError):
    """A run that exceeded its `timeout` or `idle_timeout` and was stopped."""


class NodeLostError(RankFailedError):
    """The loss of a machine on which ranks ran, or of the connection to it."""


class ReturnValueError(LaunchError, TypeError):
    """A request for the value of a rank that could not travel to the notebook; the run itself has succeeded."""


class MissingResultError(LaunchError, LookupError):
    """A request for the result of a rank that returned no value."""


class InternalError(LaunchError):
    """A fault of this package, not of the caller's code."""

    def _render_traceback_(self) -> list[str]:
        """Return the traceback that IPython shows: all frames, because a bug report needs this package's frames."""
        return tracebacks.render(self, whole=True)


class RemoteTraceback(Exception):  # noqa: N818 - not an error of its own, but the cause of an error
    """The traceback of a rank, as the cause of the exception that the kernel raises."""
