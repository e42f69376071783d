"""Hears a page's messages to a widget while the kernel's main thread is busy.

A kernel answers the messages of its shell channel one after another in the main thread, so a click on Stop
would wait for the end of the very cell that it is to stop. ipykernel 7 reads the channel in a thread of its
own, where our messages can be taken out before they are queued; ipykernel 6 reads it in the main thread,
which has to look now and then while it waits (`Tap.poll`). Subshells do not help: front ends that know none
send none, and ipykernel 7.4 sends replies to the shell that used a comm last, which is the main one.

Only custom messages to our own comms are taken, and those by which a page that was reloaded asks for all
widgets. Everything else goes on in its order, untouched. IPython's pre- and post-execute hooks are not run for
what is taken: on another thread they make the running cell lose figures.

This is the one module that uses what has no public name in ipykernel (`shell_stream`, `shell_channel_thread`,
`shell_handlers`, `msg_queue`, `dispatch_shell`, `_publish_status`). Where anything of it is missing there is no
tap, and clicks are heard when the cell ends.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Tap", "open_tap"]

POLL_INTERVAL = 0.1
"""Seconds between two looks of a waiting main thread, for ipykernel 6."""

CONTROL = "jupyter.widget.control"
"""The target of the comm by which a page asks for the state of all widgets (ipywidgets >= 7.7)."""

# A process has one kernel, a kernel one shell stream, and so all monitors share a tap, while there are any.
_TAPS: dict[int, Tap] = {}


def open_tap(comm_id: str, receive: Callable[[Any], None]) -> Tap | None:
    """Hear the custom messages to a comm from now on, until `Tap.close(comm_id)`.

    Args:
        comm_id: The comm's.
        receive: Takes the content of each message; called in a thread of ipykernel's, so it must not block.

    Returns:
        The kernel's tap; None outside a kernel, and where ipykernel is not built as this module knows it.
    """
    kernel = _running_kernel()
    if kernel is None:
        return None
    try:
        tap = _TAPS.get(id(kernel)) or Tap(kernel)
    except AttributeError:
        return None
    _TAPS[id(kernel)] = tap
    tap.open(comm_id, receive)
    return tap


class Tap:
    """The tap of one kernel; raises AttributeError if the kernel is not built as expected."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._stream = kernel.shell_stream
        self._session = kernel.session
        self._publishing_loop = kernel.iopub_thread.io_loop
        self._receivers: dict[str, Callable[[Any], None]] = {}
        self._handlers = kernel.shell_handlers
        self._control_comms: set[str] = set()
        self._on_recv: Any = None
        thread = getattr(kernel, "shell_channel_thread", None)
        self._reading_loop = None if thread is None else thread.io_loop
        if thread is None:
            # ipykernel 6: what has been read and not been answered yet.
            self._queue, self._dispatch = kernel.msg_queue, kernel.dispatch_shell
        else:
            self._default_on_recv = kernel.shell_channel_thread_main

    @property
    def must_poll(self) -> bool:
        """Whether the main thread must call `poll` while it waits."""
        return self._reading_loop is None

    def open(self, comm_id: str, receive: Callable[[Any], None]) -> None:
        """Begin to hear a comm."""
        self._receivers[comm_id] = receive
        if self._reading_loop is not None:
            self._reading_loop.add_callback(self._install)

    def close(self, comm_id: str) -> None:
        """Hear a comm no more; idempotent."""
        self._receivers.pop(comm_id, None)
        if self._receivers or _TAPS.get(id(self._kernel)) is not self:
            return
        del _TAPS[id(self._kernel)]
        if self._reading_loop is not None:
            self._reading_loop.add_callback(self._uninstall)

    def poll(self) -> float | None:
        """Hear what has come, if it takes a look from the main thread; return in how many seconds to look again."""
        if not (self.must_poll and self._receivers and threading.current_thread() is threading.main_thread()):
            return None
        import zmq

        self._stream.flush(zmq.POLLIN)
        for _ in range(self._queue.qsize()):  # Once around: the others keep their order.
            item = self._queue.get_nowait()
            _, dispatch, arguments = item
            if not (dispatch == self._dispatch and self._takes(arguments[0])):
                self._queue.put_nowait(item)
        return POLL_INTERVAL

    # In ipykernel 7's thread for the shell channel.

    def _install(self) -> None:
        if self._receivers and self._on_recv is None:
            # Whoever listens instead of ipykernel itself is passed everything, and comes back afterwards.
            self._on_recv = getattr(self._stream, "_recv_callback", None) or self._default_on_recv
            self._stream.on_recv(self._receive, copy=False)

    def _uninstall(self) -> None:
        if not self._receivers and getattr(self._stream, "_recv_callback", None) == self._receive:
            self._stream.on_recv(self._on_recv, copy=False)
            self._on_recv = None

    def _receive(self, frames: list[Any]) -> Any:
        return None if self._takes(frames) else self._on_recv(frames)

    # Anywhere.

    def _takes(self, frames: list[Any]) -> bool:
        """Handle a message if it is one of ours, and return whether it was."""
        try:
            identities, rest = self._session.feed_identities(frames, copy=False)
            message = self._session.deserialize(rest, content=False, copy=False)
            kind = message["header"]["msg_type"]
            if kind not in ("comm_open", "comm_msg", "comm_close"):
                return False
            content = message["content"] = self._session.unpack(message["content"])
            if self._asks_for_all(kind, content):
                self._answer(self._handlers[kind], identities, message)
                return True
            receive = self._receivers.get(content.get("comm_id"))
            data = content.get("data") or {}
            if kind != "comm_msg" or receive is None or data.get("method") != "custom":
                return False  # Traits and requests for a widget's state take the usual way.
        except Exception:  # noqa: BLE001 - what cannot be read is ipykernel's to refuse
            return False
        self._say("busy", message)
        try:
            receive(data.get("content"))
        except Exception:
            self._kernel.log.exception("a message to a monitor failed")
        finally:
            self._say("idle", message)
        return True

    def _asks_for_all(self, kind: str, content: dict[str, Any]) -> bool:
        """Return whether a message is of a comm by which a page asks for all widgets."""
        comm_id = content["comm_id"]
        if kind == "comm_open" and content["target_name"] == CONTROL:
            self._control_comms.add(comm_id)
        return comm_id in self._control_comms

    def _answer(self, handle: Callable[[Any, Any, Any], None], identities: Any, message: Any) -> None:
        # In the thread that our own messages come from. If the cell that runs makes a widget just now, ipywidgets may
        # refuse; JupyterLab asks again in another way, which takes its turn after the cell.
        self._say("busy", message)
        self._publishing_loop.add_callback(handle, None, identities, message)
        self._say("idle", message)

    def _say(self, status: str, message: Any) -> None:
        # Front ends wait for this with each message that they send.
        publish = getattr(self._kernel, "_publish_status", None)
        if publish is not None:
            self._publishing_loop.add_callback(publish, status, "shell", message)


def _running_kernel() -> Any:
    """Return this process's ipykernel; None if there is none."""
    kernelbase: Any = sys.modules.get("ipykernel.kernelbase")
    if kernelbase is None or not kernelbase.Kernel.initialized():
        return None
    return kernelbase.Kernel.instance()
