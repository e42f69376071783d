"""The notebook's functions and definitions arrive in a rank's `__main__`, and what cannot travel is refused."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.support.two_mains import notebook

if TYPE_CHECKING:
    from pathlib import Path


def test_both_sides_share_one_main() -> None:
    notebook("""
        import functools, os
        from notebook_launcher import travel
        from notebook_launcher.errors import ReturnValueError

        # Nothing is imported that the user did not.
        def heavy(): return sorted({"torch", "numpy"} & {*__import__("sys").modules})
        assert rank.call(heavy) == heavy() == []

        # Functions use the globals of the rank's `__main__`, and bring the kernel's present values with each call.
        counter = 0
        def bump():
            global counter
            counter += 1
        def count():
            import __main__
            bump(); bump()
            return counter, __main__.counter, bump.__globals__ is __main__.__dict__, __name__
        assert rank.call(count) == rank.call(count) == (2, 2, True, "__main__")
        assert counter == 0

        # Definitions come back as themselves.
        factor = 3
        def triple(x): return factor * x
        @functools.cache
        def cached(x): return factor + x
        class Layer:
            def forward(self): return factor
        def train(layer):
            import __main__
            __main__.factor = 100
            return triple, layer.forward, cached, lambda x: x * factor, cached(1)
        fn, method, cache, other, value = rank.call(train, Layer())
        assert fn is triple and cache is cached and method.__func__ is Layer.forward
        assert other(2) == 200 and factor == 3 and value == 101

        # One that the notebook has dropped meanwhile is an error by its name.
        def helper(): pass
        parcel = travel.pack_call(travel.FunctionCall(lambda: helper, (), {})).detach()
        rank._channel.send("call", [parcel])
        os.close(parcel)
        del helper
        _, [fd] = rank._channel.receive()
        try:
            travel.unpack_value(fd)
        except ReturnValueError as error:
            assert "the function helper is no longer defined in the notebook" in str(error), error
        else:
            raise AssertionError

        # No descriptor is left open.
        def descriptors(x):
            return len(os.listdir("/proc/self/fd"))
        first, ours = rank.call(descriptors, 1), descriptors(1)
        assert [rank.call(descriptors, 1) for _ in range(5)] == [first] * 5
        assert descriptors(1) == ours
    """)


def test_cells_show_their_source_in_the_rank_and_the_shell_is_refused_by_name() -> None:
    notebook("""
        import textwrap
        from IPython.core.interactiveshell import InteractiveShell
        from notebook_launcher.errors import CaptureError
        shell = InteractiveShell.instance()
        cell = '''
        def helper():
            raise ValueError("boom")
        def train():
            import inspect, linecache, traceback
            linecache.checkcache()
            try:
                helper()
            except ValueError:
                return traceback.format_exc(), inspect.getsource(train)
        '''
        shell.run_cell(textwrap.dedent(cell)).raise_error()
        trace, source = rank.call(shell.user_ns["train"])
        assert 'raise ValueError("boom")' in trace, trace
        assert source.startswith("def train():") and "helper()" in source

        get_ipython = shell.get_ipython
        def use_a_magic():
            get_ipython().run_line_magic("pwd", "")
        try:
            rank.call(use_a_magic)
        except CaptureError as error:
            assert "the function use_a_magic uses `get_ipython()`" in str(error), error
        else:
            raise AssertionError
    """)


@pytest.mark.parametrize("compiled", [True, False])
def test_modules_that_changed_since_their_import_are_named(tmp_path: Path, compiled: bool) -> None:
    (tmp_path / "core.py").write_text("def base(): return 1\n")
    (tmp_path / "utils.py").write_text("import core\ndef value(): return core.base()\n")
    notebook(
        f"""
        import pathlib, sys
        sys.dont_write_bytecode = {not compiled}
        import utils
        def train(): return utils.value()
        def stale(): return t.stale(train)
        assert stale() == []
        path = pathlib.Path("{tmp_path}/core.py")
        path.write_text("def base(): return 2000\\n")
        assert stale() == [str(path)]
        assert rank.call(train) == 2000  # the rank runs, and compiles, the file as it is now
        assert stale() == [str(path)]
    """,
        tmp_path,
    )


VALUES = """
import random
lr = 0.1
name: str = "old"
RATES = {"head": 0.1, "body": 0.2}
REGISTRY = {}
count = 0
drawn = random.random()
if lr:
    branch = 1
