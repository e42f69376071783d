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


def test_text_keeps_the_name_of_its_stream(kernel):
    outcome = kernel.execute(MAKE + "sink.text('stderr', 'e\\n'); sink.text('stdout', 'o\\n')")
    assert outcome.streams == [("stderr", "e\n"), ("stdout", "o\n")]


def test_thread_writes_into_the_cell_that_launched_even_after_its_end(kernel):
    late = """
import threading
go = threading.Event()
def later():
    go.wait()
    sink.text("stdout", "late\\n")
    sink.display({"text/plain": "figure", "image/png": b"\\x89PNG"})
thread = threading.Thread(target=later); thread.start()
"""
    first = kernel.execute(MAKE + late)
    second = kernel.execute("go.set(); thread.join()")
    first = kernel.wait(first.msg_id, until=lambda outcome: outcome.displays)
    assert first.stdout == "late\n"
    assert first.displays[0]["data"] == {"text/plain": "figure", "image/png": "iVBORw=="}
    assert not second.streams


def test_live_area_is_one_display_that_is_emptied_at_the_end(kernel):
    outcome = kernel.execute(MAKE + "for text in ('1 %', '2 %', '2 %'): sink.status(text)\nsink.close(); sink.close()")
    (display,) = outcome.displays
    assert display["data"] == {"text/plain": "1 %"}
    assert [update["data"]["text/plain"] for update in outcome.updates] == ["2 %", ""]
    assert {update["transient"]["display_id"] for update in outcome.updates} == {display["transient"]["display_id"]}


def test_no_live_area_is_sent_without_a_status(kernel):
    assert not kernel.execute(MAKE + "sink.status(''); sink.close()").messages[2:]


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


def test_capture_gets_the_output(kernel):
    work = "sink.text('stdout', 'o\\n'); sink.text('stderr', 'e\\n')\nsink.status('bar'); sink.html('<b>', 'rich')"
    captured = kernel.execute("%%capture box\n" + MAKE + work)
    assert not captured.streams + captured.displays
    assert kernel.execute("(box.stdout, box.stderr, box.outputs[0].data)").result == (
        "('o\\n', 'e\\n', {'text/html': '<b>', 'text/plain': 'rich'})"
    )


def test_redirect_stdout_gets_standard_output_alone(kernel):
    outcome = kernel.execute(
        "import contextlib, io\nbox = io.StringIO()\nwith contextlib.redirect_stdout(box):\n    "
        + MAKE.replace("\n", "\n    ").rstrip()
        + "\nsink.text('stdout', 'o\\n'); sink.text('stderr', 'e\\n')\nbox.getvalue()"
    )
    assert outcome.result == "'o\\n'"
    assert outcome.streams == [("stderr", "e\n")]


def test_ask_gets_the_answer(kernel):
    asked = []

    def answer(prompt, password):
        asked.append((prompt, password))
        return "yes"

    asking = "ask('[rank 1] sure? ') + ask('key: ', password=True)"
    code = f"from notebook_launcher.kernel.display.questions import ask\n{asking}"
    assert kernel.execute(code, answer_input=answer).result == "'yesyes'"
    assert asked == [("[rank 1] sure? ", False), ("key: ", True)]


def test_ask_explains_that_the_front_end_cannot_be_asked(kernel):
    outcome = kernel.execute("from notebook_launcher.kernel.display.questions import ask\nask('[rank 1] sure? ')")
    assert outcome.error.startswith("EOFError: no answer to '[rank 1] sure? ': this front end cannot ask for input")


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
