"""The tree of processes that serves a launch, as the kernel sees it wherever the processes are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from notebook_launcher.engines.board import Board, Pulse
    from notebook_launcher.engines.engine import Event
    from notebook_launcher.messaging import messages


class RankStacks(Protocol):
    """The stacks of a tree's ranks, which each rank writes into a file at a signal."""

    def dump(self, ranks: Iterable[int] | None = None) -> dict[int, str]:
        """Return the stacks of all threads of these ranks, or of every live rank, as `faulthandler` writes them."""

    def sizes(self) -> dict[int, int]:
        """Return the number of bytes that each rank that is up has written into its file."""

    def request(self) -> None:
        """Have every rank that is up write its stacks, without waiting for them."""

    def read(self, starts: Mapping[int, int]) -> dict[int, str]:
        """Return what ranks have written into their files after these positions."""


class Tree(Protocol):
    """Ranks, and what started them: carries records in both directions and turns everything that arrives into events.

    A tree is mechanism only: `kernel/` decides what the events mean, and does not know which tree it has.
    """

    board: Board
    """Requests to the ranks, and the states that they report."""

    @property
    def setup(self) -> messages.Setup:
        """The settings of all ranks."""

    @property
    def stacks(self) -> RankStacks:
        """The files into which the ranks write their stacks."""

    @property
    def pids(self) -> dict[int, int]:
        """The process number of each rank that lives, on its own machine."""

    def send(self, rank: int, record: object) -> None:
        """Send a record to a rank. No error is raised for a rank that is gone, because its exit is an event."""

    def send_all(self, record: object, fds: Sequence[int] = ()) -> None:
        """Send a record to every rank, and a copy of each descriptor beside it; otherwise as `send`."""

    def finish(self) -> None:
        """Have every rank that is idle run its exit handlers and exit."""

    def signal(self, ranks: tuple[int, ...], signum: int) -> None:
        """Send a signal to ranks; SIGKILL also goes to their data-loader workers."""

    def replace(self, rank: int) -> None:
        """Start a rank again after its process has exited; raises `ResourceError` if its machine cannot hold it."""

    def kill_supervisor(self) -> None:
        """Kill a supervisor that does not answer; its ranks die with it."""

    def wake(self) -> None:
        """Make `events` return; from any thread."""

    def events(self, timeout: float | None) -> list[Event]:
        """Wait up to `timeout` seconds for events and return them, each rank's in the order in which it caused them."""

    @property
    def is_dying(self) -> bool:
        """True if a rank's end is known and its exit has not been reported yet."""

    def drain(self, rank: int) -> list[Event]:
        """Return the rank's output that has arrived and was not read yet."""

    def memory(self, rank: int) -> int | None:
        """Return the resident memory of a rank in bytes; None: unknown, or the rank is gone."""

    def pulses(self, ranks: Iterable[int]) -> dict[int, Pulse]:
        """Return the activity of these ranks' processes; a rank that is gone, or cannot be looked at, is left out."""

    def close(self, deadline: Callable[[], float] | None = None) -> None:
        """Kill the remaining processes, wait until they are reaped, and release everything; idempotent.

        Args:
            deadline: Returns the time at which the wait is given up; called again and again. None: some seconds.
        """
