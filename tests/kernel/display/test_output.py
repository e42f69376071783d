"""What ranks write, show and ask, in the cell that launched and in a terminal, and the picture at the end of a run."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import struct
import sys
import termios
import time
import unicodedata
from textwrap import indent
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher.kernel.display.questions import Question, Questions, ask
from notebook_launcher.kernel.display.sink import make_sink
from notebook_launcher.kernel.latch import Latch
from notebook_launcher.messaging.messages import InputRequest
from tests.support.first_cell import DEFINITIONS
from tests.support.kernels import ROOT
from tests.support.warm_kernels import evaluate, run_cell

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.kernels import Kernel, Outcome


KERNEL_CODE = DEFINITIONS + "def rank(): return int(os.environ['RANK'])"


def test_every_line_is_whole_labelled_and_in_order(kernel: Kernel) -> None:
    code = "def talk():\n    for i in range(300): print('a', rank(), i)\nnotebook_launch(talk, 2, monitor=False)"
    outcome = run_cell(kernel, code)
    lines = [re.fullmatch(r"\[rank (\d)\] a (\d) (\d+)", line) for line in outcome.stdout.splitlines()[1:-1]]
    assert len(lines) == 600
    assert all(lines)
    for rank in "01":
        assert [int(line[3]) for line in lines if line and line[1] == line[2] == rank] == list(range(300))


def test_loop_of_equal_launches_shows_its_first_line_once(kernel: Kernel) -> None:
    code = "def objective(num):\n    def train(): pass\n    notebook_launch(train, num)\nobjective(2)"
    for _ in range(2):
        outcome = kernel.execute(f"{code}; objective(2); objective(1); objective(2)")
        lines = outcome.stdout.splitlines()
        heads = [line.partition(" CPU")[0] for line in lines if "CPU rank" in line]
        assert heads == ["train: 2", "train: 1", "train: 2"], outcome.stdout
        assert sum(line.startswith("train: done in ") for line in lines) == 4


def test_flood_of_lines_does_not_stall_the_run(kernel: Kernel) -> None:
    began = time.monotonic()
    outcome = run_cell(
        kernel,
        "def flood():\n    for i in range(100_000): print('line', i)\n"
        "run = launch(flood, 2); results = run.result()\n"
        "print([(log.count('\\n'), log.endswith('line 99999\\n')) for log in (run.logs(0), run.logs(1))]); del run",
    )
    seconds = time.monotonic() - began
    assert outcome.stdout.endswith("[(100000, True), (100000, True)]\n")
    assert " of ranks 0, 1 left out here; run.logs(rank) has all ..." in outcome.stdout
    assert len(outcome.streams) < 10 + 5 * seconds
    assert 2_000 < outcome.stdout.count("\n") < 10_000  # Equal lines of both ranks are one line here.
    assert sum(len(json.dumps(text)) for _, text in outcome.streams) < 1_000_000
    assert any("more lines; the newest:\n" in content["data"]["text/plain"] for content in outcome.updates)


def test_flood_of_a_run_without_a_handle_names_the_call_that_reads_all_of_it(kernel: Kernel) -> None:
    outcome = kernel.execute(
        "def flood():\n    for i in range(20_000): print('line', i)\nresults = notebook_launch(flood, 2, monitor=False)"
    )
    (where,) = re.findall(r"left out here; (open_run\('.+'\)\.logs\(rank\)) has all", outcome.stdout)
    logs = where.replace("(rank)", "(1)")
    assert evaluate(kernel, f"{logs} == ''.join(f'line {{i}}\\n' for i in range(20_000))")


def shown_at_last(kernel: Kernel, code: str) -> list[str]:
    """Return what a cell that clears its output shows at the end."""
    shown: list[str] = []
    clears = False
    for message in run_cell(kernel, code).messages:
        content = message["content"]
        if message["msg_type"] == "clear_output":
            clears = True
            continue
        if message["msg_type"] == "stream":
            piece = content["text"]
        elif message["msg_type"] == "display_data" and not content["transient"].get("display_id"):
            piece = content["data"].get("text/html") or content["data"]["text/plain"] + "\n"
        else:
            continue  # The live area, too, which is removed at the end.
        shown = [] if clears else shown
        clears = False
        shown.append(piece)
    return "".join(shown).splitlines()


SHOWN: dict[str, list[str]] = {
    "from IPython.display import display, HTML\n"
    "for i in range(20): print('before', i); display(HTML(f'<b>{i}</b>\\n'))": [
        line for i in range(20) for line in (f"before {i}", f"<b>{i}</b>")
    ],
    "from IPython.display import clear_output\nfor i in range(30): clear_output(wait=True); print('epoch', i)": [
        "epoch 29"
    ],
    "print('no end', end='')": ["no end"],
    "print('\\rbar', end='')": ["bar"],
    "print('\\rover\\nnext', end='')": ["over", "next"],
    "print('windows\\r\\nlast', end='')": ["windows", "last"],
}
"""By what a rank does: the lines that its cell holds in the end, before the launcher's last one."""


