"""An exception as a cell shows it, in HTML."""

from __future__ import annotations

import html
import re
import traceback

from notebook_launcher.errors import RemoteTraceback
from notebook_launcher.ipython_shell import running_shell
from notebook_launcher.kernel.failures.failure import Failure

__all__ = ["ansi_to_html", "exception_html"]

SELECT = re.compile(r"\x1b\[([\d;]*)m")
OTHER_CONTROLS = re.compile(r"\x1b\[[\d;?]*[A-Za-ln-z]|\x1b[^\[]|[\x00-\x08\x0b-\x1f]")
COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


def exception_html(error: BaseException) -> str:
    """Return the traceback that the running shell would print; without a shell, Python's.

    Of a failed run, it has one line in place of the rank's traceback, which the monitor has.
    """
    text = _text(error)
    failures = getattr(error, "failures", None)  # Perhaps an attribute of the user's own.
    first = failures[0] if isinstance(failures, tuple) and failures else None
    if isinstance(first, Failure) and first.traceback.strip():
        text = text.replace(first.traceback.rstrip(), first.summary)
    return f'<pre class="nbp-traceback" tabindex="0">{ansi_to_html(text.strip())}</pre>'


def ansi_to_html(text: str) -> str:
    """Return escaped HTML with the text's colours and bold as classes; other control sequences are dropped."""
    pieces, classes = [], set[str]()
    for at, piece in enumerate(SELECT.split(text)):
        if at % 2:
            classes = _select(classes, piece)
            continue
        clean = html.escape(OTHER_CONTROLS.sub("", piece))
        if clean:
            pieces.append(f'<span class="{" ".join(sorted(classes))}">{clean}</span>' if classes else clean)
    return "".join(pieces)


def _select(classes: set[str], codes: str) -> set[str]:
    numbers = [int(code or 0) for code in codes.split(";")]
    if numbers[0] == 38:  # a colour by number: the first 16 of 256 are the named ones
        numbers = [30 + numbers[2] % 8] if len(numbers) > 2 and numbers[1] == 5 and numbers[2] < 16 else []
    for number in numbers:
        if number == 0:
            classes = set()
        elif number == 1:
            classes = {*classes, "nbp-bold"}
        elif number in range(30, 38) or number in range(90, 98):
            others = {name for name in classes if not name.startswith("nbp-ansi-")}
            classes = {*others, f"nbp-ansi-{COLOURS[number % 10]}"}
    return classes


def _text(error: BaseException) -> str:
    if isinstance(error.__cause__, RemoteTraceback):
        return str(
            error.__cause__
        )  # The cause is complete; a cell would add only the frames that raised it in the kernel.
    if (render := getattr(error, "_render_traceback_", None)) is not None:
        return "\n".join(render())
    shell = running_shell()
    if shell is not None:
        try:
            lines = shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__)
            return str(shell.InteractiveTB.stb2text(lines))
        except Exception:  # noqa: S110 - an error of the shell must not hide this one
            pass
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))
