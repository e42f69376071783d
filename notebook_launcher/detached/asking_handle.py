"""The part of a handle on a detached run that asks the host: what the run is, and what it shall do."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from notebook_launcher.archive.recorded import RecordedRun
from notebook_launcher.detached.host_socket import HostConnection, HostSilentError
from notebook_launcher.detached.requests import Ask
from notebook_launcher.errors import CallOrderError
from notebook_launcher.history.schema import RunMetrics, RunReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.drawing.run_report import RunReport
    from notebook_launcher.history.schema import (
        MetricPoint,
        RankPhases,
        RankSnapshot,
        RunChange,
        RunPicture,
        RunSnapshot,
        RunState,
    )
    from notebook_launcher.kernel.inspection.profiles import Profile
    from notebook_launcher.kernel.inspection.samples import Samples
    from notebook_launcher.kernel.inspection.stacks import Stacks

__all__ = ["AskingHandle"]


class AskingHandle(RunReader):
    """Reads and changes a run that its host conducts; after the end of the run its folder answers.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._recorded = RecordedRun(folder)

    @property
    def id(self) -> str:
        """Identifier of the run: the time, the function, six random digits."""
        return self._folder.name

    @property
    def folder(self) -> Path:
        """Folder of the run, which keeps its output, curves and results."""
        return self._folder

    @property
    def name(self) -> str:
        """Name of the run: as edited, else as launched, else the function's name."""
        return self.snapshot().name

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of the run: as edited, else as launched."""
        return self._recorded.tags

    @property
    def notes(self) -> str:
        """Notes that `edit` has written; empty if there are none."""
        return self._recorded.notes

    def edit(self, *, name: str | None = None, tags: Iterable[str] | None = None, notes: str | None = None) -> None:
        """Change the run's name, tags or notes, as `Run.edit`."""
        self._ask("edit", name=name, tags=None if tags is None else list(tags), notes=notes)

    @property
    def config(self) -> LaunchConfig:
        """The options as given."""
        answer: LaunchConfig = self._ask("config")
        return answer

    @property
    def state(self) -> RunState:
        """State of the run, as `Run.state`; `"lost"`: its host died, and the ranks with it."""
        return self.snapshot().state

    @property
    def seed(self) -> int | None:
        """The seed of the launch; None: its ranks began with the random states of the kernel."""
        return self.snapshot().seed

    @property
    def ranks(self) -> tuple[RankSnapshot, ...]:
        """Present state of each rank."""
        return self.snapshot().ranks

    def snapshot(self) -> RunSnapshot:
        """Return everything that is known of the run at this moment, as plain data."""
        answer: RunSnapshot = self._ask("snapshot")
        return answer

    @property
    def metrics(self) -> RunMetrics:
        """Metrics that the ranks have reported so far, in the order of arrival."""
        return RunMetrics(self._ask("metrics"))

    def report(self) -> RunReport:
        """Return what is known of the run in plain values, as `Run.report`."""
        from notebook_launcher.drawing.run_report import report_on

        return report_on(self)

    def metrics_since(self, position: int) -> tuple[list[MetricPoint], int]:
        """Return the metrics reported after a position, and the next position; start with 0."""
        answer: tuple[list[MetricPoint], int] = self._ask("metrics_since", position)
        return answer

    @property
    def pictures(self) -> tuple[RunPicture, ...]:
        """Images and histograms that the ranks have reported so far, in the order of arrival."""
        answer: tuple[RunPicture, ...] = self._ask("pictures")
        return answer

    def pictures_since(self, position: int) -> tuple[list[RunPicture], int]:
        """Return the pictures reported after a position, and the next position; start with 0."""
        answer: tuple[list[RunPicture], int] = self._ask("pictures_since", position)
        return answer

    @property
    def phases(self) -> dict[int, RankPhases]:
        """Time that each rank spent on each phase of training, as reported by its Accelerator."""
        return dict(self.snapshot().phases)

    @property
    def changes(self) -> tuple[RunChange, ...]:
        """Settings that `set` has changed so far: name, values before and after, and the update."""
        return self.snapshot().changes

    def logs(self, rank: int) -> str:
        """Return everything that a rank has written to standard output and standard error so far."""
        answer: str = self._ask("logs", rank)
        return answer

    def logs_since(self, rank: int, position: int) -> tuple[str, int]:
        """Return the text that a rank wrote after a position, and the next position; start with 0."""
        answer: tuple[str, int] = self._ask("logs_since", rank, position)
        return answer

    def log_order(self, num_pieces: int) -> list[tuple[int, int]]:
        """Return the rank and the end of the newest pieces of output of all ranks, in the order of their arrival."""
        answer: list[tuple[int, int]] = self._ask("log_order", num_pieces)
        return answer

    def stacks(self) -> Stacks:
        """Return the stack of each rank, as `Run.stacks`."""
        answer: Stacks = self._command("stacks")
        return answer

    def sample(self, seconds: float = 5.0, *, rate: float = 20.0) -> Samples:
        """Sample the stacks of all ranks for a while, as `Run.sample`."""
        answer: Samples = self._command("sample", seconds, rate=rate)
        return answer

    def profile(self, updates: int = 3, *, ranks: Sequence[int] = (0,)) -> Profile:
        """Profile some updates with `torch.profiler`, as `Run.profile`."""
        answer: Profile = self._command("profile", updates, ranks=tuple(ranks))
        return answer

    def save(self) -> None:
        """Ask for a checkpoint, as `Run.save`."""
        self._command("save")

    def set(self, **settings: float | str | None) -> None:
        """Change settings during the training, as `Run.set`."""
        self._command("set", **settings)

    def set_from_page(self, name: str, text: str) -> None:
        """Change one setting to the text that was typed into the monitor's field for it, as `Run.set_from_page`."""
        self._command("set_from_page", name, text)

    def pause(self) -> None:
        """Hold all ranks after the same update, until `run.resume()`, as `Run.pause`."""
        self._command("pause")

    def resume(self) -> None:
        """Continue the training of a paused run."""
        self._command("resume")

    def check_protocol(self) -> None:
        """Raise `CallOrderError` if the host speaks another protocol, and `TimeoutError` if it does not answer."""
        try:
            HostConnection(self._folder).close()
        except HostSilentError:
            raise
        except OSError:  # There is none any more.
            pass

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Ask the host, or the folder where there is no host any more."""
        try:
            return self._call(method, *args, **kwargs)
        except (OSError, EOFError):
            value = getattr(self._recorded, method)
            return value(*args, **kwargs) if callable(value) else value

    def _command(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._call(method, *args, **kwargs)
        except HostSilentError:
            raise
        except OSError:
            raise CallOrderError(
                f"the run is over ({self._recorded.state}): its ranks are gone. run.result() and run.logs(rank) have "
                "what it left."
            ) from None

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._request(Ask(name=method, args=args, kwargs=kwargs))

    def _request(self, record: object) -> Any:
        # A connection for each call, so that an interrupt in the middle of an answer spoils nothing: 1 ms.
        with contextlib.closing(HostConnection(self._folder)) as connection:
            return connection.request(record)
