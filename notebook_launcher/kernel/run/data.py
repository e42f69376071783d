"""Run data: everything that is known of one run."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher.archive.recorded import write_edits
from notebook_launcher.history import run_folders
from notebook_launcher.kernel.display.output import RunOutput
from notebook_launcher.kernel.metering import GpuMeter, UsageMeter
from notebook_launcher.kernel.run.commands import CommandQueue
from notebook_launcher.kernel.run.live_values import LiveValues
from notebook_launcher.wording import one_line

if TYPE_CHECKING:
    from pathlib import Path

    from notebook_launcher.history.schema import RunKind
    from notebook_launcher.kernel.calls.call_scope import CallScope
    from notebook_launcher.kernel.hosting import Hosting
    from notebook_launcher.kernel.inspection.hangs import Hang
    from notebook_launcher.kernel.inspection.stacks import Stacks
    from notebook_launcher.kernel.latch import Latch
    from notebook_launcher.kernel.plan import Plan
    from notebook_launcher.kernel.run.attempt import Attempt
    from notebook_launcher.kernel.run.conclusion import RunOutcome


MAX_NOTICES = 200
"""Lines for the user of which a run keeps the first."""

# --------------------------------------------------------------------------------------------------------------------
# Name, tags and notes that the user gives a run in progress; its folder, once there is one, keeps them.


class RunEdits:
    """The edits of one run. Any thread may change them; the run's thread gives the folder."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, Any] = {}
        self._folder: Path | None = None

    def __getitem__(self, key: str) -> Any:
        """Return the edited name, tags or notes; None if they were not edited."""
        return self._values.get(key)

    def change(self, values: dict[str, Any]) -> None:
        """Add edits; raises `OSError` if the folder is there and cannot be written."""
        with self._lock:
            self._values = {**self._values, **values}
            if self._folder is not None:
                write_edits(self._folder, values)

    def keep_in(self, folder: Path) -> None:
        """Write the edits to the run's new folder, now and with each change; raises `OSError`."""
        with self._lock:
            self._folder = folder
            if self._values:
                write_edits(folder, self._values)


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class RunData:
    """Everything that is known of one run.

    A field that several modules write, or that changes together with others, is written by a method.

    The run's thread alone writes it, except `commands`, `edits` and the view's part of `output`. `Run`, snapshots,
    the line of progress and the conclusion read it, from any thread.
    """

    id: str
    """Name of the run among all runs: the time, the function, six random digits."""
    plan: Plan
    """The options, resolved against the machine."""
    scope: CallScope
    """The ranks that the call is for, its name and arguments in words, and how its run is shown."""
    kind: RunKind
    """Origin of the run: a launch, or a session."""
    launched: float
    """Time of the launch by `time.monotonic()`, from which durations are measured."""
    started: float
    """Time of the launch by `time.time()`, for people."""
    output: RunOutput
    """The ranks' output on its way to the cell."""
    live: LiveValues
    """Metrics, progress and phases that the ranks reported."""
    gpus: GpuMeter
    """Memory and utilization of the ranks' GPUs."""
    usage: UsageMeter
    """Memory and load of the ranks over time."""
    over: Latch[None]
    """Set when the run is over, after all other fields have their last values."""
    edits: RunEdits = dataclasses.field(default_factory=RunEdits)
    """Name, tags and notes that the user gave while it went on; any thread writes them."""
    commands: CommandQueue = dataclasses.field(default_factory=CommandQueue)
    """Commands of other threads to the run's thread."""
    attempt: Attempt | None = None
    """The present attempt at the call, with each rank's outcome; None before the first one."""
    restarts: int = 0
    """Number of times that all ranks were started again after a failure."""
    checkpoints: list[str] = dataclasses.field(default_factory=list)
    """Folders of the checkpoints that the ranks have saved, the newest last, if the run is to resume from them."""
    notices: list[str] = dataclasses.field(default_factory=list)
    """The first lines for the user that the ranks sent."""
    asking: set[int] = dataclasses.field(default_factory=set)
    """The ranks that wait for the user's input."""
    hang: Hang | None = None
    """The ranks that wait in a collective which others have not entered; None if there are none."""
    stacks: Stacks | None = None
    """The last stacks that were read in this attempt."""
    told: set[str] = dataclasses.field(default_factory=set)
    """Keys of lines that are shown once for all ranks, and were."""
    stopped_in: str = ""
    """Sentence about where the ranks were when the user stopped the run; empty if no rank waited in a collective."""
    outcome: RunOutcome | None = None
    """The results, and the exception of a failure; None until the run is over."""

    @classmethod
    def of_call(
        cls,
        plan: Plan,
        scope: CallScope,
        hosting: Hosting,
        over: Latch[None],
        *,
        in_session: bool,
        began: float | None = None,
    ) -> RunData:
        """Return the data of a run that began at this time, or begins now; `scope` as from `CallScope.describe`."""
        launched, started = time.monotonic(), time.time()
        if began is not None:
            launched, started = began, started - (launched - began)
        run_id = run_folders.new_id(scope.name, started)
        return cls(
            id=run_id,
            plan=plan,
            scope=scope,
            kind="run" if not in_session else "cell" if scope.is_brief else "call",
            launched=launched,
            started=started,
            output=RunOutput(
                hosting.sink,
                plan.config,
                plan.num_processes,
                kept_in=hosting.logs_at.format(id=run_id),
                displays=scope.displays,
                nodes=plan.node_names,
            ),
            live=LiveValues(launched, plan.num_processes),
            gpus=GpuMeter(plan.gpus),
            usage=UsageMeter(launched, plan.num_processes),
            over=over,
        )

    def is_new(self, key: str) -> bool:
        """Return True if no line with this key was shown, or the key is empty."""
        is_new = key not in self.told
        self.told |= {key} - {""}
        return is_new

    def note_notice(self, text: str) -> None:
        """Keep a line for the user, which views show."""
        if len(self.notices) < MAX_NOTICES:
            self.notices.append(one_line(text, 400))

    def note_checkpoint(self, folder: str) -> None:
        """Note that the ranks have saved a checkpoint, perhaps once more in the same folder."""
        self.checkpoints = [*(saved for saved in self.checkpoints if saved != folder), folder]

    @property
    def name(self) -> str:
        """Name of the function, or of what is called through it."""
        return self.scope.name

    @property
    def seconds(self) -> float:
        """The run's age; once it is over, its duration."""
        return self.outcome.results.seconds if self.outcome is not None else time.monotonic() - self.launched