@pytest.mark.parametrize("body", SHOWN)
def test_text_and_displays_keep_their_order_also_after_clear_output_and_lines_without_an_end(
    kernel: Kernel, body: str
) -> None:
    *lines, last = shown_at_last(kernel, f"def f():\n{indent(body, '    ')}\nnotebook_launch(f, 1, monitor=False)")
    assert [line for line in lines if "1 CPU rank" not in line] == SHOWN[body]
    assert last.startswith("f: done in ")


def test_input_and_breakpoint_ask_in_the_cell(kernel: Kernel) -> None:
    prompts = []

    def answer(prompt: str, password: bool) -> str:  # how the harness calls it
        prompts.append((prompt, password))
        return {"(rank 1 pdb) ": "p secret" if len(prompts) < 4 else "c"}.get(prompt, "Ada")

    outcome = kernel.execute(
        "def ask():\n"
        "    import getpass\n"
        "    if rank() == 0: return None\n"
        "    name = input('name? ')\n"
        "    secret = getpass.getpass('password: ')\n"
        "    breakpoint()\n"
        "    return name + secret\n"
        "print(notebook_launch(ask, 2, timeout=20)[1])",
        answer_input=answer,
    )
    assert outcome.error is None, outcome.traceback
    assert prompts[:2] == [("[rank 1] name? ", False), ("[rank 1] password: ", True)]
    assert {prompt for prompt, _ in prompts[2:]} == {"(rank 1 pdb) "}
    assert "[rank 1] 'Ada'" in outcome.stdout
    # From Python 3.13 on, breakpoint() stops at its own line and not at the next.
    stops = r"\(7\)ask\(\)\n\[rank 1\] -> return name \+ secret\n|\(6\)ask\(\)\n\[rank 1\] -> breakpoint\(\)\n"
    assert re.search(rf"\[rank 1\] > Cell In\[\d+\](?:{stops})", outcome.stdout)
    assert outcome.stdout.endswith("AdaAda\n")


def test_input_in_a_background_run_raises_eof_error(kernel: Kernel) -> None:
    outcome = kernel.execute("launch(lambda: input('name? '), 2).result()")
    assert (outcome.error or "").startswith("EOFError: rank ")
    assert "launched in the background, so no cell can answer. Use notebook_launch" in (outcome.error or "")


def test_output_lands_in_the_cell_that_launched(kernel: Kernel) -> None:
    first = kernel.start(
        "def slow():\n"
        "    print('first', flush=True)\n"
        "    while not os.path.exists(flag): time.sleep(0.01)\n"
        "    print('late', flush=True)\n"
        "import tempfile; flag = tempfile.mktemp()\n"
        "run = launch(slow, 2, monitor=False)"
    )
    kernel.wait(first)
    second = kernel.execute("open(flag, 'w').close(); run.wait(); os.remove(flag); print('second')")
    outcome = kernel.wait(first, until=lambda outcome: "done in" in outcome.stdout)
    assert "late" in outcome.stdout
    assert second.stdout == "second\n"


