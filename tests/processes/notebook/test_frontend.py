"""Rich output and questions of a rank: forked from a warm server, in a fresh process, and forked from a kernel."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher.messaging import messages
from notebook_launcher.messaging.channel import channel_pair
from tests.support.kernels import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.kernels import Kernel

RANK = """
import linecache, os, socket, sys, traceback
from notebook_launcher.messaging import messages
from notebook_launcher.messaging.channel import Channel
from notebook_launcher.processes.notebook import frontend

fd, mode = int(sys.argv[1]), sys.argv[2]
if mode == "warm":
    frontend.warm()
    pid = os.fork()
    if pid:
        sys.exit(os.waitpid(pid, 0)[1])
channel = Channel(socket.socket(fileno=fd))
code, _ = channel.receive()
linecache.cache["<cell>"] = (len(code), None, code.splitlines(keepends=True), "<cell>")

def ask(request):
    channel.send(request)
    return channel.receive()[0]

frontend.connect(1, channel.send, ask)
try:
    exec(compile(code, "<cell>", "exec"), {"__name__": "__main__"})
    frontend.flush_figures()
except BaseException:
    traceback.print_exc()
sys.stdout.flush(); sys.stderr.flush()
os._exit(0)
"""


@dataclasses.dataclass(frozen=True)
class Rank:
    """Messages and output of a rank."""

    records: list[Any]
    stdout: str
    stderr: str

    @property
    def displays(self) -> list[dict[str, Any]]:
        return [record.data for record in self.records if isinstance(record, messages.Display)]

    @property
    def requests(self) -> list[tuple[str, bool]]:
        return [
            (record.prompt, record.password) for record in self.records if isinstance(record, messages.InputRequest)
        ]


def run_rank(code: str, answers: list[str | None] | None = None, mode: str = "warm", env=None) -> Rank:
    channel, theirs = channel_pair()
    answers = list(answers or [])
    with subprocess.Popen(
        [sys.executable, "-c", RANK, str(theirs.fileno()), mode],
        pass_fds=[theirs.fileno()],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        theirs.close()
        channel.send(textwrap.dedent(code))
        records = []
        while (received := channel.receive()) is not None:
            records.append(received[0])
            if isinstance(received[0], messages.InputRequest):
                channel.send(messages.InputReply(text=answers.pop(0), reason="no cell can be asked"))
        stdout, stderr = process.communicate(timeout=30)
    channel.close()
    return Rank(records, stdout, stderr)


@pytest.fixture(params=["warm", "fresh"])
def run(request) -> Callable[..., Rank]:
    return lambda code, answers=None: run_rank(code, answers, request.param)


def test_rich_output_goes_out_as_records(run):
    rank = run("""
        display(3, 'x')
        import pandas
        from IPython.display import HTML, clear_output, display as show, update_display
        handle = show(HTML("<b>a</b>"), display_id="x", metadata={"m": 1})
        handle.update(HTML("<b>b</b>"))
        update_display(HTML("<b>c</b>"), display_id="x")
        clear_output(wait=True)
        class Picture:
            def _repr_png_(self): return b"png"
        class Odd:  # It cannot be pickled, and is text.
            def _repr_mimebundle_(self, include=None, exclude=None):
                return {"text/plain": "odd", "application/x": lambda: 0}
        display(pandas.DataFrame({'a': [1]}), Picture(), Odd())
    """)
    *plain, first, second, third, clear, table, image, odd = rank.records
    assert plain == [messages.Display(data={"text/plain": text}, metadata={}, transient={}) for text in ("3", "'x'")]
    assert (first.data["text/html"], first.metadata, first.update) == ("<b>a</b>", {"m": 1}, False)
    assert [(r.data["text/html"], r.transient, r.update) for r in (second, third)] == [
        ("<b>b</b>", {"display_id": "x"}, True),
        ("<b>c</b>", {"display_id": "x"}, True),
    ]
    assert clear == messages.ClearOutput(wait=True)
    assert "<table" in table.data["text/html"]
    assert (image.data["image/png"], odd.data) == (b"png", {"text/plain": "odd"})
    assert rank.stdout + rank.stderr == ""


def test_text_printed_before_a_display_is_sent_before_it():
    rank = run_rank("""
        import sys
        from IPython import get_ipython
        order = []
        stream, sys.stdout.flush = sys.stdout, lambda: order.append("flush")
        publisher = get_ipython().display_pub
        send = publisher.send
        publisher.send = lambda record: (order.append("send"), send(record))
        print("before"); display(1)
        del sys.stdout.flush
        print(order)
    """)
    assert rank.stdout == "before\n['flush', 'send']\n"


def test_figures_appear_shown_or_not(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    rank = run_rank("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\nplt.plot([2, 1])")
    assert [figure["image/png"][:5] for figure in rank.displays] == ["iVBOR"] * 2
    assert rank.stderr == ""


WHY = "shown as text, because no cell shows widgets of this run"


def test_widget_is_shown_as_text_with_the_reason_and_a_module_keeps_its_own_loader():
    rank = run_rank("""
        import getpass, inspect, ipywidgets
        slider = ipywidgets.IntSlider(3); display(slider); slider.value = 4
        print(type(getpass.__loader__).__name__, inspect.getsource(getpass)[:3])
    """)
    assert rank.displays == [{"text/plain": f"IntSlider(value=3)\n({WHY})"}]
    assert (rank.stdout, rank.stderr) == ('SourceFileLoader """\n', "")


