"""Instances and classes of the notebook keep their identity, there and back."""

from __future__ import annotations

from tests.support.two_mains import notebook


def test_classes_are_found_by_plain_pickle_in_the_rank_and_may_have_slots() -> None:
    notebook("""
        import dataclasses, enum, pickle, threading, typing
        @dataclasses.dataclass
        class Config:
            lr: float = 0.1
        class Color(enum.Enum):
            RED = 1
        class Pair(typing.NamedTuple):
            a: int
        class Model:
            @dataclasses.dataclass
            class Config:
                lr: float = 0.1
        class Server:
            lock = threading.Lock()  # stays, and so does the class
            class Address:
                port = 80
        def helper():
            return 7
        def train(*given):
            copies = pickle.loads(pickle.dumps((*given, helper)))
            assert copies == (*given, helper), copies
            assert type(copies[0]) is Config and copies[-1]() == 7
            assert type(given[-1]).__qualname__ == "Model.Config"
            return *copies[:-1], repr(given[-1])
        config, color, pair, inner, text = rank.call(train, Config(0.5), Color.RED, Pair(3), Model.Config(0.5))
        assert type(config) is Config and config.lr == 0.5
        assert color is Color.RED and type(pair) is Pair
        assert type(inner) is Model.Config and inner.lr == 0.5
        assert text == "Model.Config(lr=0.5)"
        assert rank.call(lambda address: address.port, Server.Address()) == 80

        # Objects with slots come back.
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


def test_objects_come_back_with_the_class_that_was_sent() -> None:
    notebook("""
        # An exception is caught by its class.
        class Stopped(Exception):
            def __init__(self, code, text):
                super().__init__(text)
                self.code = code
        def stop():
            raise Stopped(7, "enough")
        try:
            rank.call(stop)
        except Stopped as exc:
            assert (exc.code, str(exc)) == (7, "enough")
        else:
            raise AssertionError

        # The kernel's class is never modified.
        class Model:
            seen = []
            limit = 1
        def make():
            class Local:
                limit = 1
            return Local
        Local = make()
        def modify(model, local):
            type(model).limit = type(local).limit = 99
            return model, local
        def attributes(cls):  # copyreg keeps a note on every class whose instances are pickled
            return {name: value for name, value in vars(cls).items() if name != "__slotnames__"}
        before = attributes(Model), attributes(Local)
        model, local = rank.call(modify, Model(), Local())
        assert type(model) is Model and type(local) is Local
        assert (attributes(Model), attributes(Local)) == before

        # A class that is defined again is another one.
        class Net: version = 1
        def build():
            return Net()
        First, net = Net, Net()
        assert type(rank.call(build)) is First
        class Net: version = 2
        assert type(rank.call(lambda x: x, net)) is First
        assert type(rank.call(build)) is Net and Net is not First

        # A class that only the rank knows travels by value.
        class Base: pass
        def derive():
            class Local(Base):
                def double(self): return 2 * self.x
            local = Local(); local.x = 4
            return local
        local = rank.call(derive)
        assert local.double() == 8 and isinstance(local, Base)
        assert isinstance(rank.call(lambda v: v, local), type(local))
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
        travel.pack_call(travel.FunctionCall(Local, (), {})).close()  # gives it an id
        kernel_end, rank_end = t.channel_pair()
        if os.fork() == 0:  # a forked rank has the class, but never received it
            Local.limit = 99
            t.Channel(rank_end).send("", [travel.pack_value(Local())])
            os._exit(0)
        _, [fd] = kernel_end.receive()
        os.wait()
        assert type(travel.unpack_value(fd)) is Local and Local.limit == 1
    """)
