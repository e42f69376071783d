"""Sinks, the destinations of output: their base, and the sink of the cell that launched a run.

Text that a thread of the kernel prints goes to a cell that depends on the version of ipykernel: the latest cell, or
the cell that started the thread. A `CellSink` therefore remembers the message that started its cell and sends every
message as a reply to it, from any thread, even after the cell has ended. The sockets behind `kernel.iopub_socket`
belong to ipykernel's own thread, so sending needs no lock.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import contextvars
import dataclasses
import sys
import threading
import uuid
import warnings
from typing import TYPE_CHECKING, Any, TextIO

from notebook_launcher.installed import BROKEN_IPYKERNELS
from notebook_launcher.ipython_shell import kernel_shell
from notebook_launcher.kernel.display.questions import reader_of
from notebook_launcher.kernel.latch import Latch
from notebook_launcher.wording import bounded, escape, format_elapsed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from notebook_launcher.drawing.plots import PlotOptions
    from notebook_launcher.engines.engine import Stream
    from notebook_launcher.history.curves import Curves
    from notebook_launcher.history.schema import RunPicture, RunSnapshot
    from notebook_launcher.messaging import messages


CLOSE_BUDGET = 5.0
"""Longest wait in seconds until all output is sent."""
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
MAX_HELD, MAX_HELD_TEXT = 200, 20_000
"""Messages that wait for a later cell, and the characters of one of them for an agent."""

_ANSWERED: contextvars.ContextVar[Any] = contextvars.ContextVar("answered", default=None)
"""The message whose cell gets the output of launches, inside `answering`; None outside."""


def current_message() -> Any:
    """Return the message to which the calling thread replies, such as the running cell's; None without a kernel."""
    shell = kernel_shell()
    return None if shell is None else shell.kernel.get_parent("shell")


@contextlib.contextmanager
def answering(message: Any) -> Iterator[None]:
    """Inside this block, launches write into the cell of `message`, whichever thread calls them."""
    token = _ANSWERED.set(message)
    try:
        yield
    finally:
        _ANSWERED.reset(token)


class _Latest:
    lines: tuple[str, str] = "", ""
    """The cell and the first lines of the latest launch that a running cell has made."""
    news: str | None = ""
    """What the next launch tells an agent before it says how to return at once; None: the agent knows."""


def note_for_agent(text: str) -> None:
    """Have an agent's next launch tell this, and how to return at once: tools drop the output of a stopped cell."""
    _Latest.news = text


def take_news() -> str | None:
    """Return what is to be told to an agent, once; None if the agent knows how to return at once."""
    news, _Latest.news = _Latest.news, None
    return news


def is_repeated(message: Any, lines: str) -> bool:
    """Return True if the latest launch of the running cell had the same first lines, and remember these.

    A loop of launches, as Optuna makes it, shows its lines once. `message` is the one that started the cell; a launch
    into another cell, such as a click's into its panel's, is not a repetition.
    """
    if message is None or message is not current_message():
        return False
    latest, _Latest.lines = _Latest.lines, (message.get("header", {}).get("msg_id", ""), lines)
    return latest == _Latest.lines


