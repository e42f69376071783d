"""Code that ranks run before a call: `setup=` and `%%everywhere`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher import ConfigError, LaunchConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.kernels import Kernel

# A library with a registry of its own, which looks its classes up when an object is unpacked.
KERNEL_CODE = """
import os, sys, types
%load_ext notebook_launcher
from notebook_launcher import Commands, Session, launch, notebook_launch

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
    with Session(2, **options) as session:
        yield from session.run(fn)
        yield from session.run(fn)
    yield from notebook_launch(fn, 2, detached=True, **options)
    with Session(2, detached=True, **options) as session:
        yield from session.run(fn)
    engine = Commands([[], ["env"]])
    yield from notebook_launch(fn, 2, engine=engine, **options)
    engine.close()
"""
NUM_VALUES = 14


def _run(kernel: Kernel, code: str, *, expected: str) -> str:
    outcome = kernel.execute(code)
    assert outcome.error is None, outcome.traceback
    assert outcome.result == expected
    return outcome.stdout


def test_setup_runs_before_the_arguments_are_unpacked(module_kernel: Kernel) -> None:
    code = (
        "found = notebook_launch(lambda value: type(value).__name__, 2, args=(Registered(),), setup=register)\n"
        "[*found, *notebook_launch(lambda: VALUE, 2, setup='VALUE = 7')]"
    )
    _run(module_kernel, code, expected=str(["Config"] * 2 + [7] * 2))


def test_setup_of_a_session_runs_once_in_each_process(module_kernel: Kernel) -> None:
    _run(
        module_kernel,
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
def test_everywhere_cell_and_setup_run_in_all_ranks_before_the_function_arrives(module_kernel: Kernel) -> None:
    module_kernel.execute("%everywhere --clear")
    _run(module_kernel, EVERYWHERE, expected="4")
    _run(
        module_kernel,
        "def use():\n"
        "    import colorsys\n"
        "    with lock:\n"
        "        return find(), colorsys.MODELS['mine'] is Model, SCALE, Model(), Model.Part()\n"
        "found = list(by_all_ways(use, setup=register))\n"
        "set((by_setup, type(value) is Config, known, scale, type(model) is Model, type(part) is Model.Part)\n"
        "    for (by_setup, value), known, scale, model, part in found)",
        expected="{(True, True, True, 3, True, True)}",
    )
    assert module_kernel.execute("len(found)").result == str(NUM_VALUES)


def test_everywhere_cells_reach_open_sessions_before_their_next_call(module_kernel: Kernel) -> None:
    module_kernel.execute("%everywhere --clear")
    module_kernel.execute("session = Session(2, output='none').__enter__(); session.run(find)")
    assert module_kernel.execute("%%everywhere\nimport colorsys\ncolorsys.SEEN = 1").error is None
    code = "list(session.run(lambda: __import__('colorsys').SEEN))"
    _run(module_kernel, code, expected="[1, 1]")
    module_kernel.execute("%%everywhere\ncolorsys.SEEN += 1")
    _run(module_kernel, code, expected="[2, 2]")
    _run(module_kernel, code, expected="[2, 2]")
    _run(module_kernel, "session.close(); list(notebook_launch(lambda: colorsys.SEEN, 2))", expected="[2, 2]")


def test_everywhere_cell_that_is_run_again_takes_its_own_place(module_kernel: Kernel) -> None:
    module_kernel.execute("%everywhere --clear")
    cell = (
        "get_ipython().get_parent()['metadata']['cellId'] = {identity!r}\n"
        "get_ipython().run_cell_magic('everywhere', '', {code!r})"
    )
    for identity, code in (("a", "A = 1\n"), ("b", "B = A\n"), ("a", "A = 2\n"), ("", "C = 3\n"), ("", "C = 3\n")):
        assert module_kernel.execute(cell.format(identity=identity, code=code)).error is None
    listed = module_kernel.execute("%everywhere --list").stdout.splitlines()
    assert [line.partition(": ")[2] for line in listed] == ["A = 2", "B = A", "C = 3"]
    assert module_kernel.execute("%everywhere --clear").stdout.startswith("3 cells forgotten")
    assert "no cell runs everywhere. Write `%%everywhere`" in module_kernel.execute("%everywhere").stdout


def test_everywhere_cell_that_fails_here_is_not_kept(module_kernel: Kernel) -> None:
    module_kernel.execute("%everywhere --clear")
    outcome = module_kernel.execute("%%everywhere\nfirst = 1\n1 / 0")
    assert outcome.error == "ZeroDivisionError: division by zero"
    assert "everywhere.py" not in outcome.traceback
    assert "line 3" in outcome.traceback
    assert "no cell" in module_kernel.execute("%everywhere").stdout


def test_error_of_an_everywhere_cell_in_a_rank_names_cell_and_line(module_kernel: Kernel) -> None:
    module_kernel.execute("%everywhere --clear")
    cell = module_kernel.execute("%%everywhere\nif 'RANK' in os.environ:\n    raise Missing('x')  # only there")
    assert cell.error is None, cell.traceback
    outcome = module_kernel.execute("notebook_launch(find, 2, output='none')")
    module_kernel.execute("%everywhere --clear")
    assert outcome.error == "NameError: name 'Missing' is not defined"
    assert ", line 3, in <module>\n    raise Missing('x')  # only there" in outcome.traceback
    assert 'File "Cell In[' in outcome.traceback
    assert "It was raised by the %%everywhere cell In[" in outcome.traceback


def test_code_before_a_function_sees_the_notebooks_variables(module_kernel: Kernel) -> None:
    module_kernel.execute("%everywhere --clear")
    module_kernel.execute(
        "import colorsys, threading\nclass Late: pass\ndef late(): return Late\nguard = threading.Lock()"
    )
    assert module_kernel.execute("%%everywhere\nvars(colorsys)['LATE'], rows = late(), []").error is None
    assert module_kernel.execute("%%everywhere\nrows.append(late())").error is None
    code = (
        "notebook_launch(lambda: colorsys.LATE is Late is colorsys.NEXT and len(rows), 2, setup='colorsys.NEXT = Late')"
    )
    _run(module_kernel, f"list({code})", expected="[1, 1]")
    module_kernel.execute("factor = 1\nsession = Session(2, output='none')")
    assert module_kernel.execute("%%everywhere\ndef scaled(): return factor").error is None
    scaled = "found = list(session.run(lambda: scaled())); factor += 1; found += session.run(lambda: scaled()); found"
    _run(module_kernel, scaled, expected="[1, 1, 2, 2]")
    module_kernel.execute("session.close()")
    module_kernel.execute("%%everywhere\nguard.locked()")
    refused = module_kernel.execute(code).error
    module_kernel.execute("%everywhere --clear")
    assert refused is not None
    assert re.match(
        r"CaptureError: the %%everywhere cell In\[\d+\] uses `guard`, a _thread.lock, which cannot", refused
    )
