"""Cells on ranks, in a real notebook: `%%ranks`, values and names of the ranks."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest

from notebook_launcher import ConfigError, NoSuchRankError
from notebook_launcher.kernel.cells.session_cells import selected_ranks
from tests.support.warm_kernels import evaluate, run_cell

if TYPE_CHECKING:
    from tests.support.kernels import Kernel


IMPORTS = "import torch, torch.distributed as dist; rank = dist.get_rank()"
KERNEL_CODE = f"""
from notebook_launcher import ReturnValueError, Session
session = Session(2, devices="cpu")
session.activate()
session.execute({IMPORTS!r})
"""


@pytest.fixture(scope="module")
def notebook(module_kernel: Kernel) -> Kernel:
    """A kernel whose session stays for the whole file; each test uses names of its own."""
    return module_kernel


def refusal(notebook: Kernel, code: str) -> str:
    return notebook.execute(code).error or ""


def test_equal_values_are_shown_once_and_others_by_rank(notebook: Kernel) -> None:
    assert run_cell(notebook, "%%ranks\nx = torch.ones(2)\ndist.all_reduce(x)\nx").stdout == "[all] tensor([2., 2.])\n"
    assert run_cell(notebook, "%%ranks\nrank * 10").stdout == "[0] 0\n[1] 10\n"
    assert run_cell(notebook, "%%ranks\n_ + 1").stdout == "[0] 1\n[1] 11\n"


def test_equal_texts_of_different_contents_get_a_note(notebook: Kernel) -> None:
    abridged = run_cell(notebook, "%%ranks\nlong = torch.zeros(5000); long[2500] = rank; long").stdout
    note = " " * 6 + "(the texts are equal, the contents differ)"
    assert abridged == f"[all] tensor([0., 0., 0.,  ..., 0., 0., 0.])\n{note}\n"
    layer = "%%ranks\nlayer = torch.nn.Linear(1, 1)\ntorch.nn.init.constant_(layer.weight, rank); layer"
    assert "contents differ" in run_cell(notebook, layer).stdout
    assert "contents differ" not in run_cell(notebook, "%%ranks\ntorch.zeros(5000)").stdout


def test_cell_runs_on_the_named_ranks_alone(notebook: Kernel) -> None:
    run_cell(notebook, "%%ranks\nran = False")
    assert run_cell(notebook, "%%ranks 1\nran = True\nprint('here')").stdout == "[rank 1] here\n"
    assert run_cell(notebook, "session['ran'].returned").result == "{0: False, 1: True}"


def test_notebook_and_ranks_share_no_names(notebook: Kernel) -> None:
    run_cell(notebook, "mine = 5")
    outcome = notebook.execute("%%ranks\nmine")
    assert outcome.error == "NameError: name 'mine' is not defined"
    assert run_cell(notebook, "%%ranks --push mine\nmine + rank").stdout == "[0] 5\n[1] 6\n"
    assert notebook.execute("%%ranks --push nothing_like_it\n1").stderr.startswith("UsageError: --push nothing_like_it")
    run_cell(notebook, "first = second = 1")
    spaced = notebook.execute("%%ranks --push first second\n1").stderr
    assert "%%ranks --push first second: names of variables go with commas: --push first,second" in spaced
    assert run_cell(notebook, "%%ranks --push first -p second\nfirst + second").stdout == "[all] 2\n"


def test_assignment_brings_all_values_into_the_notebook(notebook: Kernel) -> None:
    assert run_cell(notebook, "%%ranks got = rank * 2").stdout == ""
    assert run_cell(notebook, "got[:]").result == "[0, 2]"
    run_cell(notebook, "%%ranks 1 later =\nhalf = rank / 2\nhalf")
    assert run_cell(notebook, "later.returned").result == "{1: 0.5}"
    refused = notebook.execute("%%ranks got = 1; other = 2").stderr
    assert refused.startswith("UsageError: got = 1; other = 2: the line of %%ranks assigns one expression.")
    assert run_cell(notebook, "got[:]").result == "[0, 2]"


def test_magics_move_variables_by_name(notebook: Kernel) -> None:
    run_cell(notebook, "there, more = [1, 1], 5\n%push there, more\n%push more -r 1 -s session")
    run_cell(notebook, "%%ranks\nback = sum(there) * more + rank")
    run_cell(notebook, "%pull back,more")
    assert run_cell(notebook, "back[:], more[:]").result == "([10, 11], [5, 5])"
    assert run_cell(notebook, "%pull back -r 1\nback").result == "11"
    assert run_cell(notebook, "session.push(p=1, q=2); session.pull('p', 'q')[0]").result == "(1, 2)"
    assert run_cell(notebook, "session['p + rank'][:]").result == "[1, 2]"
    for line, words in {"%push nope": "the notebook has no variable 'nope'", "%pull": "name variables, as in"}.items():
        assert notebook.execute(line).stderr.startswith(f"UsageError: {line}: {words}")


def test_pushed_variable_that_cannot_travel_is_named(notebook: Kernel) -> None:
    run_cell(notebook, "import threading; lock, deep = threading.Lock(), {'a': [threading.Lock()]}")
    assert refusal(notebook, "session.push(lock=lock)").startswith("CaptureError: `lock` is a _thread.lock")
    assert "`deep['a'][0]` is a _thread.lock" in refusal(notebook, "%%ranks --push deep\n1")


def test_traceback_shows_the_lines_of_the_notebooks_cell_and_its_functions_have_source(notebook: Kernel) -> None:
    run_cell(notebook, "%%ranks\nimport inspect\ndef twice(x):\n    return 2 * x  # here")
    assert "return 2 * x  # here" in run_cell(notebook, "%%ranks 0\nprint(inspect.getsource(twice))").stdout
    outcome = notebook.execute("%%ranks 1\n\nvalue = 0\n1 / value")
    assert outcome.error == "ZeroDivisionError: division by zero"
    assert "Cell In[" in outcome.traceback
    assert ", line 4, in <module>\n    1 / value" in outcome.traceback


@pytest.mark.parametrize("code", ["x = 1\n  y = 2", "return 1"], ids=["IndentationError", "refused by the compiler"])
def test_code_that_does_not_compile_is_shown_once_at_its_line(notebook: Kernel, code: str) -> None:
    outcome = notebook.execute(f"%%ranks 0\n{code}")
    head, empty, place, source, *marks, last = outcome.traceback.splitlines()
    assert (head, empty) == ("rank 0 of 2 failed first.", "")  # No debugger: nothing has run.
    assert re.fullmatch(rf'  File "Cell In\[\d+\]", line {1 + len(code.splitlines())}', place)
    assert source.strip() == code.splitlines()[-1].strip()
    assert set("".join(marks)) <= set(" ^")
    assert last == outcome.error
    assert place.strip().removeprefix("File ").replace('"', "") in last


def test_await_magics_and_commands_work_on_ranks(notebook: Kernel) -> None:
    assert run_cell(notebook, "%%ranks\nimport asyncio\nawait asyncio.sleep(0, result=rank)").stdout == "[0] 0\n[1] 1\n"
    outcome = notebook.execute("%%ranks 0\nawait asyncio.sleep(0)\nawait asyncio.wait_for(asyncio.sleep(9), 0.01)")
    assert (outcome.error or "").startswith("TimeoutError")
    assert "asyncio.wait_for" in outcome.traceback
    assert "Wall time" in run_cell(notebook, "%%ranks 0\n%time timed = 4").stdout
    assert run_cell(notebook, "session['timed', 0]").result == "4"
    assert "shell of 0\n" in run_cell(notebook, "%%ranks 0\n!echo shell of {rank}").stdout
    assert "Docstring: The sum" in run_cell(notebook, "%%ranks\ndef add():\n    'The sum.'\nadd?").stdout


def test_cell_that_awaits_runs_in_the_event_loop_and_its_tasks_continue_in_later_cells(notebook: Kernel) -> None:
    tick = "import asyncio\nasync def tick(value):\n    await asyncio.sleep(0)\n    return value\n"
    outcome = run_cell(notebook, f"%%ranks\n{tick}task = asyncio.create_task(tick(rank))\nawait task")
    assert outcome.stdout == "[0] 0\n[1] 1\n"
    run_cell(notebook, "%%ranks\nlater = asyncio.create_task(tick(rank + 5))\nawait asyncio.sleep(0)")
    assert run_cell(notebook, "%%ranks\nawait later").stdout == "[0] 5\n[1] 6\n"
    setting = "import contextvars\nkept = contextvars.ContextVar('kept')\nkept.set(rank)\nawait asyncio.sleep(0)"
    run_cell(notebook, f"%%ranks\n{setting}")
    assert run_cell(notebook, "%%ranks\nkept.get()").stdout == "[0] 0\n[1] 1\n"
    assert run_cell(notebook, "%%ranks\nasyncio.run(tick(3))").stdout == "[all] 3\n"


def test_table_of_the_first_rank_is_shown_as_html(notebook: Kernel) -> None:
    run_cell(
        notebook,
        "%%ranks\nfrom IPython.display import HTML\nclass Rich:\n"
        "    def __repr__(self): return f'plain {rank}'\n    def _repr_html_(self): return f'<b>{rank}</b>'",
    )
    outcome = run_cell(notebook, "%%ranks\nRich()")
    assert [display["data"]["text/html"] for display in outcome.displays] == ["<b>0</b>"]
    assert outcome.stdout == "[0]\n[1] plain 1\n"


def test_notice_reports_idle_ranks_when_a_subset_waits_in_a_collective(notebook: Kernel) -> None:
    run_cell(notebook, f"own = Session(2, devices='cpu')\nown.execute({IMPORTS!r})\nown.execute('kept = rank')")
    cell = notebook.start("%%ranks 0 -s own\ndist.all_reduce(torch.ones(1))")
    outcome = notebook.wait(cell, until=lambda now: now.done or "is idle" in now.stdout)
    assert "rank 1 is idle, so the collective never ends: interrupt the cell" in outcome.stdout
    began = time.monotonic()
    notebook.interrupt()
    outcome = notebook.wait(cell)
    assert (outcome.error or "").startswith("KeyboardInterrupt")
    assert ", line 2, in <module>\n    dist.all_reduce(torch.ones(1))" in outcome.stdout
    assert time.monotonic() - began < 10
    # The rank that waited is still there, with its variables, and the group works again.
    after = run_cell(notebook, "%%ranks -s own\nx = torch.ones(1)\ndist.all_reduce(x)\nint(x) + kept")
    assert after.stdout.endswith("[0] 2\n[1] 3\n")
    run_cell(notebook, "own.close()")


def test_group_is_made_again_for_a_subset_too(notebook: Kernel) -> None:
    run_cell(notebook, "own = Session(2, devices='cpu')")
    outcome = notebook.execute("%%ranks 1 -s own\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert (outcome.error or "").startswith("RankFailedError: rank 1 of 2 was killed by SIGKILL")
    assert "[0] 7" in run_cell(notebook, "%%ranks 0 -s own\n7").stdout
    assert run_cell(notebook, f"own.execute({IMPORTS!r} + '; dist.barrier()'); own.close()").stderr == ""


def test_mistakes_are_explained(notebook: Kernel) -> None:
    no_rank = "NoSuchRankError: ranks='0-9': there is no rank 2: this session has 2 ranks, 0 to 1."
    assert refusal(notebook, "%%ranks 0-9\n1").startswith(no_rank)
    assert "there is no session of this name" in notebook.execute("%%ranks -s nowhere\n1").stderr
    assert refusal(notebook, "session.push({'a b': 1})").startswith("ConfigError: 'a b' cannot be the name")
    assert "Pass the code as text" in refusal(notebook, "session.execute(print)")
    assert "pass the name as text" in refusal(notebook, "session[0]")
    assert "pull() names no variable. Write session.pull('x')." in refusal(notebook, "session.pull()")
    assert "pass names and values: session.push(x=1)" in refusal(notebook, "session.push('x')")
    assert "`%%ranks?` lists the options." in notebook.execute("%%ranks --nothing\n1").stderr


def test_name_that_only_the_notebook_has_comes_with_advice(notebook: Kernel) -> None:
    run_cell(notebook, "only_here = 1")
    assert "`%%ranks --push only_here` sends it first" in notebook.execute("%%ranks\nonly_here").traceback
    assert "--push" not in notebook.execute("%%ranks\nnowhere_at_all").traceback
    run_cell(notebook, "import json, os.path as paths, os.path")
    advice = "json is imported in the notebook, but not on the ranks. Write `import json` in their cell."
    assert advice in notebook.execute("%%ranks\njson.loads('1')").traceback
    assert "Write `import posixpath as paths` in" in notebook.execute("%%ranks\npaths.sep").traceback


def test_rich_output_is_that_of_the_chosen_rank_or_of_all(notebook: Kernel) -> None:
    run_cell(notebook, "%%ranks\nfrom IPython.display import HTML, display")
    chosen = run_cell(notebook, "%%ranks --display 1\ndisplay(HTML(f'<b>{rank}</b>'))\nHTML(f'<i>{rank}</i>')")
    assert [display["data"].get("text/html") for display in chosen.displays] == ["<b>1</b>", "<i>1</i>"]
    code = "%%ranks --display all\ndisplay(HTML(f'<b>{rank}</b>'))\nHTML(f'<i>{rank}</i>')"
    (every,) = run_cell(notebook, code).displays
    html = every["data"]["text/html"]
    assert html.count('type="radio"') == 2
    assert "<b>0</b></div><div><i>0</i>" in html
    assert "<b>1</b></div><div><i>1</i>" in html
    no_rank = "ConfigError: display='0' names no rank that runs the cell: rank 1."
    assert refusal(notebook, "%%ranks 1 --display 0\n1").startswith(no_rank)


def test_table_of_variables_marks_those_that_differ(notebook: Kernel) -> None:
    run_cell(notebook, "%%ranks\nequal = torch.ones(2, 3)\nother = torch.full((2,), float(rank))\nif rank: lonely = 1")
    run_cell(notebook, "%%ranks\nlayer = torch.nn.Linear(2, 1)\nwith torch.no_grad(): layer.weight.fill_(rank)")
    states = (
        "names = session.who()\n{n: (names[n].value, names[n].state) for n in ('equal', 'other', 'lonely', 'layer')}"
    )
    assert evaluate(notebook, states) == {
        "equal": ("(2, 3) float32", "same"),
        "other": ("(2,) float32", "differs"),
        "lonely": ("1", "missing"),
        "layer": ("3 parameters", "differs"),
    }
    assert evaluate(notebook, "'layer' in names.differing, 'equal' in names.differing") == (True, False)
    assert "only rank 1" in run_cell(notebook, "print(names)").stdout


COMPLETE = """
from IPython.core.completer import provisionalcompleter
def completed(text):
    with provisionalcompleter():
        return [text[:one.start] + one.text for one in get_ipython().Completer.completions(text, len(text))]