@pytest.mark.parametrize("module", ["tqdm.notebook", "tqdm.auto"])
def test_notebook_bars_are_text_bars(module):
    rank = run_rank(f"""
        from {module} import tqdm, trange
        for _ in tqdm(range(3)): pass
        bar = tqdm(total=2, desc="two", leave=False); bar.update(2); bar.reset(); bar.close()
        for _ in trange(4): pass
    """)
    assert rank.records == []
    assert "100%|██████████| 3/3" in rank.stderr
    assert "100%|██████████| 4/4" in rank.stderr
    assert rank.stdout.count(f"tqdm.notebook: {WHY}\n") == (module == "tqdm.notebook")
    assert "Traceback" not in rank.stderr


def test_input_stdin_and_getpass_ask_the_kernel(run):
    rank = run(
        """
        import os, sys, getpass
        print([input("name? "), input(), sys.stdin.readline(), getpass.getpass("key: ")])
        print(next(iter(sys.stdin)), sys.stdin.isatty())
        if os.fork() == 0:
            try: input("of a child? ")
            except EOFError as error: print(error, flush=True)
            os._exit(0)
        os.wait()
        print(repr(sys.stdin.readline()), list(sys.stdin))
        input("name? ")
        """,
        ["ann", "", "line", "secret", "more", None, None, None],
    )
    asked = [("[rank 1] name? ", False), ("[rank 1] ", False), ("[rank 1] ", False), ("[rank 1] key: ", True)]
    assert rank.requests == [*asked, *asked[1:2] * 3, asked[0]]
    first, second, third, child, at_end = rank.stdout.splitlines()
    assert (first, second, third) == ("['ann', '', 'line\\n', 'secret']", "more", " False")
    assert "a process that rank 1 started (a data-loader worker?) asked for input" in child
    assert at_end == "'' []"
    assert rank.stderr.endswith("EOFError: no cell can be asked\n")


DEBUGGED = """
import pdb

def inner(x):
    {stop}
    y = x + 1
    return y

def outer():
    z = 41
    return inner(z)

print("result", outer())
"""


@pytest.mark.parametrize("stop", ["breakpoint()", "pdb.set_trace()"])
def test_pdb_is_answered_in_the_cell(stop):
    rank = run_rank(DEBUGGED.format(stop=stop), ["p x", "list", "up", "p z", "down", "next", "p y", "continue"])
    assert rank.requests == [("(rank 1 pdb) ", False)] * 8
    assert "41\n" in rank.stdout
    assert "    y = x + 1" in rank.stdout
    assert "-> return inner(z)" in rank.stdout
    assert rank.stdout.endswith("42\nresult 42\n")


def test_leaving_pdb_ends_the_function():
    rank = run_rank(DEBUGGED.format(stop="breakpoint()"), ["q"])
    text = "the user has quit the debugger on rank 1, which ends the run (c leaves the debugger and continues)"
    assert rank.stderr.splitlines()[-1] == f"bdb.BdbQuit: {text}"
    assert rank.stdout.endswith(f"{text}\n")  # IPython shows nothing of the exception.