def test_timeout_and_restarts_are_reported(kernel: Kernel) -> None:
    outcome = run_cell(
        kernel,
        "def flaky():\n"
        "    print('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['TORCHELASTIC_MAX_RESTARTS'])\n"
        "    if os.environ['TORCHELASTIC_RESTART_COUNT'] != '2' and rank(): raise ValueError('flaky')\n"
        "    return rank()\n"
        "r = notebook_launch(flaky, 2, max_restarts=3); print(list(r), r.restarts, r.timed_out); r",
    )
    assert "flaky: attempt 1 failed after" in outcome.stdout
    assert "rank 1: ValueError: flaky; starting again (2 of 3 restarts)" in outcome.stdout
    assert outcome.stdout.endswith("[0, 1] 2 False\n")
    assert "restarted 2 times" in (outcome.result or "")
    kernel.execute("notebook_launch(lambda: 1 / 0, 2, max_restarts=1)")
    assert evaluate(kernel, "sys.last_value.results.restarts") == 1
    late = kernel.execute("notebook_launch(lambda: time.sleep(60), 2, timeout=0.3, max_restarts=5)")
    assert (late.error or "").startswith("RunTimeoutError: the run was stopped: it had not ended after timeout=0.3 s.")
    ended = evaluate(kernel, "sys.last_value.results.restarts, sys.last_value.results.timed_out, sys.last_value.rank")
    assert ended == (0, True, None)


def test_capture_magic_captures_the_ranks_output(kernel: Kernel) -> None:
    kernel.execute("%%capture captured\nnotebook_launch(hello, 2)")
    redirected = (
        "out, err = io.StringIO(), io.StringIO()\n"
        "with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err): notebook_launch(hello, 2)"
    )
    assert run_cell(kernel, redirected).stdout == ""
    for ours in ("captured.stdout, captured.stderr", "out.getvalue(), err.getvalue()"):
        stdout, stderr = evaluate(kernel, ours)
        assert "] out\n" in stdout
        assert "] err\n" in stderr


def test_cell_names_a_wait_once_and_its_end(kernel: Kernel) -> None:
    outcome = run_cell(
        kernel,
        "def train():\n"
        "    for _ in range(2):\n"
        "        if rank() == 1: time.sleep(1)\n"
        "        dist.all_reduce(torch.ones(1))\n"
        "notebook_launch(train, 2, hang_notice=0.3, monitor=False)",
    )
    assert outcome.stderr == ""
    told = [line for line in outcome.stdout.splitlines() if "waited" in line]
    assert len(told) == 2, told
    waited = r"waited [\d.]+ m?s in all_reduce \(Cell In\[\d+\], line 4\)"
    assert re.fullmatch(rf"rank 0 has {waited}; rank 1 is at line 3: if rank\(\) == 1: time\.sleep\(1\)", told[0])
    assert re.fullmatch(rf"rank 0 {waited}; the run continues", told[1])


def test_rank_that_asks_the_user_causes_no_hang_notice(kernel: Kernel) -> None:
    def answer(_prompt: str, _password: bool) -> str:  # how the harness calls it
        time.sleep(0.6)  # The user thinks, for much longer than a notice takes.
        return "me"

    outcome = kernel.execute(
        "def train():\n    if rank() == 1: input('name? ')\n    dist.barrier()\n"
        "notebook_launch(train, 2, hang_notice=0.1, monitor=False)",
        answer_input=answer,
    )
    assert outcome.error is None, outcome.traceback
    assert "waited" not in outcome.stdout