class Sink:
    """Destination of output, used from any thread; by itself one that keeps nothing and has no page behind it."""

    is_cell: bool = False
    """True for a cell, which keeps its output; False for a terminal, a file or a variable."""
    has_audience: bool = False
    """True for a cell that a person may look at, in a front end that may draw widgets."""
    is_brief: bool = False
    """True for a cell that an agent reads, whose output is short."""
    takes_comms: bool = False
    """True if the page of this cell may show widgets."""
    message: Any = None
    """The message that started the cell; None without a cell."""

    def hold_after_cell(self) -> bool:
        """Where no person looks, hold what comes after the cell's end for the cell that calls `show_here`.

        Return False where a person looks.
        """
        return False

    def show_here(self) -> None:
        """Show what was held, and what is to come, in the cell that runs now."""

    def text(self, stream: Stream, text: str) -> None:
        """Append text."""

    def print(self, text: str) -> None:
        """Append text to standard output as the calling code prints, after all output that was sent."""
        self.text("stdout", text)

    def status(self, text: str) -> None:
        """Redraw the live area; an empty text removes it."""

    def display(
        self,
        data: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,  # noqa: ARG002
        transient: Mapping[str, Any] | None = None,  # noqa: ARG002
        *,
        update: bool = False,  # noqa: ARG002
    ) -> None:
        """Show rich output, or update the one with the same `display_id`; here the plain text that each carries."""
        self.text("stdout", f"{data.get('text/plain', '')}\n")

    def html(self, html: str, text: str) -> None:
        """Show HTML, or `text` where there is no HTML."""
        self.display({"text/html": html, "text/plain": text})

    def comm(self, record: messages.CommMessage) -> None:
        """Send a message of a comm to the page."""

    def clear_output(self, *, wait: bool = False) -> None:
        """Clear what is there, at once or when the next output comes."""

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function that publishes, in the thread that publishes, after all earlier output."""
        function(*args)

    def flush(self) -> None:
        """Wait until all is sent."""

    def close(self) -> None:
        """Remove the live area; later output is still taken."""
        self.status("")


class CellSink(Sink):
    """The cell that is running in a kernel.

    Where the cell's own output goes elsewhere (`%%capture`, `contextlib.redirect_stdout`), this follows.
    """

    def __init__(self, shell: Any) -> None:
        _warn_of_broken_ipykernel()
        self._shell = shell
        self._kernel = shell.kernel
        self._loop = self._kernel.iopub_socket.io_thread.io_loop
        """The event loop of the thread that publishes."""
        self._streams = {name: _redirected(getattr(sys, name)) for name in ("stdout", "stderr")}
        """By stream: the file to which the cell redirects it; None if the stream is not redirected."""
        ours: Any = sys.modules["ipykernel.zmqshell"]
        self._publisher = None if isinstance(shell.display_pub, ours.ZMQDisplayPublisher) else shell.display_pub
        """The publisher that captures the cell's displays; None if they are not captured."""
        # Colab's hook on displays adds to their metadata what its page needs; each thread has hooks of its own.
        self._hooks = () if self._publisher else tuple(getattr(shell.display_pub, "_hooks", ()))
        """Functions that change each message of a display before it is sent, or drop it."""
        self._lock = threading.Lock()
        """Held while the live area changes."""
        self._status_id = ""
        """The `display_id` of the live area; empty if there is none."""
        self._status_text = ""
        """The live area's present text."""
        self._has_unsent = False
        """True if something was sent since the last `flush`."""
        self._moving = threading.Lock()
        """Held while the two fields below change, or the cell that gets the output."""
        self._held: collections.deque[tuple[str, dict[str, Any]]] | None = None
        """Messages that wait for a later cell, because this one has ended, and is seen no more; None: none do."""
        self._earlier = [getattr(sys, name).flush for name, redirected in self._streams.items() if redirected is None]
        """Functions that flush the cell's earlier output; called by the thread that publishes, before any message."""
        for redirected in filter(None, self._streams.values()):
            redirected.flush()
        self._reply_to(_ANSWERED.get() or self._kernel.get_parent("shell"))

    def _reply_to(self, message: Any) -> None:
        """Send every output from now on as a reply to the message that started a cell."""
        self.message = message
        self.is_cell = bool(message) and self._publisher is None and not any(self._streams.values())
        reader = reader_of(message) if self.is_cell else ""
        self.has_audience, self.is_brief = reader == "person", reader == "agent"
        self.takes_comms = self.is_cell and getattr(self._kernel, "comm_manager", None) is not None

    def hold_after_cell(self) -> bool:
        """Where no person looks, hold what comes after the cell's end for the cell that calls `show_here`.

        A program that runs notebooks drops what arrives for a cell that has ended. Return False where a person looks.
        """
        is_held = self.is_cell and reader_of(self.message) in {"agent", "file"}
        if is_held:
            self._shell.events.register("post_run_cell", self._begin_to_hold)
        return is_held

    def _begin_to_hold(self, *_: object) -> None:
        self._shell.events.unregister("post_run_cell", self._begin_to_hold)
        with self._moving:
            self._held = collections.deque(maxlen=MAX_HELD)

    def show_here(self) -> None:
        """Show what was held, and what is to come, in the cell that runs now."""
        message = current_message()
        with self._moving:
            if self._held is None or message is None:
                return
            held, self._held = self._held, None
            self._reply_to(message)
            self._earlier = [sys.stdout.flush, sys.stderr.flush]
            for kind, content in held:
                if kind == "stream" and self.is_brief:
                    content["text"] = bounded(content["text"], "run.logs(rank) has all", MAX_HELD_TEXT)
                self.call(self._publish, kind, content, message)
        self.status("")  # It would stay in the cell that has ended.
        with self._lock:
            self._status_id = ""
        self.hold_after_cell()

    def text(self, stream: Stream, text: str) -> None:
        """Append text to the cell's output."""
        redirected = self._streams[stream]
        if redirected is None:
            self._send("stream", {"name": stream, "text": text})
        else:
            redirected.write(text)

    def print(self, text: str) -> None:
        """Append text to standard output, as a `print` of the cell if this is the cell's own thread.

        ipykernel sends what a cell has printed before it reports the end of the cell, so nobody has to wait for that: a
        `flush` switches to the thread that publishes and back, 0.3 ms where cores are busy.
        """
        if threading.current_thread() is threading.main_thread() and self.message is self._kernel.get_parent("shell"):
            sys.stdout.write(text)
            return
        self.text("stdout", text)
        self.flush()

    def status(self, text: str) -> None:
        """Redraw the live area, one display that is updated in place; an empty text removes it."""
        with self._lock:
            if text == self._status_text or self._held is not None or any(self._streams.values()):
                return
            self._status_text = text
            # An empty text/plain would leave a blank line; empty HTML takes no room.
            data = {"text/plain": text} if text else {"text/html": "", "text/plain": ""}
            update = bool(self._status_id)
            self._status_id = self._status_id or uuid.uuid4().hex
            self.display(data, transient={"display_id": self._status_id}, update=update)

    def display(
        self,
        data: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        transient: Mapping[str, Any] | None = None,
        *,
        update: bool = False,
    ) -> None:
        """Show rich output, or update the one with the same `display_id`."""
        metadata, transient = {**_widget_metadata(data), **(metadata or {})}, dict(transient or {})
        if self._publisher is not None:
            self._publisher.publish(data=dict(data), metadata=metadata, transient=transient, update=update)
            return
        # JSON carries the bytes of images in base64.
        coded = {kind: base64.b64encode(v).decode() if isinstance(v, bytes) else v for kind, v in data.items()}
        content = {"data": coded, "metadata": metadata, "transient": transient}
        self._send("update_display_data" if update else "display_data", content)

    def comm(self, record: messages.CommMessage) -> None:
        """Send a message of a comm to the page; it answers a message of the page, or else the cell."""
        self.call(self._publish_comm, record)

    def _publish_comm(self, record: messages.CommMessage) -> None:
        content = {"comm_id": record.comm_id, "data": record.data}
        if record.kind == "comm_open":
            content["target_name"] = record.target_name
        self._kernel.session.send(
            self._kernel.iopub_socket,
            record.kind,
            content,
            metadata=record.metadata,
            parent=self.message if record.parent is None else {"header": record.parent},
            ident=f"comm-{record.comm_id}".encode("ascii"),
            buffers=list(record.buffers),
        )

    def clear_output(self, *, wait: bool = False) -> None:
        """Clear the cell's output; the live area comes back with its next change."""
        if self._publisher is not None:
            self._publisher.clear_output(wait)
            return
        with self._lock:
            self._send("clear_output", {"wait": wait})
            self._status_id = self._status_text = ""

    def close(self) -> None:
        """Remove the live area, and wait until all is sent; later output is still taken."""
        self.status("")
        if self._has_unsent:
            self.flush()

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function that publishes, in ipykernel's own thread."""
        self._loop.add_callback(self._call_after_earlier, function, *args)
        self._has_unsent = True  # After the call, so that a flush of another thread in between hides nothing.

    def _call_after_earlier(self, function: Callable[..., object], *args: Any) -> None:
        while self._earlier:
            self._earlier.pop(0)()
        function(*args)

    def flush(self) -> None:
        """Wait until all is sent, by other sinks too."""
        self._has_unsent = False
        sent: Latch[None] = Latch()
        self._loop.add_callback(sent.set)
        sent.wait(CLOSE_BUDGET)

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        # In ipykernel's own thread: it opens a socket for each other thread that publishes, and closes it
        # only seconds after that thread has ended.
        with self._moving:
            if self._held is None:
                self.call(self._publish, kind, content, self.message)
                return
            last_kind, last = self._held[-1] if self._held else ("", {})
            if kind == last_kind == "stream" and last["name"] == content["name"]:
                last["text"] += content["text"]
            else:
                self._held.append((kind, content))

    def _publish(self, kind: str, content: dict[str, Any], parent: Any) -> None:
        kernel = self._kernel
        topic = kernel._topic(kind)  # noqa: SLF001 - as ipykernel's own publishers do
        if not (self._hooks and "display" in kind):
            kernel.session.send(kernel.iopub_socket, kind, content, parent=parent, ident=topic)
            return
        message = kernel.session.msg(kind, content, parent=parent)
        for hook in self._hooks:
            message = hook(message)
            if message is None:
                return
        kernel.session.send(kernel.iopub_socket, message, ident=topic)