def test_pdb_leaves_the_handler_of_interrupts_alone_and_names_the_reason_why_no_answer_is_possible():
    rank = run_rank(
        "import signal\nbefore = signal.getsignal(signal.SIGINT)\nbreakpoint()\n"
        "print(signal.getsignal(signal.SIGINT) is before)\nbreakpoint()",
        ["continue", None],
    )
    assert "True\n" in rank.stdout
    assert rank.stderr.endswith("EOFError: no cell can be asked\n")


def test_breakpoints_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    assert run_rank("breakpoint(); print('on')").stdout == "on\n"


# What `warm` leaves in the server that forks.

STATE = """
import builtins, os, sys
def state():
    return {
        "threads": len(os.listdir("/proc/self/task")), "descriptors": len(os.listdir("/proc/self/fd")),
        "displayhook": sys.displayhook, "excepthook": sys.excepthook, "main": sys.modules["__main__"],
        "ps": [name for name in ("ps1", "ps2", "ps3") if hasattr(sys, name)],
        "path": list(sys.path), "builtins": sorted(set(vars(builtins)) - {"display", "_"}),
        "home": sorted(os.listdir(os.environ["HOME"])),
    }
before = state()
from notebook_launcher.processes.notebook import frontend
frontend.warm()
assert state() == before, (before, state())
assert sys.modules["IPython"]
"""


def test_warm_leaves_no_thread_no_file_and_no_hook(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("IPYTHONDIR", raising=False)
    subprocess.run([sys.executable, "-c", STATE], cwd=ROOT, check=True)


def test_installing_imports_nothing_heavy():
    """Counted, not timed: a fresh rank must not pay for what it does not use."""
    rank = run_rank(
        "import sys\nheavy = ('IPython', 'pdb', 'getpass', 'torch', 'tqdm')\n"
        "print([name for name in heavy if name in sys.modules])",
        mode="fresh",
    )
    assert rank.stdout == "[]\n"


# Forked from a live kernel: what was inherited must not be used.


def test_rank_forked_from_a_kernel_shows_and_asks_through_it_and_uses_nothing_of_its_sockets(
    module_kernel: Kernel,
) -> None:
    """The kernel's inline backend opens files that stay open."""
    asked: list[tuple[str, bool]] = []

    def answer(prompt: str, password: bool) -> str:  # how the harness calls it
        asked.append((prompt, password))
        return ["ann", "secret", "p 6 * 7", "c"][len(asked) - 1]

    outcome = module_kernel.execute(
        """
        import ipywidgets, matplotlib.pyplot as plt
        from getpass import getpass
        from IPython.display import HTML, display
        from tqdm.notebook import tqdm
        old, stream, slider = display(HTML("old"), display_id=True), sys.stderr, ipywidgets.IntSlider()
        plt.figure()
        def body():
            display(HTML("<b>new</b>"))
            old.update(HTML("updated"))
            plt.plot([1, 2])
            slider.value = 5
            display(slider)
            ipywidgets.IntSlider()
            stream.write("through the old stream\\n")
            for _ in tqdm(range(3)): pass
            print(hasattr(sys, "ps1"), sys.displayhook is sys.__displayhook__)
            print(input("name? "), getpass("key: "))
            breakpoint()
            print("end")
        notebook_launch(body, 1, start_method="fork", monitor=False)
        plt.close("all")
        slider.value
        """,
        answer_input=answer,
    )
    assert outcome.error is None, outcome.traceback
    shown = [each["data"] for each in outcome.displays if not each["transient"].get("display_id")]
    kinds = ["text/html", None, "application/vnd.jupyter.widget-view+json", "image/png"]  # The third is tqdm's bar.
    assert [sorted(data) for data in shown] == [sorted(filter(None, [kind, "text/plain"])) for kind in kinds]
    assert shown[1]["text/plain"].startswith(
        "IntSlider(value=5)\n(shown as text, because this rank has not made it; widgets of the notebook"
    )
    assert "updated" in [update["data"].get("text/html") for update in outcome.updates]
    assert asked == [
        ("[rank 0] name? ", False), ("key: ", True), ("(rank 0 pdb) ", False), ("(rank 0 pdb) ", False),
    ]  # fmt: skip
    for told in ("through the old stream\n", "False True\nann secret\n", "42\n", '-> print("end")'):
        assert told in outcome.stdout + outcome.stderr
    assert outcome.result == "0"
    assert "attempted to send message from fork" not in module_kernel.log
