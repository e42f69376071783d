"""Widgets of a rank: their comms go to the page, and the page's messages to them, through the kernel.

ipywidgets opens comms by the package `comm`, whose two functions a kernel replaces, and so does a rank. Nothing is sent
for a rank whose widgets the cell does not show; such a widget is sent later, when a cell shows it.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

from notebook_launcher.messaging import messages
from notebook_launcher.travel.afterimport import after_import

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Mapping, Sequence


NO_CELL = "shown as text, because no cell shows widgets of this run"
OTHER_RANK = "shown as text, because the cell shows the widgets of rank {ranks} alone"
OF_THE_KERNEL = "shown as text, because this rank has not made it; widgets of the notebook stay in the notebook"


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
        self._captures: list[_Capture | None] = []
        """The `Output` widgets inside whose `with` block the rank is; None for one that the page does not have."""

    def patch_comm(self) -> None:
        """Replace the functions of `comm`, once it is imported; again if ipykernel replaces them afterwards."""
        after_import(
            {
                "comm": self._replace_functions,
                "ipykernel.ipkernel": lambda _: self._replace_functions(sys.modules["comm"]),
                "ipywidgets.widgets.widget_output": self._patch_output,
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
        if self.is_live:  # Its own are shown, so this one is most likely inherited from the kernel by a fork.
            return OF_THE_KERNEL
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

    @property
    def capture(self) -> _Capture | None:
        """The innermost `Output` widget, which takes what is displayed; None: the cell takes it."""
        return self._captures[-1] if self._captures else None

    def _patch_output(self, module: Any) -> None:
        def enter(output: Any) -> Any:
            is_open = getattr(output.comm, "is_open", False)
            self._captures.append(_Capture(output) if is_open else None)
            return output

        def leave(_output: Any, _kind: Any, error: BaseException | None, _tb: Any) -> bool:
            if (capture := self._captures.pop()) is None:
                return False
            if isinstance(error, Exception):
                traceback.print_exception(error)
            capture.end()
            return isinstance(error, Exception)  # As in a kernel, where the widget shows the error.

        module.Output.__enter__, module.Output.__exit__ = enter, leave

    def _replace_functions(self, module: types.ModuleType) -> None:
        if self._manager is None:
            self._manager = module.CommManager()
        manager, make = self._manager, _comm_class(module, self)
        vars(module).update(create_comm=make, get_comm_manager=lambda: manager)

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


# --------------------------------------------------------------------------------------------------------------------
# ipywidgets' `Output` in a rank: what is printed and displayed inside `with output:` goes into the widget.
#
# In a kernel, the page moves the messages of a cell into the widget. A rank's output has no such messages, so the
# widget's own list of outputs gets it.


INTERVAL = 0.1
"""Seconds between two changes of a widget with much text, because each change sends the whole text."""
SMALL = 10_000
"""Characters of text up to which each line is sent at once."""
MAX_TEXT = 500_000
"""Characters of text that a widget keeps, the last ones."""


class _Capture:
    """One `with output:` block."""

    def __init__(self, output: Any) -> None:
        self._output = output
        self._waiting: list[dict[str, Any]] = []
        """Outputs that the widget does not have yet."""
        self._clears = False
        """True if the next output replaces all earlier ones."""
        self._sent_at = 0.0
        self._redirects = contextlib.ExitStack()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._redirects.enter_context(contextlib.redirect_stdout(_Stream(self, "stdout")))
        self._redirects.enter_context(contextlib.redirect_stderr(_Stream(self, "stderr")))

    def end(self) -> None:
        self._redirects.close()
        self.flush()

    def text(self, name: str, text: str) -> None:
        """Add text of a stream."""
        self._add({"output_type": "stream", "name": name, "text": text})
        is_small = sum(len(output.get("text", "")) for output in self._output.outputs) < SMALL
        if ("\n" in text and is_small) or time.monotonic() - self._sent_at > INTERVAL:
            self.flush()

    def display(self, data: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        """Add rich output."""
        self._add({"output_type": "display_data", "data": dict(data), "metadata": dict(metadata)})
        self.flush()

    def clear(self, *, wait: bool) -> None:
        """Remove all output, now or when the next output comes."""
        self._waiting.clear()
        self._clears = wait
        if not wait:
            self._output.outputs = ()

    def flush(self) -> None:
        """Give the widget what it does not have yet."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._output.outputs = _joined([*self._output.outputs, *waiting])
        self._sent_at = time.monotonic()

    def _add(self, output: dict[str, Any]) -> None:
        if self._clears:
            self._clears = False
            self._output.outputs = ()
        self._waiting.append(output)


class _Stream(io.TextIOBase):
    """A standard stream whose text goes into a widget."""

    encoding = "utf-8"

    def __init__(self, capture: _Capture, name: str) -> None:
        self._capture = capture
        self._name = name

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text:
            self._capture.text(self._name, text)
        return len(text)


def _joined(outputs: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return outputs with adjacent texts of one stream as one, of which the end is kept."""
    joined: list[dict[str, Any]] = []
    for output in outputs:
        if joined and "text" in output and joined[-1].get("name") == output.get("name"):
            joined[-1] = {**output, "text": (joined[-1]["text"] + output["text"])[-MAX_TEXT:]}
        else:
            joined.append(output)
    return tuple(joined)


# --------------------------------------------------------------------------------------------------------------------
# tqdm.notebook in a rank: bars are widgets if the cell shows them, and otherwise text.


def divide_bars(module: types.ModuleType, widgets: RankWidgets) -> None:
    """Make the module's class a text bar, which makes widget bars in its place for a rank whose widgets are shown.

    Subclasses, such as `tqdm.auto.tqdm`, did not ask for a widget; they are text bars everywhere.
    """
    bar: Any = module.tqdm_notebook
    methods = {name: value for name, value in vars(bar).items() if name in ("__init__", "__iter__") or name[:2] != "__"}
    for name in methods:
        # Without the methods that it overrides, tqdm.notebook's bar is tqdm's text bar.
        delattr(bar, name)
    widget_bar = type(bar.__name__, (bar,), {**methods, "__module__": bar.__module__})
    explained: list[bool] = []

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - the method of the class
        is_widget = cls is bar and widgets.is_live and module.IProgress is not None
        made = widget_bar if is_widget else cls
        return super(bar, cls).__new__(made, *args, **kwargs)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - the method of the class
        if type(self) is bar and not explained and not kwargs.get("disable"):
            explained.append(True)
            print(f"tqdm.notebook: {widgets.why_text}")  # noqa: T201
        super(bar, self).__init__(*args, **kwargs)

    bar.__new__, bar.__init__ = __new__, __init__
