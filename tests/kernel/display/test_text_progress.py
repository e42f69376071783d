"""The line of progress in a terminal, where there are no widgets."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import unicodedata
from typing import TYPE_CHECKING

from tests.support.kernels import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def screen(written: str) -> list[str]:
    """Return the lines that stand on the terminal in the end."""
    lines = (line.removesuffix("\r") for line in written.split("\n"))
    kept = (re.sub(r".*\r\x1b\[K", "", line) for line in lines)
    return [line for line in (re.sub(r"\x1b[\[\]][^a-zA-Z]*[a-zA-Z]", "", line) for line in kept) if line.strip()]


LONG = """
import os, time
from notebook_launcher import notebook_launch, report, track

def 訓練する(done):
    for step in track(range(100_000), description="第一エポックのとても長い説明 and many more words than a line holds"):
        report(step=step, loss=1.0)
        time.sleep(0.01)
        if os.path.exists(done):
            break

if __name__ == "__main__":
    notebook_launch(訓練する, 2, args=(os.environ["DONE"],), devices="cpu")
    print("the end")
"""
REDRAWN = "\r\x1b[K"


def columns_of(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def test_line_of_progress_never_wraps_also_when_the_terminal_is_resized(tmp_path: Path) -> None:
    program, done = tmp_path / "program.py", tmp_path / "done"
    program.write_text(LONG, encoding="utf-8")
    pid, terminal = pty.fork()
    if pid == 0:
        ours = {"PYTHONPATH": str(ROOT), "NOTEBOOK_LAUNCHER_RUNS": "off", "TERM": "xterm", "DONE": str(done)}
        environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        os.execve(sys.executable, [sys.executable, str(program)], {**environment, **ours})
    resize(terminal, 80)
    written = b""
    with contextlib.suppress(OSError):  # EIO: nobody holds the terminal any more.
        while piece := os.read(terminal, 65536):
            written += piece
            num_drawn = written.count(f"{REDRAWN}訓練".encode())
            if num_drawn == 2:
                resize(terminal, 40)
            if num_drawn >= 5:
                done.touch()
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    text = written.decode()
    drawn = [line for line in text.split(REDRAWN)[1:] if line.startswith("訓練する: 第一") and "\n" not in line]
    assert max(map(columns_of, drawn)) in (78, 79)  # A character of two columns may leave one.
    assert {columns_of(line) for line in drawn[-2:]} <= {38, 39}
    first, *_, last, end = screen(text)
    assert first.startswith("訓練する: 2 CPU ranks")
    assert last.startswith("訓練する: done in ")
    assert end == "the end"
    assert len(screen(text)) == 3


def resize(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