def test_matplotlib_backends_show_figures_of_ranks(module_kernel: Kernel, tmp_path: Path) -> None:
    """The kernel's inline backend opens files that stay open."""
    outcome = run_cell(
        module_kernel,
        f"""
        %matplotlib inline
        import matplotlib, matplotlib.pyplot as plt
        plt.plot([1, 2])  # A figure of the kernel's, which a rank must not show.
        def draw(backend):
            import matplotlib, matplotlib.pyplot as plt
            if backend:
                matplotlib.use(backend)
            figure = plt.figure()
            plt.plot([1, 2])
            plt.savefig(f"{tmp_path}/{{os.environ['RANK']}}.png")
            if backend:
                plt.close(figure)
        notebook_launch(draw, 2, args=(None,), start_method="fork", monitor=False)
        notebook_launch(draw, 2, args=("agg",), start_method="fork", monitor=False)
        plt.close("all")
        """,
    )
    assert len(outcome.displays) == 1
    assert "image/png" in outcome.displays[0]["data"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.png", "1.png"]


def run_seen(kernel: Kernel, code: str, *, has_audience: bool = True) -> Outcome:
    return kernel.wait(kernel.start(code, allow_stdin=has_audience))


def outputs(outcome: Outcome) -> list[tuple[str, Any]]:
    """Return what the cell holds in the end, without outputs that take no room: text, or a bundle."""
    kept: list[tuple[str, Any]] = []
    updated = {content["transient"]["display_id"]: content["data"] for content in outcome.updates}
    for message in outcome.messages:
        content = message["content"]
        if message["msg_type"] == "stream":
            kept.append(("text", content["text"]))
        elif message["msg_type"] == "display_data":
            data = updated.get(content["transient"].get("display_id"), content["data"])
            kept += [("picture", data)] if data.get("text/plain") else []
    return kept


@pytest.mark.parametrize("has_audience", [True, False], ids=["in a front end", "in a program"])
def test_short_run_leaves_one_line_that_opens_to_its_record_after_what_was_printed(
    module_kernel: Kernel, *, has_audience: bool
) -> None:
    code = (
        "def train():\n"
        "    if rank() == 0: print('first')\n"
        "    time.sleep(1.3)\n"
        "    if rank() == 0: print('last')\n"
        "notebook_launch(train, 2)"
    )
    outcome = run_seen(module_kernel, code, has_audience=has_audience)
    *texts, (kind, picture) = outputs(outcome)
    assert {kind for kind, _ in texts} == {"text"}
    assert "".join(text for _, text in texts).splitlines()[1:] == ["[rank 0] first", "[rank 0] last"]
    assert kind == "picture"
    assert picture["text/plain"].startswith("train: done in ")
    assert "\n" not in picture["text/plain"]
    assert picture["text/html"].startswith("<details")
    assert f">{picture['text/plain']}</summary>" in picture["text/html"]
    assert outcome.result == "Results of 2 ranks: all returned None"


def test_interrupt_while_the_monitor_is_made_stops_the_run_and_leaves_one_picture(module_kernel: Kernel) -> None:
    code = (
        "import ipywidgets, signal\n"
        "made = []\n"
        "def press(widget):\n"
        "    if type(widget).__name__ == 'Monitor':\n"
        "        made.append(1); os.kill(os.getpid(), signal.SIGINT)\n"
        "ipywidgets.Widget.on_widget_constructed(press)\n"
        "try:\n"
        "    notebook_launch(time.sleep, 2, args=(60,))\n"
        "finally:\n"
        "    ipywidgets.Widget.on_widget_constructed(None)"
    )
    outcome = run_seen(module_kernel, code)
    assert outcome.error == "KeyboardInterrupt: sleep was stopped"
    assert [kind for kind, _ in outputs(outcome) if kind == "picture"] == ["picture"]
    assert run_cell(module_kernel, "num = len(made); del made, press, ipywidgets; num").result == "1"


def test_run_with_curves_leaves_them_after_what_was_printed(module_kernel: Kernel) -> None:
    code = (
        "def train():\n"
        "    for i in range(13): time.sleep(0.1); report(loss=i)\n"
        "    print('last')\n"
        "results = notebook_launch(train, 2)"
    )
    text, (_, tables), (_, drawing) = outputs(run_seen(module_kernel, code))[-3:]
    assert text == ("text", "[ranks 0,1] last\n")
    assert tables["text/plain"].startswith("train on 2 ranks: done, ")
    assert not tables["text/html"].startswith("<details")
    assert "image/svg+xml" in drawing


def test_failure_that_a_cell_raises_is_shown_once_in_a_folded_picture(module_kernel: Kernel) -> None:
    code = (
        "def train():\n"
        "    for i in range(13): time.sleep(0.1); report(loss=i)\n"
        "    if rank() == 1: raise ValueError('boom ' + 'at last')\n"
        "    time.sleep(60)\n"
        "notebook_launch(train, 2)"
    )
    outcome = run_seen(module_kernel, code)
    _, picture = outputs(outcome)[-1]
    assert picture["text/plain"].startswith("train: failed after ")
    assert picture["text/plain"].endswith(" on rank 1")
    page = picture["text/html"]
    assert page.startswith("<details")
    assert "Traceback" not in page
    assert page.index("caused by rank 1") > page.index("ValueError: boom at last")
    assert outcome.traceback.count("boom at last") == 1


def test_failure_that_no_cell_raises_is_shown_in_full_by_its_picture(module_kernel: Kernel) -> None:
    code = (
        "def train():\n"
        "    time.sleep(1.3)\n"
        "    if rank() == 1: raise ValueError('boom ' + 'alone')\n"
        "    time.sleep(60)\n"
        "run = launch(train, 2)"
    )
    cell = module_kernel.start(code, allow_stdin=False)
    outcome = module_kernel.wait(cell, until=lambda outcome: "boom alone" in str(outputs(outcome)))
    _, picture = outputs(outcome)[-1]
    assert "\n    ValueError: boom alone\n" in picture["text/plain"]
    assert "boom alone" not in outcome.stdout
    assert module_kernel.execute("del run").error is None


MAKE = "from notebook_launcher.kernel.display.sink import make_sink; sink = make_sink()\n"


def test_live_area_is_one_display_that_is_emptied_at_the_end_and_text_comes_after_the_cells_own(kernel):
    code = "for text in ('1 %', '2 %', '2 %'): sink.status(text)\nsink.text('stdout', 'after\\n')"
    outcome = kernel.execute(f"print('before')\n{MAKE}{code}\nsink.close(); sink.close(); print('end')")
    assert outcome.stdout == "before\nafter\nend\n"
    (display,) = outcome.displays
    assert display["data"] == {"text/plain": "1 %"}
    assert [update["data"]["text/plain"] for update in outcome.updates] == ["2 %", ""]
    assert {update["transient"]["display_id"] for update in outcome.updates} == {display["transient"]["display_id"]}


def test_live_area_is_sent_again_after_clear_output_and_a_display_is_updated_by_its_id(kernel):
    outcome = kernel.execute(
        MAKE
        + "sink.status('1 %'); sink.clear_output(wait=True); sink.status('1 %')\n"
        + "sink.display({'text/plain': 'a'}, {'m': 1}, {'display_id': 'x'})\n"
        + "sink.display({'text/plain': 'b'}, transient={'display_id': 'x'}, update=True)\n"
        + "sink.html('<b>t</b>', 't')"
    )
    assert outcome.of("clear_output") == [{"wait": True}]
    first, second, shown, html = outcome.displays
    assert first["transient"] != second["transient"]
    assert shown == {"data": {"text/plain": "a"}, "metadata": {"m": 1}, "transient": {"display_id": "x"}}
    assert outcome.updates[0]["data"] == {"text/plain": "b"}
    assert html["data"] == {"text/html": "<b>t</b>", "text/plain": "t"}


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
        f"    warnings.simplefilter('always'); {MAKE}ipykernel.__version__ = version\nstr(caught[0].message)"
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


def test_terminal_has_the_live_line_below_the_text(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    ours, theirs = pty.openpty()
    with open(ours, "rb", buffering=0) as terminal:
        with open(theirs, "w") as stdout, contextlib.redirect_stdout(stdout):
            sink = make_sink()
            sink.status("10 %\n20 %")
            sink.text("stdout", "line\n")
            sink.close()
        written = b""
        with contextlib.suppress(OSError):  # EIO: the other end of the terminal is closed.
            while data := terminal.read(1000):
                written += data
    start = "\r\x1b[K"
    assert written.decode() == f"{start}10 % | 20 %{start}line\r\n{start}10 % | 20 %{start}"


def test_questions_that_wait_at_an_interrupt_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    over: Latch[None] = Latch()
    questions = Questions(over)
    for rank in range(2):
        questions.put(Question(rank, InputRequest(prompt=f"[rank {rank}] name? ", password=False, number=1), 0))
    asked: list[str] = []

    def interrupt(prompt: str) -> str:
        asked.append(prompt)
        raise KeyboardInterrupt

    looks: list[None] = []

    def end_at_third_look() -> float:
        looks.append(None)
        if len(looks) == 3:
            over.set(None)
        return 0.001

    monkeypatch.setattr("builtins.input", interrupt)
    stops: list[bool] = []
    assert questions.answer_all(lambda: None, lambda _: None, stops.append, end_at_third_look)
    assert asked == ["[rank 0] name? "]
    assert stops == [False]


# The line of progress in a terminal, where there are no widgets.


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
