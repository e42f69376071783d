"""The part of a handle by which the user looks into a run and changes it: each method sends a command to its thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from notebook_launcher.archive.edits import check_edits
from notebook_launcher.errors import CallOrderError
from notebook_launcher.kernel.inspection.profile_requests import check_profile
from notebook_launcher.kernel.latch import AWAKE_EVERY
from notebook_launcher.kernel.no_update_yet import no_update_yet
from notebook_launcher.kernel.run.commands import ChangeCommand, ProfileCommand, SaveCommand, StacksCommand
from notebook_launcher.kernel.run.live_reader import LiveRunReader
from notebook_launcher.kernel.run.sampling import check_sampling, take_samples
from notebook_launcher.settings.changes import check_change, read_wanted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from notebook_launcher.kernel.inspection.profiles import Profile
    from notebook_launcher.kernel.inspection.samples import Samples
    from notebook_launcher.kernel.inspection.stacks import Stacks
    from notebook_launcher.kernel.run.commands import AskingCommand
    from notebook_launcher.kernel.run.thread import RunThread
    from notebook_launcher.messaging.messages import ChangeAction, ChangeSource
    from notebook_launcher.settings.changes import Wanted

__all__ = ["SteeringHandle"]

TOO_LATE = "the run has just ended: its ranks are gone. run.result() and run.logs(rank) have what it left."

T = TypeVar("T")


class SteeringHandle(LiveRunReader):
    """Reads a run of this process, looks into its ranks, and changes what they do.

    Args:
        thread: The run's thread, which takes commands.
    """

    def __init__(self, thread: RunThread) -> None:
        super().__init__(thread.data)
        self._thread = thread

    def edit(self, *, name: str | None = None, tags: Iterable[str] | None = None, notes: str | None = None) -> None:
        """Change the run's name, tags or notes, even after its end; None leaves each as it is.

        Raises:
            ConfigError: The name or a tag is not text.
            OSError: The run's folder cannot be written.
        """
        self._data.edits.change(check_edits(name, tags, notes))

    def stacks(self) -> Stacks:
        """Return the stack of each rank: function, file, line, and which rank is missing from a collective.

        Raises:
            CallOrderError: The run is over, so there are no stacks.
        """
        self._check_goes_on("its ranks are gone, and so are their stacks")
        return self._ask(StacksCommand())

    def sample(self, seconds: float = 5.0, *, rate: float = 20.0) -> Samples:
        """Sample the stacks of all ranks for a while, and return where their time went: a drawing in a cell.

        The ranks write their stacks at a signal, as for `stacks()`. Each sample stops a rank for less than a
        millisecond.

        Args:
            seconds: Duration, at most 60.
            rate: Samples per second, at most 100.

        Raises:
            ValueError: The duration or the rate cannot work.
            CallOrderError: The run is over, or ended meanwhile.
        """
        check_sampling(seconds, rate)
        self._check_goes_on("its ranks are gone, and so are their stacks")
        return take_samples(self._ask, self._data.over, seconds, rate)

    def profile(self, updates: int = 3, *, ranks: Sequence[int] = (0,)) -> Profile:
        """Profile some updates with `torch.profiler` during the training; wait for the result.

        The profile begins after an update, the same one on all chosen ranks, and lasts until `updates` further ones are
        made. It ends earlier if the function ends. In a cell the result is a table of the operators that took most
        time, with a link to the trace, which is a compressed Chrome trace in the run's folder. Profiled updates are
        slower.

        Args:
            updates: Number of updates, at most 100: a trace has a line for each operator that ran.
            ranks: The ranks to profile.

        Raises:
            ValueError: The number of updates cannot be, or no rank is chosen.
            NoSuchRankError: The run has no such rank.
            CallOrderError: The run is over, or ended meanwhile; no Accelerator has made an update in the run yet; a
                profile is under way already; or the function itself uses `torch.profiler` at the time.
        """
        chosen = check_profile(updates, ranks, self._data.plan.num_processes)
        self._check_goes_on("there is nothing left to profile")
        answer = self._ask(ProfileCommand(updates, chosen))
        if isinstance(answer, str):
            raise CallOrderError(answer)
        return answer

    def save(self) -> None:
        """Ask for a checkpoint: all ranks write it after the same update, and the training continues.

        The first Accelerator that made an update writes the checkpoint with `save_state`, when its loop asks for the
        next batch: to the next folder if `ProjectConfiguration(automatic_checkpoint_naming=True)`, else to
        `checkpoints/update_<number>` in its project folder, or in the working directory. A line in the cell names
        the folder. Trainers of transformers and Lightning write checkpoints of their own kind.

        Raises:
            CallOrderError: The run is over, or no Accelerator has made an update in the run yet.
        """
        self._check_goes_on("there is nothing left to save")
        if not self._ask(SaveCommand()):
            trainer = self._data.live.settings.trainer
            raise CallOrderError(no_update_yet("it cannot be saved", "or save in the function itself", trainer, "save"))

    def set(self, **settings: float | str | None) -> None:
        """Change settings during the training, on all ranks after the same update.

        `run.set(lr=1e-4)` gives a value, `run.set(lr="x0.5", max_grad_norm=1.0)` a factor and a value. The first
        Accelerator that made an update, or a trainer of transformers or Lightning, carries the change out before its
        next micro-batch. A line in the cell and `run.changes` show it.

        Args:
            settings: New values, or factors such as `"x0.5"`. `lr`: the learning rate of each prepared optimizer's
                first parameter group; other groups keep their ratios to it, and prepared schedulers their shape.
                `max_grad_norm`: a number, or None for no clipping. `gradient_accumulation_steps`: a whole number, from
                the next window on. All others: what the function offers by `tunable(...)`.

        Raises:
            ValueError: A setting is unknown, a value cannot work, or the trainer of another library cannot change it.
                Nothing is changed.
            CallOrderError: The run is over, or no Accelerator has made an update in the run yet.
        """
        if settings:
            self._change("set", {name: self._check_change(name, value) for name, value in settings.items()})

    def set_from_page(self, name: str, text: str) -> None:
        """Change one setting to the text that was typed into the monitor's field for it; errors as for `set`."""
        self._change("set", {name: self._check_change(name, read_wanted(text))}, "monitor")

    def pause(self) -> None:
        """Hold all ranks after the same update, until `run.resume()`; the time limit does not count meanwhile.

        Settings can be changed, and checkpoints written, while the ranks are held. `run.state` is `"paused"` then.

        Raises:
            CallOrderError: As for `set`.
        """
        self._change("pause", {})

    def resume(self) -> None:
        """Continue the training of a paused run.

        Raises:
            CallOrderError: As for `set`.
        """
        self._change("resume", {})

    def _change(self, action: ChangeAction, values: dict[str, Wanted], source: ChangeSource = "code") -> None:
        self._check_goes_on("there is nothing left to change")
        if not self._ask(ChangeCommand(action, values, source)):
            consequence, advice = "nothing can be changed", "and try again after the first update"
            raise CallOrderError(no_update_yet(consequence, advice, self._data.live.settings.trainer, "change"))

    def _check_change(self, name: str, wanted: object) -> Wanted:
        known = self._data.live.settings
        trainer = known.trainer.name if known.trainer is not None and known.trainer.settings else ""
        return check_change(name, wanted, known.tunables, known.of_accelerator, trainer)

    def _check_goes_on(self, consequence: str) -> None:
        if self._data.outcome is not None:
            raise CallOrderError(f"the run is over ({self.state}): {consequence}")

    def _ask(self, command: AskingCommand[T]) -> T:
        self._thread.command(command)
        while not (command.answer.wait(AWAKE_EVERY) or self._data.over.is_set):
            pass
        if command.answer.value is None:
            raise CallOrderError(TOO_LATE)
        return command.answer.value
