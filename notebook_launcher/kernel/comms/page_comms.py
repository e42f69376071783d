"""The kernel's end of a comm that a rank's widget has with the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.ipython_shell import kernel_shell
from notebook_launcher.kernel.comms.tap import open_tap

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["call_soon", "register_comm"]


def register_comm(
    comm_id: str, receive: Callable[[dict[str, Any]], bool], receive_idle: Callable[[dict[str, Any]], object]
) -> Callable[[], object]:
    """Register a comm with the kernel, and return a function that removes it.

    Args:
        comm_id: The comm's id.
        receive: Called with each message of the page while a cell is busy, in the thread that reads the kernel's shell
            channel; returns False for a message that is to wait for the main thread.
        receive_idle: Called with each other message of the page, in the main thread.
    """
    manager = kernel_shell().kernel.comm_manager
    manager.register_comm(_comm(comm_id, receive_idle))
    tap = open_tap(comm_id, whole=receive)

    def forget() -> None:
        manager.comms.pop(comm_id, None)
        if tap is not None:
            tap.close(comm_id)

    return forget


def call_soon(function: Callable[[], object]) -> None:
    """Call a function in the kernel's main thread, once no cell runs."""
    loop = getattr(kernel_shell().kernel, "io_loop", None)
    if loop is not None:
        loop.add_callback(function)


def _comm(comm_id: str, receive: Callable[[dict[str, Any]], object]) -> Any:
    from comm.base_comm import BaseComm

    class RelayedComm(BaseComm):
        """A comm that the kernel's manager knows, and whose messages come from a rank."""

        def publish_msg(self, *_: Any, **__: Any) -> None:
            """Send nothing: the rank does."""

        def handle_msg(self, msg: dict[str, Any]) -> None:
            """Take a message of the page."""
            receive(msg)

        handle_close = handle_msg

        def __del__(self) -> None:
            """Close nothing."""

    return RelayedComm(comm_id=comm_id, target_name="jupyter.widget", primary=False)