def note():
    global count
    lr = count
    count += 1
    REGISTRY["noted"] = note
"""


def test_edited_values_are_an_edit_and_values_that_code_has_set_are_not(tmp_path: Path) -> None:
    path = tmp_path / "settings.py"
    path.write_text(VALUES)
    os.utime(path, (0, 0))  # Older than the process.
    (tmp_path / "uses.py").write_text("import settings\ndef value(): return settings.lr, settings.RATES\n")
    notebook(
        f"""
        import pathlib
        import settings, uses
        def train(): return uses.value()
        def stale(): return t.stale(train)
        path = pathlib.Path("{path}")
        written = path.read_text()
        settings.note()
        settings.drawn = settings._cache = settings.RATES["added"] = 0.5
        settings.lr = "set by a library"
        assert stale() == []
        settings.lr = 0.1
        path.write_text(written)
        assert stale() == []
        path.write_text(written.replace("lr = 0.1", "lr = 0.7").replace('"body": 0.2', '"body": 0.8'))
        assert rank.call(train) == (0.7, {{"head": 0.1, "body": 0.8}})  # The rank compiles the file as it is now.
        assert stale() == [str(path)]
        settings.lr = 0.7
        assert stale() == [str(path)]
        settings.RATES["body"] = 0.8
        assert stale() == []
    """,
        tmp_path,
    )


def test_function_that_was_compiled_again_by_itself_has_not_changed(tmp_path: Path) -> None:
    # As IPython's %autoreload does, which leaves the compiled file of the module as it was.
    before, after = "def base():\n    return 1\n", "\n\ndef base():\n    return 2000\n"
    (tmp_path / "patched.py").write_text(f"{before}\nclass Net:\n    def forward(self):\n        return 1\n")
    notebook(
        f"""
        import pathlib
        import patched
        def stale(): return t.stale(lambda: patched.base())
        path = pathlib.Path("{tmp_path}/patched.py")
        path.write_text(path.read_text().replace({before!r}, {after!r}))
        assert stale() == [str(path)]
        again = {{}}
        exec(compile("def base(): return 2000", str(path), "exec"), again)
        patched.base.__code__ = again["base"].__code__
        assert stale() == []
        path.write_text(path.read_text().replace("return 1", "return 3000"))
        assert stale() == [str(path)], "a method"
    """,
        tmp_path,
    )


def test_definitions_that_cloudpickle_refuses_travel() -> None:
    notebook("""
        import functools, typing, weakref
        class Slots:
            __slots__ = ("__private", "open")
            def __init__(self):
                self.__private, self.open = 1, 2
            def total(self):
                return self.__private + self.open
        class Data:
            @functools.cached_property
            def size(self):
                "Documented."
                return 5
            @functools.singledispatchmethod
            def kind(self, value):
                return "other"
            @kind.register
            def _(self, value: int):
                return "integer"
        @functools.singledispatch
        def name(value):
            return "other"
        @name.register
        def _(value: int):
            return "integer"
        UserId = typing.NewType("UserId", int)
        P = typing.ParamSpec("P")
        def twice(function: typing.Callable[P, int]) -> typing.Callable[P, int]:
            def wrapped(*args: P.args, **kwargs: P.kwargs) -> int:
                return 2 * function(*args, **kwargs)
            return wrapped
        @twice
        def three(user: UserId = UserId(0)) -> int:
            return 3
        class Node: pass
        node, seen = Node(), weakref.WeakKeyDictionary()
        seen[node] = "seen"
        def train():
            data = Data()
            assert (data.size, data.size, Data.size.__doc__) == (5, 5, "Documented.")
            assert (data.kind(1), data.kind("1"), name(1), name("1")) == ("integer", "other") * 2
            assert three() == 6 and UserId(4) == 4 and UserId.__supertype__ is int
            assert (UserId.__module__, P.__name__, P.__module__) == ("__main__", "P", "__main__")
            assert seen[node] == "seen"
            return Slots().total()
        assert rank.call(train) == 3
    """)