"""


def test_names_of_the_ranks_complete_inside_their_cells_alone(notebook: Kernel) -> None:
    run_cell(notebook, COMPLETE + "session.execute('unusual_name = {\\'some_key\\': 1}')")
    assert run_cell(notebook, "completed('%%ranks\\nx = 1\\nunusual_n')").result == r"['%%ranks\nx = 1\nunusual_name']"
    assert "'some_key" in (run_cell(notebook, "completed('%%ranks\\nunusual_name[')").result or "")
    assert run_cell(notebook, "completed('unusual_n')").result == "[]"
    assert run_cell(notebook, "completed('%%ranks\\nonly_h')").result == r"['%%ranks\nonly_h']"
    # The first line may name another session.
    run_cell(notebook, "other = Session(1, devices='cpu'); other.execute('rare_name = 1')")
    assert run_cell(notebook, "completed('%%ranks -s other\\nrare_n')").result == r"['%%ranks -s other\nrare_name']"
    assert evaluate(notebook, "get_ipython().kernel.do_inspect('%%ranks 0 --session other\\nrare_name', 30)['found']")
    assert "unusual_name" in (run_cell(notebook, "completed('%%ranks -s \\nunusual_n')").result or "")
    run_cell(notebook, "other.close()")
    # A busy rank is not asked.
    run_cell(notebook, "session.complete('unusual_n', 9); busy = session.launch(lambda: __import__('time').sleep(9))")
    assert "unusual_name" in (run_cell(notebook, "completed('%%ranks\\nunus')").result or "")
    run_cell(notebook, "busy.stop()")


LOOK = """
def look():
    import linecache, os
    def kind(fd):
        try:
            return os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            return ""
    # ipykernel has an eventfd for every thread that prints, and drops it within 10 s of the thread's end.
    files = [kind(fd) for fd in os.listdir("/proc/self/fd")]
    return sum("eventfd" not in file for file in files), sum("on ranks" in name for name in linecache.cache)
