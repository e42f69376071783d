"""Output lands in the cell that launched, with every supported ipykernel, and in a terminal too."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from notebook_launcher.kernel.display.questions import ask
from notebook_launcher.kernel.display.sink import make_sink
from tests.support.kernels import ROOT, Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

MAKE = "from notebook_launcher.kernel.display.sink import *\nsink = make_sink()\n"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as running:
        yield running


def test_text_comes_after_the_cells_own_output(kernel):
    outcome = kernel.execute("print('before')\n" + MAKE + "sink.text('stdout', 'after\\n'); sink.close()\nprint('end')")
    assert outcome.stdout == "before\nafter\nend\n"


def test_live_area_is_one_display_that_is_emptied_at_the_end(kernel):
    outcome = kernel.execute(MAKE + "for text in ('1 %', '2 %', '2 %'): sink.status(text)\nsink.close(); sink.close()")
    (display,) = outcome.displays
    assert display["data"] == {"text/plain": "1 %"}
    assert [update["data"]["text/plain"] for update in outcome.updates] == ["2 %", ""]
    assert {update["transient"]["display_id"] for update in outcome.updates} == {display["transient"]["display_id"]}


def test_live_area_is_sent_again_after_clear_output(kernel):
    outcome = kernel.execute(MAKE + "sink.status('1 %'); sink.clear_output(wait=True); sink.status('1 %')")
    assert outcome.of("clear_output") == [{"wait": True}]
    first, second = outcome.displays
    assert first["transient"] != second["transient"]


def test_display_is_updated_by_its_id(kernel):
    outcome = kernel.execute(
        MAKE
        + "sink.display({'text/plain': 'a'}, {'m': 1}, {'display_id': 'x'})\n"
        + "sink.display({'text/plain': 'b'}, transient={'display_id': 'x'}, update=True)\n"
        + "sink.html('<b>t</b>', 't')"
    )
    assert outcome.displays[0] == {
        "data": {"text/plain": "a"},
        "metadata": {"m": 1},
        "transient": {"display_id": "x"},
    }
    assert outcome.updates[0]["data"] == {"text/plain": "b"}
    assert outcome.displays[1]["data"] == {"text/html": "<b>t</b>", "text/plain": "t"}


def test_ask_explains_that_standard_input_has_ended(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(EOFError, match=r"no answer to 'name\? ': standard input has ended\. Pass the value"):
        ask("name? ")
    with pytest.raises(EOFError, match=r"has ended\. Switch breakpoints off with env="):
        ask("(rank 1 pdb) ")


def test_broken_versions_of_ipykernel_give_a_warning(kernel):
    outcome = kernel.execute(
        "import ipykernel, warnings\nversion, ipykernel.__version__ = ipykernel.__version__, '7.0.1'\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n    from notebook_launcher.kernel.display.sink import make_sink\n"
        "    make_sink()\nipykernel.__version__ = version\nstr(caught[0].message)"
    )
    assert "ipykernel 7.0.1 cannot show rich output that comes from a thread" in outcome.result


def test_plain_python_writes_lines_and_no_live_area():
    sink = make_sink()
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        sink.status("10 %")
        sink.text("stdout", "o\n")
        sink.text("stderr", "e\n")
        sink.display({"text/plain": "Figure"})
        sink.html("<b>t</b>", "t")
        sink.clear_output()
        sink.close()
    assert (out.getvalue(), err.getvalue()) == ("o\nFigure\nt\n", "e\n")


def test_terminal_has_the_live_line_below_the_text():
    program = MAKE + "sink.status('10 %\\n20 %'); sink.text('stdout', 'line\\n'); sink.close(); print('end')"
    ours, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "40"}
    with open(ours, "rb", buffering=0) as terminal:
        subprocess.run([sys.executable, "-c", program], stdout=theirs, env=env, check=True)
        os.close(theirs)
        written = b""
        with contextlib.suppress(OSError):  # EIO: the other end of a terminal was closed
            while data := terminal.read(1000):
                written += data
    start = "\r\x1b[K"
    assert written.decode() == f"{start}10 % | 20 %{start}line\r\n{start}10 % | 20 %{start}end\r\n"
