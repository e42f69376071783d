"""What other threads ask of a run's thread, and what that asks of ranks that train."""

from __future__ import annotations

import dataclasses
import math
import queue
import time
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

from notebook_launcher.kernel.display.questions import Answer
from notebook_launcher.kernel.latch import Latch
from notebook_launcher.messaging import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from notebook_launcher.engines.engine import Tree
    from notebook_launcher.kernel.run.attempt import Attempt
    from notebook_launcher.kernel.run.conduct import RunConduct
    from notebook_launcher.messaging.messages import ChangeAction, ChangeSource, TrainerMade
    from notebook_launcher.settings.changes import Wanted


T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class StopCommand:
    """Stop the run."""

    at_once: bool = False
    """True to kill the ranks without asking them first."""
    after_step: bool = False
    """True to ask only: the ranks stop at their next step boundary, however long their present step takes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Inquiry(Generic[T]):
    """Work for the run's thread, whose sender waits for the result."""

    work: Callable[[RunConduct, Attempt], T]
    answer: Latch[T] = dataclasses.field(default_factory=Latch)
    """Set by the run's thread; to None if the run is over."""


Command: TypeAlias = StopCommand | Inquiry[Any] | Answer


class CommandQueue:
    """The commands that a run's thread has not carried out yet; any thread may add a command."""

    def __init__(self) -> None:
        self.stop_asked_at = math.inf
        """Time of the first stop, by `time.monotonic()`; infinite if none was asked for."""
        self.kill_asked_at = math.inf
        """Time of the first stop that asked to kill the ranks without asking them first; infinite if none did."""
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()

    @property
    def asked_to_stop(self) -> bool:
        """True once a stop was asked for, even before the run's thread has seen the command."""
        return math.isfinite(self.stop_asked_at)

    def put(self, command: Command) -> None:
        """Add a command; from any thread."""
        if isinstance(command, StopCommand):
            self.stop_asked_at = min(self.stop_asked_at, time.monotonic())
            if command.at_once:
                self.kill_asked_at = min(self.kill_asked_at, time.monotonic())
        self._queue.put(command)

    def take_all(self) -> Iterator[Command]:
        """Yield and remove the commands that are there; from the run's thread."""
        while not self._queue.empty():
            yield self._queue.get()

    def refuse_all(self) -> None:
        """Remove the commands that are there, and release the threads that wait for an answer; the run is over."""
        for command in self.take_all():
            if isinstance(command, Inquiry):
                command.answer.set(None)


# --------------------------------------------------------------------------------------------------------------------
# Requests of the run's thread to ranks that train: to stop, to save, to change settings, each at their next step.


class RankRequests:
    """The requests of one attempt; the ranks find them on the board, and changes in their channels."""

    def __init__(self, tree: Tree, clock: Callable[[], float] = time.monotonic) -> None:
        self._tree = tree
        self._clock = clock
        self.stop_asked_at: float | None = None
        """Time at which the ranks were first asked to stop after their step, by `clock`."""
        self.paused_after: int | None = None
        """Number of updates after which all ranks are held; None while they train."""
        self._num_changes = 0
        """Number of the last change that was sent."""

    def can_ask(self, ranks: Iterable[int]) -> bool:
        """Return True if one of these ranks looks at the stop flag."""
        return any(self._tree.board.is_read_by(rank) for rank in ranks)

    def ask_to_stop(self, ranks: Iterable[int]) -> bool:
        """Ask the ranks to stop after their present step; return True if one of `ranks` looks at the stop flag."""
        if not self.can_ask(ranks):
            return False
        if self.paused_after is not None:
            self.stop_asked_at = self._clock()
            return self.ask_to_change("stop")
        if self.stop_asked_at is None:  # Set before the flag, so that a rank that ends because of the flag ends later.
            self.stop_asked_at = self._clock()
        self._tree.board.ask_to_stop(together=True)
        return True

    def ask_to_save(self) -> bool:
        """Ask the ranks for a checkpoint; return True if an Accelerator will write it."""
        if self.paused_after is not None:
            return self.ask_to_change("save")
        self._tree.board.ask_to_save()
        return self._tree.board.has_safepoint

    def ask_to_change(
        self,
        action: ChangeAction,
        values: dict[str, Wanted] | None = None,
        source: ChangeSource = "code",
        profile: messages.ProfileOrder | None = None,
    ) -> bool:
        """Ask the ranks to do something after the same update; return True if an Accelerator will do it."""
        if not self._tree.board.has_safepoint:
            return False
        self._num_changes += 1
        change = messages.Change(
            number=self._num_changes, action=action, values=values or {}, source=source, profile=profile
        )
        self._tree.send_all(change)
        # Written last: a rank that sees the number finds the change in its channel.
        self._tree.board.announce_change(self._num_changes)
        return True

    def note_change(self, changed: messages.Changed) -> bool:
        """Note that a change was carried out; return True if it paused or resumed the ranks."""
        if changed.action not in ("pause", "resume"):
            return False
        self.paused_after = changed.update if changed.action == "pause" else None
        return True


# --------------------------------------------------------------------------------------------------------------------
# Words for a request that only an Accelerator carries out, in a run that has none at work yet.


OTHERS: dict[str, tuple[str, str]] = {
    "Hugging Face's Accelerator": (
        "write accelerator.save_state(folder) in the loop",
        "write `from notebook_launcher.compat import Accelerator` in the function, which keeps its numbers",
    ),
    "transformers' Trainer": (
        'write TrainingArguments(save_strategy="steps", save_steps=100)',
        "change it in a TrainerCallback; or call run.stop(), and go on with trainer.train(resume_from_checkpoint=True)",
    ),
    "Lightning's Trainer": (
        "write Trainer(callbacks=[ModelCheckpoint(every_n_train_steps=100)])",
        'change it in a Callback; or call run.stop(), and go on with trainer.fit(model, ckpt_path="last")',
    ),
    "Lightning's Fabric": (
        "write fabric.save(path, state) in the loop",
        "change it in the loop; or call run.stop(), and go on from a file of fabric.save(path, state)",
    ),
}
"""By the trainer of another library: how it saves, and what works in the place of `run.set` and `run.pause`."""


def no_update_yet(
    consequence: str, advice: str, trainer: TrainerMade | None = None, asks: Literal["save", "change", ""] = ""
) -> str:
    """Return why the request cannot be carried out.

    `consequence`: clause that names what cannot be done, such as `it cannot be saved`. `advice`: another way, or when
    to try again. `trainer`: the one of another library that the function has made; what it `asks` decides on advice.
    """
    if trainer is not None and trainer.answers:
        return f"{trainer.name} has made no update in this run yet, so {consequence}. Try again after the first one."
    if trainer is not None:
        instead = ""
        if trainer.name in OTHERS and asks:
            instead = f" Instead, {OTHERS[trainer.name][asks == 'change']}."
        return (
            f"no Accelerator of notebook_launcher has made an update in this run, so {consequence}: {trainer.name} "
            f"makes the updates here, and it takes no requests from the notebook.{instead} run.stop(), run.stacks() "
            "and run.sample(seconds) work with any function."
        )
    return (
        f"no Accelerator has made an update in this run yet, so {consequence}. Prepare the model and the optimizer "
        "before the loop, `accelerator = Accelerator()` and `model, optimizer = accelerator.prepare(model, "
        f"optimizer)`, write `accelerator.backward(loss)` for `loss.backward()` in it, {advice}."
    )