"""


def test_many_cells_leave_no_descriptors_lines_or_folders(notebook: Kernel) -> None:
    run_cell(notebook, f"import os\nhome = os.environ['NOTEBOOK_LAUNCHER_RUNS']\n{LOOK}session.execute({LOOK!r})")
    seen = "look(), session.execute('look()')[:], len(os.listdir(home)) if os.path.exists(home) else 0"
    (fds, lines), ranks, folders = evaluate(notebook, seen)
    run_cell(notebook, "for number in range(40): session.execute(f'def made(): return {number}\\nmade()')")
    run_cell(notebook, "session.execute('print(1)')")
    assert "ZeroDivisionError" in refusal(notebook, "%%ranks\n1 / 0")
    (later_fds, later_lines), later_ranks, later_folders = evaluate(notebook, seen)
    assert later_fds <= fds + 4  # Of the threads that ended last.
    assert (later_lines, later_folders) == (lines, folders)
    for (now, cells), (then, cells_before) in zip(later_ranks, ranks, strict=True):
        assert now == then
        assert cells <= cells_before + 2  # Of the last cell, and of the one that defined the function.


def test_extension_starts_and_ends_ranks_of_its_own(notebook: Kernel) -> None:
    run_cell(notebook, "%load_ext notebook_launcher")
    assert run_cell(notebook, "%ranks 2 devices=cpu output=all").stdout.startswith("2 ranks: <Session of 2 CPU ranks")
    assert "[all] 3" in run_cell(notebook, "%%ranks\n1 + 2").stdout
    assert (notebook.execute("%ranks many").stderr or "").startswith("UsageError: %ranks many: write `%ranks 4`")
    assert "unknown option sed=" in refusal(notebook, "%ranks 2 sed=1")
    assert "[all] 3" in run_cell(notebook, "%%ranks\n1 + 2").stdout
    run_cell(notebook, "%ranks close")
    assert notebook.execute("%%ranks\n1").stderr.startswith("UsageError: no session is active.")
    assert "no session is active" in run_cell(notebook, "%ranks").stdout
    assert notebook.execute("%ranks close").stderr.startswith("UsageError: %ranks has started no session")
    run_cell(notebook, "session.activate()")
    assert run_cell(notebook, "%%ranks\n4").stdout == "[all] 4\n"
    run_cell(notebook, "%unload_ext notebook_launcher")
    assert "Cell magic `%%ranks` not found" in notebook.execute("%%ranks\n1").stderr
    run_cell(notebook, "session.activate()")


NAMED: list[tuple[object, tuple[int, ...] | None]] = [
    *((None, None), ("all", None), ("0-3", None), (2, (2,)), ("2", (2,)), ("2,0", (0, 2)), ("1-3", (1, 2, 3))),
    *(("0, 2-3", (0, 2, 3)), ([3, 1, 1], (1, 3)), (range(2), (0, 1))),
]
NO_RANK = r"there is no rank (4|-1): this session has 4 ranks, 0 to 3\."
NO_RANKS = r"names no ranks\. Write a rank \(2\)"
REFUSED: list[tuple[object, str]] = [
    *((named, NO_RANK) for named in (4, "0,4", [-1, 4])),
    ("0,3-1", r"ranks='0,3-1': 3-1 is empty\. Did you mean 1-3\?"),
    *((named, NO_RANKS) for named in ("some", "1-", 1.5, [True], "1;2", [])),
]


def test_ranks_are_found_in_every_form_and_refused_with_those_that_can_be_meant() -> None:
    for named, ranks in NAMED:
        assert selected_ranks(named, 4) == ranks
    for named, message in REFUSED:
        with pytest.raises(NoSuchRankError if message is NO_RANK else ConfigError, match=message):
            selected_ranks(named, 4)
