"""A debugger in a rank of a detached session, whose prompt clients of the host answer."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from notebook_launcher.detached.host_questions import HostQuestions
from notebook_launcher.detached.journal import Journal
from notebook_launcher.kernel.failures.post_mortem import PostMortem

if TYPE_CHECKING:
    from notebook_launcher.detached.requests import Follow, News
    from notebook_launcher.kernel.ranks import Ranks
    from notebook_launcher.kernel.run.data import RunData

__all__ = ["HostedDebugger"]


class HostedDebugger:
    """One debugger in one rank, in a thread of the host until a client leaves it.

    Args:
        ranks: The session's ranks, of which none runs a call.
        data: The run data of the call that failed.
        rank: The rank to look into.
    """

    def __init__(self, ranks: Ranks, data: RunData, rank: int) -> None:
        self.rank = rank
        self._questions = HostQuestions()
        # The client that opens the debugger answers, and may be later than the first prompt.
        self._journal = Journal(self._questions.pending, is_awaited=True)
        self._debugger = PostMortem(ranks, data, rank, self._journal)
        self._questions.connect(self._journal.asked, self._debugger.reply, self._debugger.waits_for)
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="notebook-launcher debugger", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """True once a client has left the debugger, or the rank has died."""
        return not self._thread.is_alive()

    def news(self, request: Follow) -> News:
        """Return output and prompts, as `Journal.news`."""
        return self._journal.news(request)

    def answer(self, key: int, text: str) -> bool:
        """Pass on what was typed at a prompt."""
        return self._questions.answer(key, text)

    def interrupt(self, *, again: bool) -> None:
        """Leave the debugger at its prompt, or end the command that runs in it; `again`: end the rank."""
        self._debugger.interrupt(again)

    def end(self) -> BaseException | None:
        """Wait for the end of the debugger; return its exception."""
        self._thread.join()
        return self._fault

    def _run(self) -> None:
        try:
            self._debugger.serve(self._questions)
        except BaseException as fault:  # the client raises it
            self._fault = fault
        finally:
            self._journal.finish()
