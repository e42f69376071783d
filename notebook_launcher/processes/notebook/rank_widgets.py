"""Widgets of a rank: their comms go to the page, and the page's messages to them, through the kernel.

ipywidgets opens comms by the package `comm`, whose two functions a kernel replaces, and so does a rank. Nothing is sent
for a rank whose widgets the cell does not show; such a widget is sent later, when a cell shows it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

from notebook_launcher.messaging import messages
from notebook_launcher.processes.afterimport import after_import
from notebook_launcher.processes.notebook.widget_output import OutputCaptures

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Sequence

__all__ = ["RankWidgets", "nothing"]

NO_CELL = "shown as text, because no cell shows widgets of this run"
OTHER_RANK = "shown as text, because the cell shows the widgets of rank {ranks} alone"


def nothing() -> None:
    """Do nothing: the call of a turn in which the page's messages are handled."""


class RankWidgets:
    """The comms of this rank's widgets.

    Args:
        rank: This rank.
        send: Sends a record to the kernel.
    """

    def __init__(self, rank: int, send: Callable[[object], None]) -> None:
        self._rank = rank
        self._send = send
        self._pid = os.getpid()
        self._shown: tuple[int, ...] = ()
        """The ranks whose widgets the cell shows."""
        self._manager: Any = None
        """The comms by their ids; None until `comm` is imported."""
        self._page_header: dict[str, Any] | None = None
        """Header of the page's message that is being handled; None between messages."""
        self.captures = OutputCaptures(self._is_open)
        """The `Output` widgets that take what is shown."""

    def patch_comm(self) -> None:
        """Replace the functions of `comm`, once it is imported; again if ipykernel replaces them afterwards."""
        after_import(
            {
                "comm": self._replace_functions,
                "ipykernel.ipkernel": lambda _: self._replace_functions(sys.modules["comm"]),
                "ipywidgets.widgets.widget_output": self.captures.patch,
            }
        )

    def begin_call(self, widget_ranks: tuple[int, ...]) -> None:
        """Note the ranks whose widgets the cell of a call shows."""
        self._shown = widget_ranks

    @property
    def is_live(self) -> bool:
        """True if the cell shows this rank's widgets."""
        return self._rank in self._shown and os.getpid() == self._pid

    @property
    def why_text(self) -> str:
        """The reason why a widget of this rank is shown as text."""
        return OTHER_RANK.format(ranks=", ".join(map(str, self._shown))) if self._shown else NO_CELL

    def reveal(self, model_id: str) -> bool:
        """Return True if the page can show a widget, which is sent now if the page does not have it yet."""
        comm = None if self._manager is None else self._manager.comms.get(model_id)
        if comm is None or not self.is_live:
            return False
        if not comm.is_open:
            self._open_late()
        return bool(comm.is_open)

    def handle(self, record: messages.CommMessage) -> None:
        """Pass a message of the page to its widget, in the main thread; an error of its code is printed."""
        comm = None if self._manager is None else self._manager.comms.get(record.comm_id)
        before, self._page_header = self._page_header, record.parent
        try:
            if comm is not None:
                _pass_on(comm, record)
        except Exception:  # the code that runs beside the callback continues
            traceback.print_exc()
        finally:
            self._page_header = before
            with contextlib.suppress(OSError):  # The kernel is gone.
                self._send(messages.CommHandled())

    def publish(
        self,
        comm: Any,
        kind: Any,
        data: Any,
        metadata: Any,
        buffers: Sequence[Any] | None,
        target_name: str,
    ) -> None:
        """Send a message of a comm to the page, if the page has the comm."""
        if os.getpid() != self._pid or not (comm.is_open or (kind == "comm_open" and self.is_live)):
            return
        comm.is_open = kind != "comm_close"
        self._send(
            messages.CommMessage(
                kind=kind,
                comm_id=comm.comm_id,
                data=data or {},
                metadata=metadata or {},
                buffers=tuple(map(bytes, buffers or ())),
                target_name=target_name,
                parent=self._page_header,
            )
        )

    def _is_open(self, widget: Any) -> bool:
        return bool(getattr(getattr(widget, "comm", None), "is_open", False))

    def _replace_functions(self, module: types.ModuleType) -> None:
        if self._manager is None:
            self._manager = module.CommManager()
        manager, make = self._manager, _comm_class(module, self)
        module.create_comm = make  # type: ignore[attr-defined]
        module.get_comm_manager = lambda: manager  # type: ignore[attr-defined]

    def _open_late(self) -> None:
        """Send widgets that were made while no cell showed them, oldest first: parts come before the whole."""
        ipywidgets: Any = sys.modules["ipywidgets.widgets.widget"]
        for widget in list(ipywidgets._instances.values()):
            comm = widget.comm
            if getattr(comm, "is_open", True):  # It is a comm of another kind.
                continue
            state, paths, buffers = ipywidgets._remove_buffers(widget.get_state())
            metadata = {"version": ipywidgets.__protocol_version__}
            self.publish(
                comm, "comm_open", {"state": state, "buffer_paths": paths}, metadata, buffers, comm.target_name
            )


def _pass_on(comm: Any, record: messages.CommMessage) -> None:
    message = {
        "header": record.parent or {},
        "parent_header": {},
        "metadata": record.metadata,
        "content": {"comm_id": record.comm_id, "data": record.data},
        "buffers": [memoryview(buffer) for buffer in record.buffers],
    }
    if record.kind == "comm_close":
        comm.is_open = False
        comm.handle_close(message)
    elif comm._msg_callback is not None:
        # Not `handle_msg`, which also shows the figures that the code beside the callback has not finished.
        comm._msg_callback(message)


def _comm_class(module: types.ModuleType, widgets: RankWidgets) -> type:
    base: Any = module.BaseComm

    class RankComm(base):  # type: ignore[misc]
        """A comm whose messages the kernel passes on."""

        is_open = False
        """True if the page has this comm."""

        def publish_msg(
            self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
        ) -> None:
            widgets.publish(self, msg_type, data, metadata, buffers, keys.get("target_name") or "")

    return RankComm
