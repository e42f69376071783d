"""Two fresh interpreters: the `__main__` of one is a kernel's, that of the other a rank's.

A test runs a small notebook in the first, and the notebook calls its functions in the second.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from notebook_launcher import travel
from notebook_launcher.messaging.channel import Channel, channel_pair
from notebook_launcher.travel.changed_modules import stale_modules

ROOT = Path(__file__).resolve().parents[2]


class Rank:
    """An interpreter that runs calls, and the kernel's end of the channel to it."""

    def __init__(self) -> None:
        self._channel, theirs = channel_pair()
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import {__name__} as t; t.serve({theirs.fileno()})"],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def call(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        parcel = travel.pack_call(travel.FunctionCall(fn, args, kwargs))
        self._channel.send("call", [parcel.fileno()])
        parcel.close()
        received = self._channel.receive()
        assert received is not None
        outcome, fds = received
        if outcome == "returned":
            return travel.unpack_value(fds[0])
        exc = travel.unpack_exception(fds[0]) if fds else None
        raise exc or RuntimeError(outcome)

    def close(self) -> None:
        self._channel.close()
        self._process.wait()


def stale(fn: Any) -> list[str]:
    """Return the files that a function uses and that have changed since the notebook imported them."""
    with open(travel.pack_call(travel.FunctionCall(fn, (), {})).detach(), "rb") as parcel:
        return stale_modules(parcel.fileno())


def serve(fd: int) -> None:
    channel = Channel(socket.socket(fileno=fd))
    while (received := channel.receive()) is not None:
        outcome, parcel = "returned", None
        try:
            call, _ = travel.unpack_call(received[1][0])
            parcel = travel.pack_value(call.fn(*call.args, **call.kwargs))
        except BaseException as exc:
            outcome, parcel = f"raised {exc!r}", travel.pack_exception(exc)
        channel.send(outcome, [] if parcel is None else [parcel])
        if parcel is not None:
            os.close(parcel)


def notebook(code: str, folder: Path | None = None) -> None:
    """Run the cells of a notebook with a rank at hand; fails with what they printed."""
    script = f"import {__name__} as t\nrank = t.Rank()\n{textwrap.dedent(code)}\nrank.close()\n"
    paths = [*([] if folder is None else [str(folder)]), str(ROOT)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
