"""The debugger of a detached session in a cell: shows its output, and asks the user at its prompt."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from notebook_launcher.detached.attached_output import AttachedOutput
from notebook_launcher.detached.attached_questions import AttachedQuestions
from notebook_launcher.detached.requests import AwaitDebugger, InterruptDebugger
from notebook_launcher.history.host_files import SESSION_SOCKET
from notebook_launcher.kernel.latch import AWAKE_EVERY, Latch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from notebook_launcher.config import LaunchConfig

__all__ = ["AttachedDebugger"]


class AttachedDebugger:
    """The debugger that is open in a session's host.

    Args:
        folder: The session's folder.
        config: The session's options.
        request: Sends a request to the host, and returns its value.
    """

    def __init__(self, folder: Path, config: LaunchConfig, request: Callable[[object], Any]) -> None:
        self._request = request
        self._questions = AttachedQuestions(request)
        self._output = AttachedOutput(folder, config, None, socket_name=SESSION_SOCKET)
        self._over: Latch[None] = Latch()

    def run(self) -> None:
        """Answer the prompt until a user leaves the debugger.

        Raises:
            KeyboardInterrupt: The user left by an interrupt.
            CallOrderError: The rank or the host died.
        """
        thread = threading.Thread(target=self._follow, name="notebook-launcher debugger", daemon=True)
        thread.start()
        num_interrupts = 0
        while not self._over.is_set:
            if self._is_interrupted():
                num_interrupts += 1
                self._request(InterruptDebugger(again=num_interrupts > 1))
        thread.join()
        fault = self._request(AwaitDebugger())
        if fault is not None:
            raise fault

    def _is_interrupted(self) -> bool:
        """Answer the prompt, if there is one; return True after an interrupt."""
        try:
            with self._questions.served():
                self._questions.serve(AWAKE_EVERY)
        except KeyboardInterrupt:
            return True
        return False

    def _follow(self) -> None:
        try:
            self._output.follow(self._questions)
        finally:
            self._over.set()
            self._questions.note(())
            self._questions.wake()
