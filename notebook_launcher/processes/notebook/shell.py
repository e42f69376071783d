"""IPython's shell in a rank: only the parts that `display()`, figures and tables need.

Importing this module imports IPython, so `frontend.py` imports it only when it is needed.
"""

from __future__ import annotations

import atexit
import builtins
import sys
import types
from typing import TYPE_CHECKING, Any, cast

from IPython.core import autocall, interactiveshell
from IPython.core.displaypub import DisplayPublisher
from traitlets.config import Config

from notebook_launcher.messaging import messages
from notebook_launcher.processes.rank.rank_process import flush

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from notebook_launcher.processes.notebook.rank_widgets import RankWidgets

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class RankPublisher(DisplayPublisher):
    """Sends rich output to the kernel as records."""

    send: Callable[[object], None] | None = None
    widgets: RankWidgets | None = None

    def publish(  # signatures differ between versions of IPython
        self,
        data: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        source: Any = None,  # noqa: ARG002
        *,
        transient: Mapping[str, Any] | None = None,
        update: bool = False,
        **_ignored: Any,
    ) -> None:
        """Send a bundle; a widget that the page cannot show is sent as text."""
        bundle = self.presentable(data)
        if self.widgets is not None and (capture := self.widgets.capture) is not None:
            capture.display(bundle, metadata or {})
            return
        record = messages.Display(
            data=bundle, metadata=dict(metadata or {}), transient=dict(transient or {}), update=update
        )
        try:
            self._send(record)
        except OSError:
            raise
        except Exception:  # a bundle that cannot be pickled is shown as text
            text = {"text/plain": str(bundle.get("text/plain", ""))}
            self._send(messages.Display(data=text, metadata={}, transient=record.transient, update=update))

    def clear_output(self, wait: bool = False) -> None:
        """Send the wish to clear the cell's output."""
        if self.widgets is not None and (capture := self.widgets.capture) is not None:
            capture.clear(wait=bool(wait))
            return
        self._send(messages.ClearOutput(wait=bool(wait)))

    def presentable(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return a bundle as the page can show it: a widget that it cannot draw as text with the reason."""
        view = data.get(WIDGET_VIEW)
        if view is None or self.widgets is None or self.widgets.reveal(view["model_id"]):
            return dict(data)
        bundle = {kind: value for kind, value in data.items() if kind != WIDGET_VIEW}
        return bundle | {"text/plain": f"{bundle.get('text/plain', 'widget')}\n({self.widgets.why_text})"}

    def _send(self, record: object) -> None:
        flush()  # Text that was printed earlier must reach the kernel first.
        if self.send is not None:
            self.send(record)


class RankShell(interactiveshell.InteractiveShell):
    """A shell that runs no cells: without history, profile folder, prompts or a `__main__` of its own."""

    profile_dir = types.SimpleNamespace(location="")

    def init_ipython_dir(self, ipython_dir: Any) -> None:
        """Touch no folder."""

    def init_profile_dir(self, profile_dir: Any) -> None:
        """Touch no folder."""

    def init_virtualenv(self) -> None:
        """Leave `sys.path` alone: it is the kernel's already."""

    def init_sys_modules(self) -> None:
        """Leave `sys.modules["__main__"]` alone."""

    def init_prompts(self) -> None:
        """Set no `sys.ps1`: Lightning takes it for the sign of an interactive session."""

    def init_completer(self) -> None:
        """Build no completer, because no user types in a rank."""

    def enable_gui(self, gui: Any = None) -> None:
        """Start no event loop: `%matplotlib inline`, with which notebooks begin, asks for one."""

    def init_display_pub(self) -> None:
        """Publish by records."""
        self.display_pub = _publisher(self)
        self.configurables.append(self.display_pub)  # type: ignore[arg-type]


def _publisher(shell: Any) -> RankPublisher:
    return RankPublisher(parent=shell, shell=shell)  # type: ignore[no-untyped-call]


def build(send: Callable[[object], None] | None, widgets: RankWidgets | None = None) -> None:
    """Make the process's shell; starts no thread and opens no file."""
    config = Config()
    config.HistoryManager.enabled = False
    config.HistoryManager.hist_file = ":memory:"
    config.InteractiveShell.colors = config.RankShell.colors = "nocolor"
    # IPython makes a database in the profile folder, which would be a rank's working directory: 8 and older at once, 9
    # where `%cd` or `%bookmark` writes to it.
    vars(interactiveshell)["PickleShareDB"] = lambda _path: {}
    had_flag, path = hasattr(builtins, "__IPYTHON__"), [*sys.path]
    shell = RankShell.instance(config=config)
    shell.db = {}
    publisher = cast("RankPublisher", shell.display_pub)
    publisher.send, publisher.widgets = send, widgets
    sys.path[:] = path
    atexit.unregister(shell.atexit_operations)
    if not had_flag:
        del vars(builtins)["__IPYTHON__"]


def disconnect(shell: Any, send: Callable[[object], None], ask: Callable[..., str], widgets: RankWidgets) -> None:
    """Disconnect a shell that a fork inherited from the kernel's sockets, which a rank must not use."""
    shell.display_pub = _publisher(shell)
    shell.display_pub.send, shell.display_pub.widgets = send, widgets
    # ipywidgets' Output, in which rich draws its bars, sets and restores the parent message of all output.
    shell.set_parent = lambda _parent: None
    # IPython's `exit()` and `quit()` set a flag that has no reader in a rank, and return.
    leaving = [name for name, value in shell.user_ns.items() if isinstance(value, autocall.ExitAutocall)]
    shell.user_ns.update(dict.fromkeys(leaving, sys.exit))
    sys.displayhook = sys.__displayhook__
    for name in ("ps1", "ps2", "ps3"):
        if hasattr(sys, name):
            delattr(sys, name)
    kernel = getattr(shell, "kernel", None)
    if kernel is not None:
        # Everything that ipykernel sends passes through `send`: comms, statuses, the display hook, its streams.
        kernel.session.send = _print_streams
        type(kernel)._input_request = lambda _self, prompt, *_args, password=False: ask(prompt, password=password)
    # The kernel shows its figures itself.
    if (helpers := sys.modules.get("matplotlib._pylab_helpers")) is not None:
        helpers.Gcf.figs.clear()
    if (backend := sys.modules.get("matplotlib_inline.backend_inline")) is not None:
        backend.show._to_draw = []
        backend.show._draw_called = False


def _print_streams(_socket: Any, message: Any, content: Any = None, *_args: Any, **_options: Any) -> None:
    """Replace `Session.send`: print text that was written to a stream of the kernel, and drop other messages."""
    if not isinstance(message, str):
        message, content = message["msg_type"], message["content"]
    if message == "stream":
        file = sys.stderr if content["name"] == "stderr" else sys.stdout
        file.write(content["text"])
