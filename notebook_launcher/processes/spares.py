"""The processes that a fork server forks ahead: a host for a detached launch, and ranks for a launch like the last two.

A person at a prompt is likely to launch again, as when a cell is run again and again. In a script the first launch of a
kind shows nothing about the next one; after the second one in a row a third is likely.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.processes.spare import Spare
from notebook_launcher.processes.spare_ranks import kind_of_launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.messaging import messages

__all__ = ["Spares"]

SPARES_AFTER = 0.1
"""Seconds without a request before spare processes are forked."""
KEPT_FOR = 60.0
"""Seconds after a launch for which spare processes wait for the next one."""


class Spares:
    """The spare processes of a fork server: at most one host, and the ranks of at most one launch.

    Args:
        become_host: Life of a spare host; it gets the host's module, and a descriptor at which the request arrives.
        become_supervisor: Life of the supervisor of spare ranks; it gets their settings, and such a descriptor.
    """

    def __init__(
        self,
        become_host: Callable[[str, int], None],
        become_supervisor: Callable[[messages.Setup, int], None],
    ) -> None:
        self._host = Spare(become_host, keep_for=KEPT_FOR)
        """Its kind is the module of the host."""
        self._ranks = Spare(become_supervisor, keep_for=KEPT_FOR)
        """Their kind is what `kind_of_launch` returns."""
        self._last: messages.Setup | None = None
        """Kind of the last launch; None if such launches get no spare ranks."""
        self._running: set[int] = set()
        """The supervisors of launches."""
        self._heralds: dict[int, messages.Setup] = {}
        """The kinds of those launches after which another one of their kind is likely, by supervisor."""

    def due(self) -> float | None:
        """Return the seconds without a request until `tend` has something to do; None: it has nothing to do."""
        due = (spare.next_due(SPARES_AFTER) for spare in (self._host, self._ranks))
        return min((seconds for seconds in due if seconds is not None), default=None)

    def tend(self) -> list[Spare[Any]]:
        """Dismiss processes that nobody has needed, and return those that are to be forked now."""
        spares: tuple[Spare[Any], ...] = (self._host, self._ranks)
        for spare in spares:
            if spare.is_stale:
                spare.dismiss()
        return [spare for spare in spares if spare.is_missing]

    def take_host(self, request: messages.StartHost, host_fd: int) -> bool:
        """Hand a request to the spare host; return False if there is none."""
        return self._host.take(request.module, request, host_fd)

    def expect_host(self, module: str) -> None:
        """Expect another detached launch soon."""
        self._host.expect(module)

    def take_ranks(self, request: messages.StartSupervisor, channel_fd: int) -> int | None:
        """Hand a launch to spare ranks; return their supervisor's process number, None if there are none for it."""
        kind = kind_of_launch(request.setup)
        if kind is not None and self._ranks.take(kind, request, channel_fd):
            return self._ranks.pid
        self._ranks.dismiss()  # They would hold memory while other ranks run.
        return None

    def note_launch(self, pid: int, request: messages.StartSupervisor) -> None:
        """Note that this supervisor serves a launch; sessions do not count, because they last."""
        if request.setup.many_calls:
            return
        kind = kind_of_launch(request.setup)
        self._running.add(pid)
        if kind is not None and (request.is_interactive or kind == self._last):
            self._heralds[pid] = kind
        self._last = kind

    def note_end(self, pid: int, *, may_expect: bool) -> None:
        """Note that a process has ended; if another launch is likely now and `may_expect` holds, expect it.

        While other launches run, none is expected: spare ranks would take processor time from them.
        """
        self._running.discard(pid)
        kind = self._heralds.pop(pid, None)
        if kind is not None and may_expect and not self._running:
            self._ranks.expect(kind)

    def renew(self) -> None:
        """End the spare processes, which others are to replace: they lack what this process is about to import."""
        self._host.renew()
        self._ranks.renew()

    def dismiss(self) -> None:
        """End the spare processes; in a fork of this process, close the copies of their channels."""
        self._host.dismiss()
        self._ranks.dismiss()
