"""The surface that all handles on runs share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from notebook_launcher.history.schema import RunReader

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from typing_extensions import Self

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.drawing.run_report import RunReport
    from notebook_launcher.history.schema import (
        RankPhases,
        RankSnapshot,
        RunChange,
        RunMetrics,
        RunPicture,
        RunState,
    )
    from notebook_launcher.kernel.inspection.profiles import Profile
    from notebook_launcher.kernel.inspection.samples import Samples
    from notebook_launcher.kernel.inspection.stacks import Stacks
    from notebook_launcher.kernel.results import Results

__all__ = ["AnyRun", "attributes_of_runs", "methods_of_runs", "still_running"]


class AnyRun(RunReader, Protocol):
    """A handle on a run, wherever its thread is: `Run` if it is in this process, `AttachedRun` if it is in a host.

    `Run` documents what each method does. Code that shows runs takes any of them.
    """

    @property
    def id(self) -> str:
        """Identifier of the run."""

    @property
    def name(self) -> str:
        """Name of the run: as edited, else as launched, else the function's name."""

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of the run."""

    @property
    def notes(self) -> str:
        """Notes that `edit` has written."""

    @property
    def config(self) -> LaunchConfig:
        """The options as given."""

    @property
    def state(self) -> RunState:
        """State of the run."""

    @property
    def seed(self) -> int | None:
        """The seed of the launch; None: its ranks began with the random states of the kernel."""

    @property
    def ranks(self) -> tuple[RankSnapshot, ...]:
        """Present state of each rank."""

    @property
    def metrics(self) -> RunMetrics:
        """Metrics that the ranks have reported so far."""

    @property
    def pictures(self) -> tuple[RunPicture, ...]:
        """Images and histograms that the ranks have reported so far."""

    @property
    def phases(self) -> dict[int, RankPhases]:
        """Time that each rank spent on each phase of training."""

    @property
    def changes(self) -> tuple[RunChange, ...]:
        """Settings that `set` has changed so far."""

    def logs(self, rank: int) -> str:
        """Return everything that a rank has written so far."""

    def report(self) -> RunReport:
        """Return what is known of the run in plain values."""

    def stacks(self) -> Stacks:
        """Return the stack of each rank."""

    def sample(self, seconds: float = 5.0, *, rate: float = 20.0) -> Samples:
        """Sample the stacks of all ranks for a while."""

    def profile(self, updates: int = 3, *, ranks: Sequence[int] = (0,)) -> Profile:
        """Profile some updates with `torch.profiler`."""

    def edit(self, *, name: str | None = None, tags: Iterable[str] | None = None, notes: str | None = None) -> None:
        """Change the run's name, tags or notes."""

    def set(self, **settings: float | str | None) -> None:
        """Change settings during the training."""

    def set_from_page(self, name: str, text: str) -> None:
        """Change one setting to the text that was typed into the monitor."""

    def save(self) -> None:
        """Ask for a checkpoint."""

    def pause(self) -> None:
        """Hold all ranks after the same update."""

    def resume(self) -> None:
        """Continue the training of a paused run."""

    def stop(self, *, wait: bool = True, at_once: bool = False, after_step: bool = False) -> str | None:
        """Stop the run; return the last rung that was needed."""

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call `callback(run)` in a thread once the run is over."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the run is over; return True if it is."""

    def wait_in_cell(self) -> Results:
        """Wait in the main thread, show the run, and return its results."""

    def result(self, timeout: float | None = None) -> Results:
        """Wait for the results and return them; raises the exception with which the run failed."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the run and return the exception with which it failed."""

    def __await__(self) -> Generator[Any, None, Results]:
        """Wait for the results in an event loop."""


def methods_of_runs() -> frozenset[str]:
    """Return the names of the methods that all handles on runs have."""
    return frozenset(name for name, member in _surface().items() if not isinstance(member, property))


def attributes_of_runs() -> frozenset[str]:
    """Return the names of the attributes that all handles on runs have."""
    return frozenset(name for name, member in _surface().items() if isinstance(member, property))


def _surface() -> dict[str, object]:
    members = {**vars(RunReader), **vars(AnyRun)}
    return {name: member for name, member in members.items() if not name.startswith("_")}


def still_running(run: AnyRun, timeout: float | None) -> TimeoutError:
    """Return the error of a wait that ended before its run."""
    return TimeoutError(
        f"the run is still running after {timeout:g} s ({run.id}): only the wait for it is over. Call result() without "
        "a timeout to wait until its end, stacks() to see what its ranks do, or stop() to end it."
    )
