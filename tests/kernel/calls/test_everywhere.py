"""Code that ranks run before a call: `setup=` and `%%everywhere`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher import ConfigError, LaunchConfig
from tests.support.warm_kernels import run_cell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.kernels import Kernel

# A library with a registry of its own, which looks its classes up when an object is unpacked.
KERNEL_CODE = """
import os, sys, types
%load_ext notebook_launcher
from notebook_launcher import Session, launch, notebook_launch

class Config:
    pass

def register():
    import colorsys
    vars(colorsys).setdefault("KINDS", {})["mine"] = Config

def find():
    import colorsys
    return vars(colorsys).get("KINDS", {}).get("mine") is Config, Config()

class Registered:
    '''Unpacks only where its kind is registered.'''
    def __reduce__(self):
        return unpack, ("mine",)

def unpack(kind):
    import colorsys
    return colorsys.KINDS[kind]()

def by_all_ways(fn, **options):
    options |= {"output": "none"}
    for start_method in ("forkserver", "fork"):
        yield from notebook_launch(fn, 2, start_method=start_method, **options)
    yield from notebook_launch(fn, 2, detached=True, **options)
    with Session(2, **options) as session:
        yield from session.run(fn)
        yield from session.run(fn)
    with Session(2, detached=True, **options) as session:
        yield from session.run(fn)
"""


@pytest.fixture
def notebook(module_kernel: Kernel) -> Iterator[Kernel]:
    """The kernel, whose cells that run everywhere are forgotten after each test."""
    yield module_kernel
    run_cell(module_kernel, "%everywhere --clear")


def _run(kernel: Kernel, code: str, *, expected: str) -> None:
    assert run_cell(kernel, code).result == expected


def test_setup_runs_before_the_arguments_are_unpacked(notebook: Kernel) -> None:
    code = (
        "found = notebook_launch(lambda value: type(value).__name__, 2, args=(Registered(),), setup=register)\n"
        "[*found, *notebook_launch(lambda: VALUE, 2, setup='VALUE = 7')]"
    )
    _run(notebook, code, expected=str(["Config"] * 2 + [7] * 2))


def test_setup_of_a_session_runs_once_in_each_process(notebook: Kernel) -> None:
    _run(
        notebook,
        "def count():\n    import builtins\n    builtins.NUM = getattr(builtins, 'NUM', 0) + 1\n"
        "def die():\n    if os.environ['RANK'] == '1': os._exit(1)\n"
        "session = Session(2, setup=count, output='none')\n"
        "found = [list(session.run(lambda: NUM)) for _ in range(2)]\n"
        "try: session.run(die)\nexcept Exception: pass\n"
        "found.append(list(session.run(lambda: NUM)))\n"
        "session.close()\n"
        "found",
        expected=str([[1, 1]] * 3),
    )


def generate() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        (7, r"setup=7 is an int\. Pass a function without arguments, or text of code"),
        (generate, r"setup=.*generate is a generator function, so calling it runs nothing\. Write a plain def"),
        (lambda a: a, r"setup=.* cannot be called without arguments: missing a required argument: 'a'"),
        ("train.py", r"setup='train\.py' is text of code, not the path of a file"),
        ("x = (", r"the code of setup= is no Python: .*line 1"),
    ],
)
def test_setup_that_cannot_run_is_refused(setup: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        LaunchConfig(setup=setup)
    assert caught.value.field == "setup"


EVERYWHERE = """%%everywhere
import colorsys, threading
lock = threading.Lock()
SCALE = 3

class Model:
    class Part:
        pass