def _redirected(file: Any) -> TextIO | None:
    """Return the file if it is not one of the kernel's own streams."""
    iostream: Any = sys.modules.get("ipykernel.iostream")
    return None if isinstance(file, iostream.OutStream) else file


def _widget_metadata(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a widget's bundle: on Colab, where its page finds what draws the widget."""
    if WIDGET_VIEW not in data or "google.colab.output" not in sys.modules:
        return {}
    try:
        from anywidget._util import get_repr_metadata
    except ImportError:  # The name is not public.
        return {}
    return get_repr_metadata()


def _warn_of_broken_ipykernel() -> None:
    version = getattr(sys.modules.get("ipykernel"), "__version__", "")
    if version in BROKEN_IPYKERNELS:
        warnings.warn(
            f"ipykernel {version} cannot show rich output that comes from a thread, which a run needs. "
            "Type %pip install 'ipykernel>=7.1' and restart the kernel.",
            RuntimeWarning,
            stacklevel=4,
        )


# --------------------------------------------------------------------------------------------------------------------
# The outputs that a run leaves in the notebook; they need neither a kernel nor a widget to be seen.


Bundle = dict[str, str]
"""One output: its representations by MIME type."""
NOTHING: Bundle = {"text/html": "", "text/plain": ""}
"""An output that takes no room."""
MISSING = (
    'body:not(:has([data-nbl-live="{key}"])) .jp-OutputArea-child:not(:has([class^="nbp-kept-"])):has('
    '+ .jp-OutputArea-child [data-nbl-kept="{key}"]) {{ display: none }}'
)
"""Style sheet that hides the place of a monitor that the page does not have; the monitor of a panel has no place of its
own, and the output above is the picture of the panel."""
SHORT = 10.0
"""Seconds up to which a run without curves leaves one line."""


def has_picture(snapshot: RunSnapshot, curves: Curves) -> bool:
    """Return True if the run has curves or phases to draw, or is long enough for a drawing of its memory and load."""
    return bool(len(curves) or snapshot.phases or (snapshot.seconds >= SHORT and snapshot.usage))


def picture_of(
    snapshot: RunSnapshot,
    curves: Curves,
    key: str = "",
    pictures: Sequence[RunPicture] = (),
    options: PlotOptions | None = None,
) -> tuple[Bundle, Bundle]:
    """Return two outputs, the tables and the drawing, whose curves are drawn with these options.

    With the key of a monitor, its page shows the monitor in place of both for as long as the kernel lives. The saved
    notebook holds the picture alone and no widget, which would be missing without its kernel.

    JupyterLab shows an SVG output of a notebook that it does not trust as text, and an image inside HTML as it is.
    Front ends without HTML take the SVG itself.
    """
    from notebook_launcher.drawing.run_picture import picture_html, static_html, static_svg

    tables = _marked(static_html(snapshot, curves, pictures=pictures), "explore", key)
    table = {"text/html": tables, "text/plain": _words(snapshot)}
    if not has_picture(snapshot, curves):
        return table, NOTHING
    drawing, words = static_svg(snapshot, curves, options), f"{snapshot.name}: curves and timeline"
    picture = _marked(picture_html(drawing, words), "cover", key)
    return table, {"text/html": picture, "image/svg+xml": drawing, "text/plain": words}


def final_outputs(
    line: str,
    snapshot: RunSnapshot,
    curves: Curves,
    *,
    is_raised: bool,
    key: str,
    pictures: Sequence[RunPicture] = (),
    options: PlotOptions | None = None,
) -> list[Bundle]:
    """Return the outputs that a run leaves at the end of its cell; `line` is its end in words.

    If the cell raises the run's exception, that describes a failure in full. `key`: of the monitor that may be explored
    in place of the picture; empty: there is none. `options`: of the curves; None: the usual ones.
    """
    failed = snapshot.state == "failed"
    if (failed and is_raised) or not (failed or snapshot.seconds >= SHORT or has_picture(snapshot, curves) or pictures):
        folded = dataclasses.replace(snapshot, failures=(), error="") if failed else snapshot
        return [{**_folded_picture(folded, curves, line, key), "text/plain": line}]
    return [bundle for bundle in picture_of(snapshot, curves, key, pictures, options) if bundle is not NOTHING]


def _words(snapshot: RunSnapshot) -> str:
    from notebook_launcher.drawing.run_picture import static_text

    return bounded(static_text(snapshot), f"open_run({snapshot.id!r}).report() has more")


def _marked(html: str, name: str, key: str) -> str:
    return f'<div data-nbl-{name}="{key}">{html}</div>' if key else html


def kept_picture(snapshot: RunSnapshot, curves: Curves, key: str, *, opened: bool = False) -> Bundle:
    """Return the folded picture of a run, which the page hides while it has the monitor of this key.

    Its style sheet hides the output above it, the monitor, where that is missing. JupyterLab shows "model not found"
    there if the notebook was saved after a reload of the page, which no longer receives the outputs of a busy cell, or
    while it showed the monitor of a run that was over.
    """
    bundle = _folded_picture(snapshot, curves, opened=opened)
    html = f"<style>{MISSING.format(key=key)}</style>{bundle['text/html']}" if key else bundle["text/html"]
    return {**bundle, "text/html": _marked(html, "kept", key)}


def line_of(snapshot: RunSnapshot) -> Bundle:
    """Return the first line of a run's picture, for front ends that cannot draw the monitor above the picture."""
    from notebook_launcher.drawing.run_picture import headline

    return {"text/html": f"<div>{escape(headline(snapshot))}</div>", "text/plain": _words(snapshot)}


def _folded_picture(
    snapshot: RunSnapshot, curves: Curves, line: str = "", key: str = "", *, opened: bool = False
) -> Bundle:
    """Return the whole picture as one output that shows one line until it is clicked."""
    from notebook_launcher.drawing.run_picture import headline, static_html
    from notebook_launcher.drawing.tables import folded

    if not (line or snapshot.is_over):  # A notebook that is saved now says this for ever.
        line = f"{headline(snapshot)}: a picture after {format_elapsed(snapshot.seconds)}, when the end was not known"
    page = _marked(static_html(snapshot, curves, picture=has_picture(snapshot, curves)), "explore", key)
    return {"text/html": folded(line or headline(snapshot), page, opened=opened), "text/plain": _words(snapshot)}
