"""Receives the page's messages to a widget while the kernel's main thread is busy.

A kernel answers the messages of its shell channel one after another in the main thread, so a click on Stop
would wait for the end of the very cell that it should stop. ipykernel 7 reads the channel in a thread of its own, and
this module takes the page's messages out there, before ipykernel queues them. ipykernel 6 reads the channel in the main
thread, which must therefore poll while it waits (`Tap.poll`). Subshells do not help: front ends without subshells send
no messages to them, and ipykernel 7.4 sends replies to the shell that used a comm last, which is the main one.

The tap takes only custom messages to the package's own comms, all messages to widgets of ranks, and the messages by
which a reloaded page asks for all widgets.
All other messages keep their order and their way. IPython's pre- and post-execute hooks do not run for a message that
the tap takes, because on another thread they make the running cell lose figures.

Like `kernel/display/cell.py` (`_topic`), this module uses names of ipykernel that are not public (`shell_stream`,
`shell_channel_thread`, `shell_handlers`, `msg_queue`, `dispatch_shell`, `_publish_status`). If one of these is missing
there is no tap, and the kernel processes clicks when the cell ends.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

POLL_INTERVAL = 0.1
"""Seconds between two calls of `poll` by a waiting main thread, for ipykernel 6."""

CONTROL = "jupyter.widget.control"
"""The target of the comm by which a page asks for the state of all widgets (ipywidgets >= 7.7)."""

# A process has one kernel, and a kernel has one shell stream. All open monitors therefore share one tap.
_TAPS: dict[int, Tap] = {}


def open_tap(
    comm_id: str,
    receive: Callable[[Any], None] | None = None,
    *,
    whole: Callable[[dict[str, Any]], bool] | None = None,
) -> Tap | None:
    """Receive the messages to a comm until `Tap.close(comm_id)`.

    `receive` is called with the content of each custom message, in a thread of ipykernel, so it must not block;
    `whole` in the same way with each whole message, and returns False for one that ipykernel is to handle. Return the
    kernel's tap; None outside a kernel, and if this ipykernel lacks a name that the tap needs.
    """
    kernel = _running_kernel()
    if kernel is None:
        return None
    try:
        tap = _TAPS.get(id(kernel)) or Tap(kernel)
    except AttributeError:
        return None
    _TAPS[id(kernel)] = tap
    if receive is not None:
        whole = _custom_content(receive)
    assert whole is not None
    tap.open(comm_id, whole)
    return tap


def poll_tap() -> float | None:
    """Call `Tap.poll` of this process's kernel, if it has a tap."""
    for tap in list(_TAPS.values()):
        return tap.poll()
    return None


def _custom_content(receive: Callable[[Any], None]) -> Callable[[dict[str, Any]], bool]:
    """Return a receiver of custom messages alone; traits and requests for a widget's state are left to ipykernel."""

    def take(message: dict[str, Any]) -> bool:
        data = message["content"].get("data") or {}
        if message["header"]["msg_type"] != "comm_msg" or data.get("method") != "custom":
            return False
        receive(data.get("content"))
        return True

    return take


class Tap:
    """The tap of one kernel. Raises AttributeError if this ipykernel lacks a name that the tap needs."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._stream = kernel.shell_stream
        self._session = kernel.session
        self._publishing_loop = kernel.iopub_thread.io_loop
        self._receivers: dict[str, Callable[[dict[str, Any]], bool]] = {}
        self._handlers = kernel.shell_handlers
        self._control_comms: set[str] = set()
        self._on_recv: Any = None
        thread = getattr(kernel, "shell_channel_thread", None)
        self._reading_loop = None if thread is None else thread.io_loop
        if thread is None:
            # ipykernel 6: the messages that were read and are not answered yet.
            self._queue, self._dispatch = kernel.msg_queue, kernel.dispatch_shell
        else:
            self._default_on_recv = kernel.shell_channel_thread_main

    def open(self, comm_id: str, receive: Callable[[dict[str, Any]], bool]) -> None:
        """Start to receive the messages to a comm; `receive` returns False for those that ipykernel is to handle."""
        self._receivers[comm_id] = receive
        if self._reading_loop is not None:
            self._reading_loop.add_callback(self._install)

    def close(self, comm_id: str) -> None:
        """Stop receiving the messages to a comm; idempotent."""
        self._receivers.pop(comm_id, None)
        if self._receivers or _TAPS.get(id(self._kernel)) is not self:
            return
        del _TAPS[id(self._kernel)]
        if self._reading_loop is not None:
            self._reading_loop.add_callback(self._uninstall)

    def poll(self) -> float | None:
        """Process pending messages, if the main thread must. Return the seconds until the next call; None: never."""
        if not (
            self._reading_loop is None and self._receivers and threading.current_thread() is threading.main_thread()
        ):
            return None
        import zmq

        self._stream.flush(zmq.POLLIN)
        for _ in range(self._queue.qsize()):  # One pass over the queue keeps the order of the other messages.
            item = self._queue.get_nowait()
            _, dispatch, arguments = item
            if not (dispatch == self._dispatch and self._takes(arguments[0])):
                self._queue.put_nowait(item)
        return POLL_INTERVAL

    def _install(self) -> None:
        """Receive the shell channel before ipykernel does; runs in ipykernel 7's thread for that channel."""
        if self._receivers and self._on_recv is None:
            # If another library listens in place of ipykernel, it gets the other messages, and is restored afterwards.
            self._on_recv = getattr(self._stream, "_recv_callback", None) or self._default_on_recv
            self._stream.on_recv(self._receive, copy=False)

    def _uninstall(self) -> None:
        if not self._receivers and getattr(self._stream, "_recv_callback", None) == self._receive:
            self._stream.on_recv(self._on_recv, copy=False)
            self._on_recv = None

    def _receive(self, frames: list[Any]) -> Any:
        return None if self._takes(frames) else self._on_recv(frames)

    def _takes(self, frames: list[Any]) -> bool:
        """Process a message if it is for the tap. Return True if it was."""
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
            if kind == "comm_open" or receive is None:
                return False
        except Exception:  # ipykernel refuses a message that cannot be read
            return False
        try:
            if not receive(message):
                return False
        except Exception:
            self._kernel.log.exception("a message to a widget failed")
        # Front ends wait for both statuses.
        self._publish_status("busy", message)
        self._publish_status("idle", message)
        return True

    def _asks_for_all(self, kind: str, content: dict[str, Any]) -> bool:
        """Return True for a message of a comm by which a page asks for all widgets."""
        comm_id = content["comm_id"]
        if kind == "comm_open" and content["target_name"] == CONTROL:
            self._control_comms.add(comm_id)
        return comm_id in self._control_comms

    def _answer(self, handle: Callable[[Any, Any, Any], None], identities: Any, message: Any) -> None:
        # Answered in the thread that sends the monitor's messages. If the running cell creates a widget at this moment,
        # ipywidgets may refuse; JupyterLab then asks again in another way, and gets its answer after the cell.
        self._publish_status("busy", message)
        self._publishing_loop.add_callback(handle, None, identities, message)
        self._publish_status("idle", message)

    def _publish_status(self, status: str, message: Any) -> None:
        # Front ends wait for this status after each message that they send.
        publish = getattr(self._kernel, "_publish_status", None)
        if publish is not None:
            self._publishing_loop.add_callback(publish, status, "shell", message)


def _running_kernel() -> Any:
    """Return this process's ipykernel; None if there is none."""
    kernelbase: Any = sys.modules.get("ipykernel.kernelbase")
    if kernelbase is None or not kernelbase.Kernel.initialized():
        return None
    return kernelbase.Kernel.instance()