vars(colorsys).setdefault("MODELS", {})["mine"] = Model
SCALE + 1
"""


@pytest.mark.slow
def test_everywhere_cell_and_setup_run_in_all_ranks_before_the_function_arrives(notebook: Kernel) -> None:
    _run(notebook, EVERYWHERE, expected="4")
    _run(
        notebook,
        "def use():\n"
        "    import colorsys\n"
        "    with lock:\n"
        "        return find(), colorsys.MODELS['mine'] is Model, SCALE, Model(), Model.Part()\n"
        "found = list(by_all_ways(use, setup=register))\n"
        "set((by_setup, type(value) is Config, known, scale, type(model) is Model, type(part) is Model.Part)\n"
        "    for (by_setup, value), known, scale, model, part in found)",
        expected="{(True, True, True, 3, True, True)}",
    )
    assert notebook.execute("len(found)").result == "12"


def test_everywhere_cells_reach_open_sessions_before_their_next_call(notebook: Kernel) -> None:
    notebook.execute("session = Session(2, output='none').__enter__(); session.run(find)")
    run_cell(notebook, "%%everywhere\nimport colorsys\ncolorsys.SEEN = 1")
    code = "list(session.run(lambda: __import__('colorsys').SEEN))"
    _run(notebook, code, expected="[1, 1]")
    notebook.execute("%%everywhere\ncolorsys.SEEN += 1")
    _run(notebook, code, expected="[2, 2]")
    _run(notebook, code, expected="[2, 2]")
    _run(notebook, "session.close(); list(notebook_launch(lambda: colorsys.SEEN, 2))", expected="[2, 2]")


def test_everywhere_cell_that_is_run_again_takes_its_own_place(notebook: Kernel) -> None:
    cell = (
        "get_ipython().get_parent()['metadata']['cellId'] = {identity!r}\n"
        "get_ipython().run_cell_magic('everywhere', '', {code!r})"
    )
    for identity, code in (("a", "A = 1\n"), ("b", "B = A\n"), ("a", "A = 2\n"), ("", "C = 3\n"), ("", "C = 3\n")):
        run_cell(notebook, cell.format(identity=identity, code=code))
    listed = notebook.execute("%everywhere --list").stdout.splitlines()
    assert [line.partition(": ")[2] for line in listed] == ["A = 2", "B = A", "C = 3"]
    assert notebook.execute("%everywhere --clear").stdout.startswith("3 cells forgotten")
    assert "no cell runs everywhere. Write `%%everywhere`" in notebook.execute("%everywhere").stdout


def test_everywhere_cell_that_fails_here_is_not_kept(notebook: Kernel) -> None:
    outcome = notebook.execute("%%everywhere\nfirst = 1\n1 / 0")
    assert outcome.error == "ZeroDivisionError: division by zero"
    assert "everywhere.py" not in outcome.traceback
    assert "line 3" in outcome.traceback
    assert "no cell" in notebook.execute("%everywhere").stdout


def test_error_of_an_everywhere_cell_in_a_rank_names_cell_and_line(notebook: Kernel) -> None:
    run_cell(notebook, "%%everywhere\nif 'RANK' in os.environ:\n    raise Missing('x')  # only there")
    outcome = notebook.execute("notebook_launch(find, 2, output='none')")
    assert outcome.error == "NameError: name 'Missing' is not defined"
    assert ", line 3, in <module>\n    raise Missing('x')  # only there" in outcome.traceback
    assert "It was raised by the %%everywhere cell In[" in outcome.traceback


def test_code_before_a_function_sees_the_notebooks_variables(notebook: Kernel) -> None:
    notebook.execute("import colorsys, threading\nclass Late: pass\ndef late(): return Late\nguard = threading.Lock()")
    run_cell(notebook, "%%everywhere\nvars(colorsys)['LATE'], rows = late(), []")
    run_cell(notebook, "%%everywhere\nrows.append(late())")
    run_cell(notebook, "def seen(): return colorsys.LATE is Late is colorsys.NEXT and len(rows)")
    code = "notebook_launch(seen, 2, setup='colorsys.NEXT = Late')"
    _run(notebook, f"list({code})", expected="[1, 1]")
    notebook.execute("factor = 1\nsession = Session(2, output='none')")
    run_cell(notebook, "%%everywhere\ndef scaled(): return factor")
    scaled = "found = list(session.run(lambda: scaled())); factor += 1; found += session.run(lambda: scaled()); found"
    _run(notebook, scaled, expected="[1, 1, 2, 2]")
    notebook.execute("session.close()")
    notebook.execute("%%everywhere\nguard.locked()")
    refused = r"CaptureError: the %%everywhere cell In\[\d+\] uses `guard`, a _thread.lock, which cannot"
    assert re.match(refused, notebook.execute(code).error or "")
