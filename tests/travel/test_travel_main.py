"""The notebook's own functions and classes keep their identity, there and back.

Each test runs a small "notebook" in a fresh interpreter, whose `__main__` is the kernel's, and calls
its functions in another fresh interpreter, whose `__main__` is a rank's.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from notebook_launcher import travel
from notebook_launcher.channel import Channel, channel_pair

HERE = Path(__file__).parent


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
        parcel = travel.pack_call(fn, args, kwargs)
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


def serve(fd: int) -> None:
    channel = Channel(socket.socket(fileno=fd))
    while (received := channel.receive()) is not None:
        outcome, parcel = "returned", None
        try:
            fn, args, kwargs, _ = travel.unpack_call(received[1][0])
            parcel = travel.pack_value(fn(*args, **kwargs))
        except BaseException as exc:  # noqa: BLE001
            outcome, parcel = f"raised {exc!r}", travel.pack_exception(exc)
        channel.send(outcome, [] if parcel is None else [parcel])
        if parcel is not None:
            os.close(parcel)


def notebook(code: str, folder: Path | None = None) -> None:
    """Run the cells of a notebook with a rank at hand; fails with what they printed."""
    script = f"import {__name__} as t\nrank = t.Rank()\n{textwrap.dedent(code)}\nrank.close()\n"
    paths = [str(folder or HERE), str(HERE), str(HERE.parents[1])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_functions_share_the_globals_of_the_ranks_main() -> None:
    notebook("""
        counter = 0
        def bump():
            global counter
            counter += 1
        def train():
            import __main__
            bump(); bump()
            return counter, __main__.counter, bump.__globals__ is __main__.__dict__, __name__
        assert rank.call(train) == (2, 2, True, "__main__")
        assert counter == 0
        assert rank.call(train) == (2, 2, True, "__main__")  # the kernel's present values win
    """)


def test_classes_are_found_by_plain_pickle_in_the_rank() -> None:
    notebook("""
        import dataclasses, enum, pickle, typing
        @dataclasses.dataclass
        class Config:
            lr: float = 0.1
        class Color(enum.Enum):
            RED = 1
        class Pair(typing.NamedTuple):
            a: int
        def helper():
            return 7
        def train(config, color, pair):
            copies = pickle.loads(pickle.dumps((config, color, pair, helper)))
            assert copies == (config, color, pair, helper), copies
            assert type(copies[0]) is Config and copies[3]() == 7
            return copies[:3]
        config, color, pair = rank.call(train, Config(0.5), Color.RED, Pair(3))
        assert type(config) is Config and config.lr == 0.5
        assert color is Color.RED and type(pair) is Pair
    """)


def test_exception_of_the_notebook_is_caught_by_its_class() -> None:
    notebook("""
        class Stopped(Exception):
            def __init__(self, code, text):
                super().__init__(text)
                self.code = code
        def train():
            raise Stopped(7, "enough")
        try:
            rank.call(train)
        except Stopped as exc:
            assert (exc.code, str(exc)) == (7, "enough")
        else:
            raise AssertionError
    """)


def test_kernels_class_is_never_modified() -> None:
    notebook("""
        class Model:
            seen = []
            limit = 1
        def make():
            class Local:
                limit = 1
            return Local
        Local = make()
        def train(model, local):
            type(model).limit = type(local).limit = 99
            return model, local
        def attributes(cls):  # copyreg keeps a note on every class whose instances are pickled
            return {name: value for name, value in vars(cls).items() if name != "__slotnames__"}
        before = attributes(Model), attributes(Local)
        model, local = rank.call(train, Model(), Local())
        assert type(model) is Model and type(local) is Local
        assert (attributes(Model), attributes(Local)) == before
    """)


def test_class_that_arrives_by_value_under_a_known_id_is_kept_as_it_is() -> None:
    notebook("""
        import os
        from notebook_launcher import travel
        def make():
            class Local:
                limit = 1
            return Local
        Local = make()
        travel.pack_call(Local, (), {}).close()  # gives it an id
        kernel_end, rank_end = t.channel_pair()
        if os.fork() == 0:  # a forked rank has the class, but never received it
            Local.limit = 99
            t.Channel(rank_end).send("", [travel.pack_value(Local())])
            os._exit(0)
        _, [fd] = kernel_end.receive()
        os.wait()
        assert type(travel.unpack_value(fd)) is Local and Local.limit == 1
    """)


def test_instances_of_a_redefined_class_are_of_the_class_that_was_sent() -> None:
    notebook("""
        class Net: version = 1
        def train():
            return Net()
        First = Net
        net = Net()
        def identity(x):
            return x
        assert type(rank.call(train)) is First
        class Net: version = 2
        assert type(rank.call(identity, net)) is First
        assert type(rank.call(train)) is Net and Net is not First
    """)


def test_class_that_only_the_rank_knows_travels_by_value() -> None:
    notebook("""
        class Base: pass
        def train():
            class Local(Base):
                def double(self): return 2 * self.x
            local = Local(); local.x = 4
            return local
        local = rank.call(train)
        assert local.double() == 8 and isinstance(local, Base)
        assert isinstance(rank.call(lambda v: v, local), type(local))
    """)


def test_functions_of_the_notebook_come_back_as_themselves() -> None:
    notebook("""
        import functools
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
        layer = Layer()
        fn, method, cache, other, value = rank.call(train, layer)
        assert fn is triple and cache is cached and method.__func__ is Layer.forward
        assert other(2) == 200 and factor == 3 and value == 101
    """)


def test_definition_that_the_notebook_dropped_is_an_error_by_name() -> None:
    notebook("""
        from notebook_launcher.errors import ReturnValueError
        def helper(): pass
        def train(): return helper
        import os
        from notebook_launcher import travel
        parcel = travel.pack_call(train, (), {}).detach()
        rank._channel.send("call", [parcel])
        del helper
        _, [fd] = rank._channel.receive()
        try:
            travel.unpack_value(fd)
        except ReturnValueError as error:
            assert "the function helper is no longer defined in the notebook" in str(error), error
        else:
            raise AssertionError
    """)


def test_cells_show_their_source_in_the_rank() -> None:
    notebook("""
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        shell.user_ns["rank"] = rank
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
        import textwrap
        shell.run_cell(textwrap.dedent(cell)).raise_error()
        trace, source = rank.call(shell.user_ns["train"])
        assert 'raise ValueError("boom")' in trace, trace
        assert source.startswith("def train():") and "helper()" in source
    """)


def test_shell_is_refused_by_name() -> None:
    notebook("""
        from IPython.core.interactiveshell import InteractiveShell
        from notebook_launcher.errors import CaptureError
        shell = InteractiveShell.instance()
        get_ipython = shell.get_ipython
        def train():
            get_ipython().run_line_magic("pwd", "")
        try:
            rank.call(train)
        except CaptureError as error:
            assert "the function train uses `get_ipython()`" in str(error), error
        else:
            raise AssertionError
    """)


def test_wrapped_model_and_a_group_are_refused_with_the_way_out(tmp_path: Path) -> None:
    notebook(f"""
        from notebook_launcher.errors import ReturnValueError
        def train(choose):
            import torch
            dist = torch.distributed
            if not dist.is_initialized():
                dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
            return choose(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1)), dist.group.WORLD)
        def refusal(choose):
            try:
                rank.call(train, choose)
            except ReturnValueError as error:
                return str(error)
        wrapped = refusal(lambda model, group: {{"model": model}})
        assert wrapped.startswith("the return value cannot travel: `result['model']` is a torch."), wrapped
        assert "Return `model.module` or" in wrapped, wrapped
        group = refusal(lambda model, group: [group])
        assert "`result[0]` is a" in group and "ProcessGroup" in group, group
        assert rank.call(train, lambda model, group: model.module).weight.shape == (1, 1)
    """)


def test_nothing_is_imported_that_the_user_did_not(tmp_path: Path) -> None:
    notebook(
        """
        import sys
        def train(): return sorted({"torch", "numpy"} & set(sys.modules))
        assert rank.call(train) == []
        assert not {"torch", "numpy"} & set(sys.modules)
    """,
        tmp_path,
    )


@pytest.mark.parametrize("compiled", [True, False])
def test_modules_that_changed_since_their_import_are_named(tmp_path: Path, compiled: bool) -> None:  # noqa: FBT001
    (tmp_path / "core.py").write_text("def base(): return 1\n")
    (tmp_path / "utils.py").write_text("import core\ndef value(): return core.base()\n")
    notebook(
        f"""
        import os, pathlib, sys
        sys.dont_write_bytecode = {not compiled}
        import utils
        from notebook_launcher import travel
        def train(): return utils.value()
        def stale():
            fd = travel.pack_call(train, (), {{}}).detach()
            try:
                return travel.stale_modules(fd)
            finally:
                os.close(fd)
        assert stale() == []
        path = pathlib.Path("{tmp_path}/core.py")
        path.write_text("def base(): return 2000\\n")
        assert stale() == [str(path)]
        assert rank.call(train) == 2000  # the rank runs, and compiles, the file as it is now
        assert stale() == [str(path)]
    """,
        tmp_path,
    )


def test_function_that_was_compiled_again_by_itself_has_not_changed(tmp_path: Path) -> None:
    # As IPython's %autoreload does, which leaves the compiled file of the module as it was.
    before, after = "def base():\n    return 1\n", "\n\ndef base():\n    return 2000\n"
    (tmp_path / "patched.py").write_text(f"{before}\nclass Net:\n    def forward(self):\n        return 1\n")
    notebook(
        f"""
        import os, pathlib
        import patched
        from notebook_launcher import travel
        path = pathlib.Path("{tmp_path}/patched.py")
        path.write_text(path.read_text().replace({before!r}, {after!r}))
        fd = travel.pack_call(lambda: patched.base(), (), {{}}).detach()
        assert travel.stale_modules(fd) == [str(path)]
        again = {{}}
        exec(compile("def base(): return 2000", str(path), "exec"), again)
        patched.base.__code__ = again["base"].__code__
        assert travel.stale_modules(fd) == []
        path.write_text(path.read_text().replace("return 1", "return 3000"))
        assert travel.stale_modules(fd) == [str(path)], "a method"
        os.close(fd)
    """,
        tmp_path,
    )


def test_no_descriptor_is_left_open() -> None:
    notebook("""
        import os
        def train(x):
            import os
            return len(os.listdir("/proc/self/fd"))
        first = rank.call(train, 1)
        ours = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            assert rank.call(train, 1) == first
        assert len(os.listdir("/proc/self/fd")) == ours
    """)


def test_nested_classes_are_found_by_plain_pickle_in_the_rank() -> None:
    notebook("""
        import dataclasses, pickle
        class Model:
            @dataclasses.dataclass
            class Config:
                lr: float = 0.1
        def train(config):
            assert type(config).__qualname__ == "Model.Config"
            return pickle.loads(pickle.dumps(config)), repr(config)
        config, text = rank.call(train, Model.Config(0.5))
        assert type(config) is Model.Config and config.lr == 0.5
        assert text == "Model.Config(lr=0.5)"
        import threading
        class Server:
            lock = threading.Lock()  # stays, and so does the class
            class Address:
                port = 80
        assert rank.call(lambda address: address.port, Server.Address()) == 80
    """)


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


def test_objects_with_slots_come_back() -> None:
    notebook("""
        import dataclasses, typing
        @dataclasses.dataclass(slots=True, kw_only=True)
        class Point:
            x: int
            y: list = dataclasses.field(default_factory=list)
        class Base:
            __slots__ = ("__hidden", "x")
            def __init__(self):
                self.__hidden = self.x = 1
            def hidden(self):
                return self.__hidden
        class Derived(Base):
            __slots__ = {"y": "Documented."}
        class Open(Derived):
            pass
        class Pair(typing.NamedTuple):
            a: int
        def make(given):
            assert not hasattr(given, "__dict__")
            derived, opened = Derived(), Open()
            derived.y, opened.y, opened.z = 2, 3, 4
            return given, [Point(x=1, y=[2])], derived, opened, Pair(5)
        point = Point(x=7)
        given, points, derived, opened, pair = rank.call(make, point)
        assert (given, points, pair) == (point, [Point(x=1, y=[2])], Pair(5)) and type(given) is Point
        assert (type(derived), derived.hidden(), derived.x, derived.y) == (Derived, 1, 1, 2)
        assert (type(opened), opened.hidden(), opened.y, opened.z) == (Open, 1, 3, 4)
    """)


def test_compiled_function_travels_with_its_settings() -> None:
    notebook("""
        import torch
        graphs = 0
        def backend(graph, inputs):
            global graphs
            graphs += 1
            return graph.forward
        @torch.compile(backend=backend, fullgraph=True)
        def loss(a, b):
            return (a - b).square().mean()
        class Trainer:
            @torch.compile(backend="eager")
            def step(self, x):
                return x + 1
        def train():
            value = loss(torch.ones(2), torch.zeros(2)).item(), Trainer().step(torch.ones(1)).item()
            return value, graphs
        assert rank.call(train) == ((1.0, 2.0), 1)
        assert graphs == 0
    """)
