"""The thread of one run, which alone writes the run data."""

from __future__ import annotations

import contextlib
import errno
import threading
from typing import TYPE_CHECKING

from notebook_launcher.errors import ResourceError
from notebook_launcher.kernel.latch import can_hold_interrupts, held_interrupts
from notebook_launcher.wording import describe_process_limit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from notebook_launcher.kernel.display.questions import Question
    from notebook_launcher.kernel.run.commands import Command
    from notebook_launcher.kernel.run.conduct import RunConduct


FIRST_MOMENTS = 0.02
"""Seconds for which a thread that waits for a run carries it out by itself; meanwhile, interrupts are held back."""


class RunThread:
    """Has a run carried out in a thread of its own, and takes commands to that thread.

    Args:
        conduct: The run, which has not begun.
    """

    def __init__(self, conduct: RunConduct) -> None:
        self.data = conduct.data
        """All that is known of the run."""
        self._ranks = conduct.ranks
        self._conduct: RunConduct | None = conduct
        """The run that is to be carried out; None once it is over, which closes its files and frees the function."""
        self._claim = threading.Lock()
        """Held by the thread that carries the run out: `begin` may start another one after an interrupt."""
        self._thread: threading.Thread | None = None
        """The thread, once it runs."""

    def make_folder(self) -> Path:
        """Make the folder of a run that has not begun (`RunConduct.make_folder`); raises `OSError`."""
        assert self._conduct is not None
        return self._conduct.make_folder()

    def begin(self) -> None:
        """Start the run's thread; call it again after an interrupt, which may have prevented the start.

        Raises:
            ResourceError: There is no room for a thread. The ranks are gone.
        """
        if self._thread is not None or self.data.over.is_set:
            return
        try:
            _Thread(self).start()
        except RuntimeError as error:
            failure = _no_thread(error)
            self._give_up(failure)
            raise failure from error

    def begin_in_cell(self) -> None:
        """Begin the run for a thread that waits for it; may be called again after an interrupt, as `begin`.

        The waiting thread carries out by itself what ends within moments, because it would have to be woken: a call of
        a session takes 1.15 ms then, and 1.6 with a thread. A longer run goes on in its thread, and so does one that
        fails. If there is no room for a thread then, the run ends with that error.

        Raises:
            ResourceError: There is no room for a thread from the beginning. The ranks are gone.
        """
        if not (self._ranks.have_served and can_hold_interrupts()):
            self.begin()
            return
        with held_interrupts():
            if self._thread is not None:
                return
            with self._claimed() as conduct:
                if conduct is None or conduct.is_over_within(FIRST_MOMENTS):
                    return
            try:
                _Thread(self).start()
            except RuntimeError as error:
                self._give_up(_no_thread(error))

    def carry_out(self) -> None:
        """Carry out the run, or the rest of it, in this thread."""
        with self._claimed() as conduct:
            if conduct is not None:
                self._thread = threading.current_thread()
                conduct.carry_out()

    def _give_up(self, failure: ResourceError) -> None:
        with self._claimed() as conduct:
            if conduct is not None:
                conduct.give_up(failure)

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[RunConduct | None]:
        """Yield the run for this thread alone; None if it is over, or another thread carries it out."""
        if not self._claim.acquire(blocking=False):
            yield None
            return
        try:
            yield self._conduct
        finally:
            if self.data.over.is_set:
                self._conduct = None
            self._claim.release()

    def join(self) -> None:
        """Wait until the thread of a run that is over has ended, too."""
        if self._thread is not None:
            self._thread.join()

    def command(self, command: Command) -> None:
        """Send a command to the thread; from any thread. A command that comes after the end is refused."""
        self.data.commands.put(command)
        self._ranks.wake()

    def waits_for(self, question: Question) -> bool:
        """Return True if the rank that asked a question still waits for its answer."""
        attempt = self.data.attempt
        return attempt is not None and attempt.call_id == question.call_id and question.rank in self.data.asking


class _Thread(threading.Thread):
    """The thread of a run; it refers to the run only while the run goes on."""

    def __init__(self, subject: RunThread) -> None:
        super().__init__(name=f"notebook-launcher {subject.data.name}", daemon=True)
        self.subject: RunThread | None = subject

    def run(self) -> None:
        assert self.subject is not None
        try:
            self.subject.carry_out()
        finally:
            self.subject = None


def _no_thread(error: RuntimeError) -> ResourceError:
    """Return the error of a run whose thread could not be started."""
    return ResourceError(
        errno.EAGAIN,
        f"the run's thread could not be started: {error}. {describe_process_limit(for_threads=True)}",
    )


def live_threads() -> list[RunThread]:
    """Return the runs in progress in this process, in no order: the interpreter's list of threads has them."""
    threads = [thread for thread in threading.enumerate() if isinstance(thread, _Thread)]
    return [subject for thread in threads if (subject := thread.subject) is not None]
